from hora.ray.adapter import Adapter, BaseParams

__all__ = ["Adapter", "BaseParams"]
