"""Time limits under their old name. Re-exports only."""

from hora.horovod.timeout import Timeout, TimeoutException

__all__ = ["Timeout", "TimeoutException"]
