"""`horovod.spark.run`: call a function on the tasks of a Spark cluster and return every rank's result.

The sister of `HorovodRunner` with Horovod's own signature. It checks arguments and reads results;
`hora.launch.spark.launcher` does the work. Re-exported by `horovod.spark`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

import cloudpickle

from hora.errors import BadCallError
from hora.launch.job import OutputOptions
from hora.launch.pickling import pickle_call
from hora.launch.spark.launcher import SparkJob, run_on_spark
from hora.launch.spark.variables import start_timeout_s

__all__ = ["run"]


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = {},
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: IO[Any] | None = None,
    stderr: IO[Any] | None = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `num_proc` processes of the active Spark cluster; results in rank order.

    `num_proc`: Spark's default parallelism unless given. `start_timeout`: seconds until all tasks must have
    started. `env`: variables for the processes, on top of their executors' environment. `executable`: their
    Python.
    """
    from hora.launch.spark.session import active_context

    if use_mpi:
        raise ValueError("use_mpi=True: MPI support has not been built; Hora needs none. Drop use_mpi.")
    if not callable(fn):
        raise BadCallError(f"fn must be a function, but it is {fn!r}")
    context = active_context()
    if context is None:
        raise RuntimeError("Could not find an active SparkContext: create a SparkSession first, then call run().")
    num_proc = context.defaultParallelism if num_proc is None else num_proc
    if isinstance(num_proc, bool) or not isinstance(num_proc, int) or num_proc < 1:
        raise ValueError(f"num_proc must be an integer of at least 1, but it is {num_proc!r}")
    timeout_s = start_timeout_s() if start_timeout is None else float(start_timeout)
    extra = {} if nics is None else {"HOROVOD_GLOO_IFACE": ",".join(nics)}
    outcome = run_on_spark(
        context,
        SparkJob(
            function=pickle_call(fn, args, kwargs),
            num_proc=num_proc,
            group="horovod.spark.run",
            env={str(name): str(value) for name, value in (env or {}).items()} | extra,
            output=OutputOptions(
                timestamp=prefix_output_with_timestamp,
                stdout=sys.stdout if stdout is None else stdout,
                stderr=sys.stderr if stderr is None else stderr,
            ),
            start_timeout_s=timeout_s,
            bind_gpus=False,
            executable=executable,
            verbose=verbose >= 2,
        ),
    )
    return [cloudpickle.loads(result) for result in outcome.results]
