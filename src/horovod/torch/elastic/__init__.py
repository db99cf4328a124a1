"""Elastic training under its old name."""

from hora.torch.basics import init, shutdown
from hora.torch.elastic import ElasticSampler, TorchState, run, run_fn
from hora.torch.elastic.loop import reset
from hora.torch.elastic.loop import reset as _reset
from horovod.torch.elastic import sampler, state  # type: ignore[attr-defined]

__all__ = ["ElasticSampler", "TorchState", "init", "reset", "run", "run_fn", "sampler", "shutdown", "state"]
