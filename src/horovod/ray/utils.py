from hora.ray.interfaces import detect_nics, map_blocking, nics_to_env_var

__all__ = ["detect_nics", "map_blocking", "nics_to_env_var"]
