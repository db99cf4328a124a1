from hora.ray.coordinator import Coordinator
from hora.ray.executor import RayExecutor
from hora.ray.settings import MiniSettings
from hora.ray.static import StaticAdapter, StaticParams, logger

__all__ = ["Coordinator", "MiniSettings", "RayExecutor", "StaticAdapter", "StaticParams", "logger"]
