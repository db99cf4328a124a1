"""`@hora.distributed`: a function that can also be called on every rank of a job, wherever that runs.

It only chooses who starts the job: `run` for this machine, ssh and Slurm; Spark's and Ray's own starters, which stand
above this package and are found by their names.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

from hora.launch.environment import variables
from hora.launch.run import run

__all__ = ["Distributed", "distributed"]

P = ParamSpec("P")
T = TypeVar("T")
Starter = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any], int, Mapping[str, Any]], list[Any]]


def distributed(
    *, num_processes: int, on: str = "local", **options: Any
) -> Callable[[Callable[P, T]], Distributed[P, T]]:
    """Make a function of it that `f.distributed(x)` calls on `num_processes` ranks, for the list of their values in
    rank order; `f(x)` still calls it here.

    `on`: `local`, `ssh` (with `hosts="a:4,b:4"`), `slurm` (inside an allocation), `spark` (the active session), `ray`.
    `options`: for what starts the job there, `horovod.run`, `horovod.spark.run` or `RayExecutor`.
    """
    if on not in _STARTERS:
        raise ValueError(f"on must be one of {', '.join(_STARTERS)}, but it is {on!r}")
    if isinstance(num_processes, bool) or not isinstance(num_processes, int) or num_processes < 1:
        raise ValueError(f"num_processes must be a whole number, at least 1, but it is {num_processes!r}")
    if on == "ssh" and not (options.get("hosts") or options.get("hostfile") or options.get("host_discovery_script")):
        raise ValueError('on="ssh" needs hosts="a:4,b:4", a hostfile or a host_discovery_script')

    def decorate(function: Callable[P, T]) -> Distributed[P, T]:
        if not callable(function):
            raise ValueError(f"@hora.distributed(…) goes above a function, but it was given {function!r}")
        return Distributed(function, num_processes, on, options)

    return decorate


class Distributed(Generic[P, T]):
    """A function, here and on ranks."""

    def __init__(self, function: Callable[P, T], num_processes: int, on: str, options: Mapping[str, Any]) -> None:
        self._function, self._num_processes, self._on, self._options = function, num_processes, on, options
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._function(*args, **kwargs)

    def distributed(self, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Every rank's value, in rank order."""
        return _STARTERS[self._on](self._function, args, kwargs, self._num_processes, self._options)


def _by_run(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], n: int, options: Mapping[str, Any]
) -> list[Any]:
    return run(function, args, kwargs, num_proc=n, **options)


def _in_an_allocation(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], n: int, options: Mapping[str, Any]
) -> list[Any]:
    if not variables().get("SLURM_JOB_ID"):
        raise RuntimeError('on="slurm" works inside an allocation: salloc --nodes=2 --ntasks-per-node=4 python …')
    return run(function, args, kwargs, num_proc=n, **options)


def _on_spark(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], n: int, options: Mapping[str, Any]
) -> list[Any]:
    values: list[Any] = _named("hora.spark.run", "run")(function, args=args, kwargs=kwargs, num_proc=n, **options)
    return values


def _on_ray(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], n: int, options: Mapping[str, Any]
) -> list[Any]:
    executor_type = _named("horovod.ray", "RayExecutor")
    executor = executor_type(executor_type.create_settings(), num_workers=n, **options)
    executor.start()
    try:
        values: list[Any] = executor.run(function, args=list(args), kwargs=dict(kwargs))
    finally:
        executor.shutdown()
    return values


def _named(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


_STARTERS: dict[str, Starter] = {
    "local": _by_run,
    "ssh": _by_run,
    "slurm": _in_an_allocation,
    "spark": _on_spark,
    "ray": _on_ray,
}
