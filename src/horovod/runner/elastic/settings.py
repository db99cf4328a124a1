"""An elastic job's settings under their old name. Re-exports only."""

from hora.horovod.settings import ElasticSettings

__all__ = ["ElasticSettings"]
