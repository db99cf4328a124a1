"""`horovod.spark.run` and `run_elastic`: like `HorovodRunner`, with Horovod's signatures and every rank's result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

from hora.errors import BadCallError, StartTimeoutError
from hora.launch.environment import variables
from hora.launch.job import OutputOptions, Watching
from hora.launch.pickling import pickle_call
from hora.launch.providers.spark.cluster import (
    active_cluster,
    active_context,
    default_num_proc,
    dynamic_limits,
    require_slots,
)
from hora.launch.providers.spark.connect import run_on_cluster
from hora.launch.providers.spark.job import SparkJob, slots_of
from hora.launch.run import renamed


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
    """Call `fn(*args, **kwargs)` on processes of the active Spark cluster; returns results in rank order.

    Args:
        fn: The function that every rank calls; it travels with what it refers to (cloudpickle).
        args: Positional arguments of the function, a tuple.
        kwargs: Keyword arguments of the function, a dict.
        num_proc: How many; by default Spark's default parallelism.
        start_timeout: Seconds within which all tasks must start.
        use_mpi: Accepted for Horovod's sake: refused, because there is no MPI.
        use_gloo: Accepted for Horovod's sake; the engine is Hora's own.
        extra_mpi_args: Accepted for Horovod's sake; there is no MPI.
        env: More variables for the executors' environment.
        stdout: A stream for the ranks' output; by default this process's own.
        stderr: A stream for the ranks' standard error; by default this process's own.
        verbose: 0, 1 or 2: how much the launcher says.
        nics: Names of the interfaces over which ranks talk, as `eth0`.
        prefix_output_with_timestamp: Put the time before every line of the ranks' output.
        executable: The Python of the processes.
    """
    given = locals()
    if use_mpi:
        raise ValueError("use_mpi=True: MPI support has not been built; Hora needs none. Drop use_mpi.")
    cluster = _cluster(fn, active_cluster, "run")
    num_proc = default_num_proc(cluster) if num_proc is None else num_proc
    if isinstance(num_proc, bool) or not isinstance(num_proc, int) or num_proc < 1:
        raise ValueError(f"num_proc must be an integer of at least 1, but it is {num_proc!r}")
    job = _job(given, num_proc=num_proc, title="horovod.spark.run", python=executable)
    try:
        require_slots(cluster, num_proc, limit_s=job.start_timeout_s)
    except ValueError as error:  # the text starts like Horovod's, which callers look for
        raise StartTimeoutError(
            f"Timed out waiting for Spark tasks to start. They can never all run at once, so this did not wait: {error}"
        ) from None
    return run_on_cluster(cluster, job).values()


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
    """Call `fn(*args, **kwargs)` on `num_proc` Spark tasks; returns the results of the last workers in rank order.

    The job continues while at least `min_num_proc` workers are alive and grows to at most `max_num_proc`. By default
    these are `spark.dynamicAllocation.minExecutors` and `maxExecutors`, else `num_proc`. A failed worker fails its
    Spark task, which Spark starts again: `spark.task.maxFailures` must exceed the failures to survive. The function
    uses `hvd.elastic.run`. `min_np` and `max_np` are deprecated names; the other arguments are those of `run`.

    Args:
        start_timeout: Seconds until all ranks must have started.
        elastic_timeout: Elastic: seconds to wait for enough hosts after one was lost.
        reset_limit: Elastic: how many times the job may go on with other ranks before it gives up.
        env: Environment variables of the ranks, a dict.
        stdout: A stream for the ranks' output; by default this process's own.
        stderr: A stream for the ranks' standard error; by default this process's own.
        verbose: 0, 1 or 2: how much the launcher says.
        nics: Names of the interfaces over which ranks talk, as `eth0`.
        prefix_output_with_timestamp: Put the time before every line of the ranks' output.
    """
    given = locals()
    # Imported only here: other jobs start faster without it.
    from hora.launch.providers.spark.elastic import run_elastic_on_spark

    context = _cluster(fn, active_context, "run_elastic")
    num_proc = context.defaultParallelism if num_proc is None else num_proc
    fewest, greatest = dynamic_limits(context)
    least = renamed("min_np", min_np, "min_num_proc", min_num_proc) or min(fewest or num_proc, num_proc)
    most = renamed("max_np", max_np, "max_num_proc", max_num_proc) or max(greatest or num_proc, num_proc)
    if not 1 <= least <= num_proc <= most:
        raise ValueError(
            "1 <= min_num_proc <= num_proc <= max_num_proc must hold, but they are "
            f"min_num_proc={least}, num_proc={num_proc}, max_num_proc={most}"
        )
    job = _job(given, num_proc=num_proc, title="horovod.spark.run_elastic")
    limits: dict[str, Any] = {"min_num_proc": least, "max_num_proc": most, "reset_limit": reset_limit}
    timeout_s = None if elastic_timeout is None else float(elastic_timeout)
    return run_elastic_on_spark(context, job, **limits, elastic_timeout_s=timeout_s).values()


def _cluster(fn: Callable[..., Any], find: Callable[[], Any], caller: str) -> Any:
    if not callable(fn):
        raise BadCallError(f"fn must be a function, but it is {fn!r}")
    cluster = find()
    if cluster is None:
        raise RuntimeError(f"Could not find an active SparkContext: create a SparkSession first, then call {caller}().")
    return cluster


def _job(given: Mapping[str, Any], num_proc: int, **more: Any) -> SparkJob:
    env = {str(name): str(value) for name, value in (given["env"] or {}).items()}
    if given["nics"] is not None:
        env["HOROVOD_GLOO_IFACE"] = ",".join(given["nics"])
    if given["start_timeout"] is not None:
        more["start_timeout_s"] = float(given["start_timeout"])
    timestamp, module = given["prefix_output_with_timestamp"], getattr(given["fn"], "__module__", "") or ""
    # An estimator's function is not the user's.
    name = "" if module.startswith("hora.") else getattr(given["fn"], "__name__", "")
    return SparkJob(
        function_name=name,
        slots=slots_of(num_proc),
        function=pickle_call(given["fn"], given["args"], given["kwargs"]),
        env=env,
        output=OutputOptions(timestamp=timestamp, stdout=given["stdout"], stderr=given["stderr"]),
        bind_gpus=False,
        verbose=given["verbose"] >= 2,
        watching=Watching.wanted(variables()),
        **more,
    )
