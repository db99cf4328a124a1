"""Hora runs Horovod code on today's frameworks. Import `horovod.torch` as before.

`hora.run` calls a function on ranks; `@hora.distributed(…)` turns a function into one that runs there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hora.decorator import distributed
    from hora.launch.run import run
    from hora.telemetry.report import report
    from hora.torch.capacity_plan import plan

__all__ = ["distributed", "plan", "report", "run"]


_MODULES = {
    "distributed": "hora.decorator",
    "plan": "hora.torch.capacity_plan",
    "report": "hora.telemetry.report",
    "run": "hora.launch.run",
}


def __getattr__(name: str) -> Any:
    # Lazy: `import hora` must cost nothing, because every worker process pays for it.
    import importlib

    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if name == "__version__":
        return importlib.import_module("hora.version").version()
    raise AttributeError(f"module 'hora' has no attribute {name!r}")
