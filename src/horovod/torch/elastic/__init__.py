"""Elastic training under its old name."""

from hora.torch.elastic import ElasticSampler, TorchState, run, run_fn
from hora.torch.elastic.loop import reset
from horovod.torch.elastic import sampler, state

__all__ = ["ElasticSampler", "TorchState", "reset", "run", "run_fn", "sampler", "state"]
