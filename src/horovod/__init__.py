"""Horovod's import name, provided by Hora. `horovod.torch`, `horovod.run` and `horovodrun` work as before."""

from __future__ import annotations

from typing import Any

from hora.foreign_horovod import warn_if_foreign_horovod as _warn_if_foreign_horovod
from hora.version import HOROVOD_BASELINE
from horovod._modules import install as _serve_old_modules

__all__ = ["run"]

__version__ = HOROVOD_BASELINE  # exactly: packages compare it

_serve_old_modules()
_warn_if_foreign_horovod()


def __getattr__(name: str) -> Any:
    if name == "run":
        from horovod.runner import run

        return run
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")
