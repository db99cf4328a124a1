"""`horovod.ray`, of which the parts are in `hora.ray`."""

import sys

from hora.ray import ray_logger
from hora.ray.elastic_executor import ElasticRayExecutor
from hora.ray.executor import RayExecutor
from hora.ray.worker import BaseHorovodWorker

sys.modules[f"{__name__}.ray_logger"] = ray_logger  # one module: what it was configured with is in it

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "RayExecutor"]
