from hora.ray.worker import BaseHorovodWorker

__all__ = ["BaseHorovodWorker"]
