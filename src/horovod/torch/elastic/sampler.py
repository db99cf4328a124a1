"""The elastic sampler under its old name."""

from hora.torch.elastic.sampler import ElasticSampler

__all__ = ["ElasticSampler"]
