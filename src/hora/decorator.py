"""`distributed`: a decorator whose functions run here or on the ranks of any launcher.

Users know it as `hora.distributed`. Spark and Ray are imported only by a call that uses them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar

from hora.launch.environment import variables
from hora.launch.run import run
from hora.platforms import slurm

P = ParamSpec("P")
T = TypeVar("T")
_LAUNCHERS = ("local", "ssh", "slurm", "spark", "ray")


def distributed(
    *, num_processes: int, on: str = "local", **options: Any
) -> Callable[[Callable[P, T]], Distributed[P, T]]:
    """Decorate a function, so that `f.distributed(x)` calls it on ranks; `f(x)` still calls it here.

    `f.distributed` returns the list of the ranks' values, in rank order.

    Args:
        num_processes: How many ranks call it.
        on: "local", "ssh" (with `hosts="a:4,b:4"`), "slurm" (inside an allocation), "spark" (the active session),
            "ray".
        options: Passed to `horovod.run`, `horovod.spark.run` or `RayExecutor`.

    Raises:
        ValueError: An argument is invalid.
    """
    if on not in _LAUNCHERS:
        raise ValueError(f"on must be one of {', '.join(_LAUNCHERS)}, but it is {on!r}")
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
    """A function that can be called here or on ranks."""

    def __init__(self, function: Callable[P, T], num_processes: int, on: str, options: Mapping[str, Any]) -> None:
        self._function, self._num_processes, self._on, self._options = function, num_processes, on, options
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._function(*args, **kwargs)

    def distributed(self, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Return every rank's value, in rank order."""
        n, options = self._num_processes, self._options
        if self._on == "ray":
            from hora.ray.executor import RayExecutor

            with RayExecutor(RayExecutor.create_settings(), num_workers=n, **options) as executor:
                executor.start()
                return list(executor.run(self._function, args=list(args), kwargs=dict(kwargs)))
        if self._on == "slurm" and not slurm.job(variables()):
            raise RuntimeError('on="slurm" works inside an allocation: salloc --nodes=2 --ntasks-per-node=4 python …')
        if self._on == "spark":
            from hora.spark.run import run as run_on_spark

            return list(run_on_spark(self._function, args=args, kwargs=kwargs, num_proc=n, **options))
        return list(run(self._function, args=args, kwargs=kwargs, num_proc=n, **options))
