"""`horovod.runner`: `run` a function on several processes, or use `horovodrun` (`horovod.runner.launch`)."""

from __future__ import annotations

from typing import Any

from hora.cli.run import HorovodArgs as _HorovodArgs

__all__ = ["run"]


def __getattr__(name: str) -> Any:
    if name == "run":
        from hora.launch.run import run

        return run
    raise AttributeError(f"module 'horovod.runner' has no attribute {name!r}")
