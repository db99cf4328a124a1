"""Processes of an estimator's training function: a backend calls it on every process and returns every rank's value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["Backend", "SparkBackend", "default_num_proc"]


class Backend:
    """Interface that runs an estimator's training on processes. Users may bring their own."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every process; values in rank order."""
        raise NotImplementedError

    def num_processes(self) -> int:
        """Return how many processes `run` uses."""
        raise NotImplementedError


class SparkBackend(Backend):
    """The tasks of the active Spark cluster, through `horovod.spark.run`; further arguments are that function's.

    With `min_num_proc` or `max_num_proc` through `horovod.spark.run_elastic`: the training goes on when tasks are lost.
    """

    def __init__(self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        self._num_proc = default_num_proc() if num_proc is None else num_proc
        self._env = env
        self._kwargs = kwargs
        self._is_elastic = not kwargs.keys().isdisjoint(("min_num_proc", "max_num_proc"))

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        from hora.spark.run import run, run_elastic

        variables = dict(self._env or {}) | dict(env or {})
        call: Callable[..., list[Any]] = run_elastic if self._is_elastic else run
        return call(fn, args=args, kwargs=kwargs or {}, num_proc=self.num_processes(), env=variables, **self._kwargs)

    def num_processes(self) -> int:
        return self._num_proc


def default_num_proc() -> int:
    """As many processes as Spark would use by default: its default parallelism."""
    from hora.launch.providers.spark import cluster

    found = cluster.active_cluster()
    if found is None:
        raise RuntimeError("Could not find an active SparkContext: create a SparkSession first, or give num_proc.")
    return cluster.default_num_proc(found)
