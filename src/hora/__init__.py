"""Hora runs Horovod code on today's frameworks. Import `horovod.torch` as before.

`hora.run` calls a function on ranks; `@hora.distributed(…)` turns a function into one that runs there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hora.launch.run import distributed, run
    from hora.telemetry import report
    from hora.torch.plan import plan

__all__ = ["distributed", "plan", "report", "run"]


def __getattr__(name: str) -> Any:
    # Lazy: `import hora` must cost nothing, because every worker process pays for it.
    if name == "run":
        from hora.launch.run import run

        return run
    if name == "distributed":
        from hora.launch.run import distributed

        return distributed
    if name == "report":
        from hora.telemetry import report

        return report
    if name == "plan":
        from hora.torch.plan import plan

        return plan
    if name == "__version__":
        from hora.version import version

        return version()
    raise AttributeError(f"module 'hora' has no attribute {name!r}")
