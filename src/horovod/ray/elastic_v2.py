from ray.exceptions import GetTimeoutError

from hora.ray.discovery import RayHostDiscovery, TestDiscovery
from hora.ray.elastic import ElasticAdapter, ElasticParams

__all__ = ["ElasticAdapter", "ElasticParams", "GetTimeoutError", "RayHostDiscovery", "TestDiscovery"]
