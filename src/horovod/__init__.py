"""Horovod's import name, kept alive by Hora. `horovod.torch`, `horovod.run` and `horovodrun` work as ever."""

from __future__ import annotations

from typing import Any

__all__ = ["run"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from hora.version import horovod_version

        return horovod_version()
    if name == "run":
        from horovod.runner import run

        return run
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")
