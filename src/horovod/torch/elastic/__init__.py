"""Elastic training under its old name."""

from hora.torch.elastic import ElasticSampler, TorchState, run
from horovod.torch.elastic import sampler, state

__all__ = ["ElasticSampler", "TorchState", "run", "sampler", "state"]
