"""`horovod.ray`; the implementation is in `hora.ray`."""

from hora.ray.datasets import get_dataset_shard
from hora.ray.elastic import ElasticRayExecutor
from hora.ray.executor import RayExecutor
from hora.ray.strategy import BaseHorovodWorker

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "RayExecutor", "get_dataset_shard"]
