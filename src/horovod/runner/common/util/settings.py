"""A launcher's settings under their old name. Re-exports only."""

from hora.horovod.settings import BaseSettings, Settings

__all__ = ["BaseSettings", "Settings"]
