"""`HorovodRunner`: run a training function on the processes of a Spark cluster, or of this machine.

Users import it as `sparkdl.HorovodRunner`. `hora.launch.run.run` does the same for other launchers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import cloudpickle

from hora.errors import BadCallError, JobFailedError
from hora.launch.environment import variables
from hora.launch.job import Job, JobResult, OutputOptions, Watching
from hora.launch.options import Options
from hora.launch.pickling import pickle_call
from hora.launch.providers.spark.cluster import (
    check_profile,
    cluster_or_new,
    forwarded_variables,
    is_connect,
    require_slots,
)
from hora.launch.providers.spark.connect import run_on_cluster
from hora.launch.providers.spark.job import SparkJob, slots_of
from hora.launch.providers.spark.py_files import advice, checked, local_path, send
from hora.launch.start import start
from hora.platforms.detect import detect_world

_ELASTIC_ROOM = "hora.torch.elastic"
T = TypeVar("T", bound=Job)
_VERBOSITIES = ("log_callback_only", "all")


def is_elastic(main: Callable[..., Any], kwargs: Mapping[str, Any] | None = None) -> bool:
    """Return whether `main(**kwargs)`, or a function of its module that it uses, runs an elastic loop."""
    declared = getattr(main, "elastic", None)
    if isinstance(declared, bool):
        return declared
    names: set[str] = set()
    home = {function.__module__ for function in _functions(main)}
    waiting: list[object] = [main, *(kwargs or {}).values()]
    read: set[types.CodeType] = set()
    while waiting:
        value = waiting.pop()
        if _is_ours(value):
            names.add("elastic")
        for function in _functions(value):
            if function.__code__ not in read and function.__module__ in home:
                read.add(function.__code__)
                used = set(_used(function.__code__))
                names |= {part for name in used for part in name.split(".")}
                waiting += [function.__globals__[name] for name in used if name in function.__globals__]
                for cell in function.__closure__ or ():
                    with contextlib.suppress(ValueError):  # a variable without a value yet
                        waiting.append(cell.cell_contents)
    return "elastic" in names and any(name.endswith("State") for name in names)


def _is_ours(value: object) -> bool:
    """Return whether this is an object of `hvd.elastic`, or a function that its decorator has wrapped."""
    if isinstance(value, types.FunctionType):
        defined_in = value.__globals__.get("__name__")
    elif isinstance(value, types.ModuleType):
        defined_in = value.__name__
    else:  # the class, not the object: an object may return anything as its attributes
        defined_in = (value if isinstance(value, type) else type(value)).__module__
    return str(defined_in).startswith(_ELASTIC_ROOM)


def _functions(value: object) -> Iterator[types.FunctionType]:
    """Yield the Python functions that a call of this value may run: itself, wrapped functions, methods of its class."""
    if isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _functions(part)
    elif isinstance(value, types.MethodType):
        yield from _functions(value.__func__)
        yield from _functions(type(value.__self__))
    elif isinstance(value, types.FunctionType):
        yield value
        yield from _functions(getattr(value, "__wrapped__", None))
    elif callable(value):
        kind = value if isinstance(value, type) else type(value)
        yield from (method for method in vars(kind).values() if isinstance(method, types.FunctionType))


def _used(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals, attributes and imports in a function's code and in nested functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _used(constant)


class HorovodRunner:
    """Runs a function on `np` Horovod processes and returns rank 0's value.

    `np > 0`: that many tasks of one Spark stage. `np < 0`: `-np` processes on this machine, without Spark; `-1` calls
    the function in this process. `np = 0` (deprecated): one process per task slot of the cluster. A function that uses
    `hvd.elastic.run` continues when Spark loses an executor; set `main.elastic = True` (or `False`) if its code does
    not show it. `driver_log_verbosity`: `"all"` shows every line that the processes print, `"log_callback_only"` only
    messages sent with `log_to_driver`, and in a notebook or terminal a line of progress. `dashboard=True` serves a live
    page of the job and shows its address. `py_files`: modules (`.py`), folders of packages, and archives (`.zip`,
    `.egg`, `.whl`) that only the driver has.
    `resources`: a `pyspark.resource.ResourceProfile` for the tasks, if they need others than Spark's settings say.
    """

    # No annotations on these two methods: callers inspect the signatures.
    def __init__(  # type: ignore[no-untyped-def]  # noqa: ANN204
        self,
        *,
        np,  # noqa: ANN001
        driver_log_verbosity="log_callback_only",  # noqa: ANN001
        dashboard=None,  # noqa: ANN001
        py_files=None,  # noqa: ANN001
        resources=None,  # noqa: ANN001
    ):
        if isinstance(np, bool) or not hasattr(np, "__index__"):
            raise ValueError(f"np must be an integer (2: two Spark tasks, -2: two local processes), but it is {np!r}")
        if driver_log_verbosity not in _VERBOSITIES:
            raise ValueError(
                f"driver_log_verbosity must be 'log_callback_only' or 'all', but it is {driver_log_verbosity!r}"
            )
        self.num_processor = operator.index(np)  # also numpy's integers
        self._driver_log_verbosity = driver_log_verbosity
        self._dashboard = dashboard
        self._py_files = checked(py_files)
        self._resources = resources

    def run(self, main, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN003, ANN201
        """Call `main(**kwargs)` on every process and return rank 0's value (anything cloudpickle supports)."""
        _check_call(main, kwargs)
        if self.num_processor < 0:  # ranks of this machine have the driver's path
            sys.path.extend(path for path in local_path(self._py_files) if path not in sys.path)
        if self.num_processor == -1:
            return main(**kwargs)
        if self.num_processor < 0:
            title = getattr(main, "__name__", "")
            options = {"num_proc": -self.num_processor, "dashboard": self._dashboard}
            shows = partial(_with_progress, shown=not self._shows_all)
            return value_of_rank_0(run_local(main, (), kwargs, title, variables(), adjust=shows, **options))
        if self.num_processor == 0:
            warnings.warn(
                "np=0 is deprecated: it takes every task slot of the cluster; use np=<number of processes>",
                DeprecationWarning,
                stacklevel=2,
            )
        options = {"stream_output": self._shows_all, "dashboard": self._dashboard, "py_files": self._py_files}
        options["resources"] = self._resources
        return _run_on_spark(main, kwargs, self.num_processor, **options)

    @property
    def _shows_all(self) -> bool:
        return bool(self._driver_log_verbosity == "all")


def run_local(
    main: Callable[..., Any],
    args: Iterable[Any],
    kwargs: Mapping[str, Any],
    title: str,
    environ: Mapping[str, str],
    *,
    adjust: Callable[[Job], Job] = lambda job: job,
    **options: Any,
) -> JobResult:
    """Run on this machine. The processes' output goes to this process's output: a cell, a terminal."""
    function = pickle_for_rank_0(main, args, kwargs)

    def titled(job: Job) -> Job:
        return adjust(replace(job, title=title))

    return start(Options.filled(environ, **options), environ, function=function, adjust=titled)


def _with_progress(job: T, *, shown: bool) -> T:
    return replace(job, watching=Watching.with_progress(job.watching)) if shown else job


def _run_on_spark(
    main: Callable[..., Any],
    kwargs: Mapping[str, Any],
    num_proc: int,
    *,
    stream_output: bool,
    dashboard: bool | None,
    py_files: tuple[str, ...],
    resources: Any,
) -> Any:
    elastic = is_elastic(main, kwargs)
    function = pickle_call(main, kwargs=kwargs) if elastic else pickle_for_rank_0(main, (), kwargs)
    cluster = cluster_or_new()
    if resources is not None:
        check_profile(cluster, resources)
    send(cluster, py_files)
    num_slots = require_slots(cluster, num_proc, resources=resources)
    job = SparkJob(
        function=function,
        slots=slots_of(num_proc or num_slots),
        title="HorovodRunner",
        function_name=getattr(main, "__name__", ""),
        env=({"HORA_ELASTIC_PER_STEP": "1"} if elastic else {}) | forwarded_variables(),
        output=OutputOptions(console=stream_output),
        wait_for_slots=True,
        resources=resources,
        watching=Watching.wanted(variables(), page=dashboard),
    )
    job = _with_progress(job, shown=not stream_output)
    try:
        if elastic and not is_connect(cluster):  # Connect's stage keeps its size
            # The job continues on the remaining tasks while Spark replaces the others.
            from hora.launch.providers.spark.elastic import run_elastic_on_spark

            return value_of_rank_0(run_elastic_on_spark(cluster, job, min_num_proc=1, max_num_proc=job.num_proc))
        return value_of_rank_0(run_on_cluster(cluster, job))
    except JobFailedError as error:
        if error.args:
            error.advice = advice(error.__cause__)
            error.args = (f"{error}{error.advice}", *error.args[1:])
        raise


def _call_for_rank_0(main: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call the function and drop the values of other ranks, which `run` does not return."""
    value = main(*args, **kwargs)
    return value if detect_world().rank == 0 else None


def pickle_for_rank_0(main: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Return the pickle of a call of which only rank 0's value is wanted."""
    return pickle_call(partial(_call_for_rank_0, main), args, kwargs)


def value_of_rank_0(result: JobResult) -> Any:
    value = result.results[0]
    assert value is not None, "a function's job without a result"
    return cloudpickle.loads(value)


def _check_call(main: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise BadCallError if `main(**kwargs)` cannot be called, before any rank starts."""
    if not callable(main):
        raise BadCallError(f"main must be a function, but it is {main!r}")
    try:
        signature = inspect.signature(main)
    except (TypeError, ValueError):  # a builtin without a signature: the call itself reports the error
        return
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        name = getattr(main, "__name__", repr(main))
        given = ", ".join(kwargs) or "no keywords"
        raise BadCallError(
            f"{name}{signature} cannot be called with {given}: {error}; pass its arguments to run()"
        ) from None
