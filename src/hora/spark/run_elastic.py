"""`horovod.spark.run_elastic`: a function on Spark tasks that come and go; the training goes on with those there are.

Checks arguments and reads results; `hora.launch.spark.elastic` does the work. The function uses `hvd.elastic.run`.
Re-exported by `horovod.spark`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

import cloudpickle

from hora.errors import BadCallError
from hora.launch.job import OutputOptions
from hora.launch.pickling import pickle_call
from hora.launch.spark.launcher import SparkJob
from hora.launch.spark.variables import elastic_timeout_s, start_timeout_s

__all__ = ["run_elastic"]


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = {},
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: IO[Any] | None = None,
    stderr: IO[Any] | None = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `num_proc` Spark tasks; results of the last workers in rank order.

    The job goes on while at least `min_num_proc` workers live and takes in up to `max_num_proc` (both are `num_proc`
    unless given). A worker that fails fails its Spark task, which Spark starts again: `spark.task.maxFailures` must
    exceed the failures to be survived. `min_np` and `max_np` are deprecated names.
    """
    from hora.launch.control.elastic_policy import Limits
    from hora.launch.spark.elastic import run_elastic_on_spark
    from hora.launch.spark.session import active_context

    if not callable(fn):
        raise BadCallError(f"fn must be a function, but it is {fn!r}")
    context = active_context()
    if context is None:
        raise RuntimeError(
            "Could not find an active SparkContext: create a SparkSession first, then call run_elastic()."
        )
    num_proc = context.defaultParallelism if num_proc is None else num_proc
    least = _renamed("min_np", min_np, "min_num_proc", min_num_proc) or num_proc
    most = _renamed("max_np", max_np, "max_num_proc", max_num_proc) or num_proc
    if not 1 <= least <= num_proc <= most:
        raise ValueError(
            "1 <= min_num_proc <= num_proc <= max_num_proc must hold, but they are "
            f"min_num_proc={least}, num_proc={num_proc}, max_num_proc={most}"
        )
    timeout_s = elastic_timeout_s() if elastic_timeout is None else float(elastic_timeout)
    job = SparkJob(
        function=pickle_call(fn, args, kwargs),
        num_proc=num_proc,
        group="horovod.spark.run_elastic",
        env={str(name): str(value) for name, value in (env or {}).items()}
        | ({} if nics is None else {"HOROVOD_GLOO_IFACE": ",".join(nics)}),
        output=OutputOptions(
            timestamp=prefix_output_with_timestamp,
            stdout=sys.stdout if stdout is None else stdout,
            stderr=sys.stderr if stderr is None else stderr,
        ),
        start_timeout_s=start_timeout_s() if start_timeout is None else float(start_timeout),
        bind_gpus=False,
        verbose=verbose >= 2,
    )
    limits = Limits(
        num_proc=num_proc,
        min_num_proc=least,
        max_num_proc=most,
        reset_limit=reset_limit,
        elastic_timeout_s=timeout_s,
        stuck_s=max(timeout_s / 2, 1.0),
    )
    return [
        cloudpickle.loads(value) for value in run_elastic_on_spark(context, job, limits).results if value is not None
    ]


def _renamed(old: str, old_value: int | None, new: str, new_value: int | None) -> int | None:
    if old_value is None:
        return new_value
    warnings.warn(f"{old} is deprecated, say {new}", DeprecationWarning, stacklevel=3)
    return old_value
