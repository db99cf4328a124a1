from ray.exceptions import GetTimeoutError

from hora.ray.discovery import RaySlotDiscovery as RayHostDiscovery
from hora.ray.discovery import TestDiscovery
from hora.ray.elastic_executor import ElasticRayExecutor

__all__ = ["ElasticRayExecutor", "GetTimeoutError", "RayHostDiscovery", "TestDiscovery"]
