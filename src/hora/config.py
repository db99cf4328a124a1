"""The engine's settings: parses the `HOROVOD_*` run-time variables.

They are read at `hvd.init()`, not at import, because scripts set these variables in `os.environ` first. Launcher
settings are elsewhere: `hora.launch.options` turns flags into the same variables. `on_databricks`, `in_notebook` tell
where a process runs, `accept_risk` whether an unsafe operation is allowed.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields
from typing import Any, NamedTuple, cast

from hora.spelling import did_you_mean

_VERY_CLOSE = 0.88  # as close as a misspelt variable is; others are not ours
_ALLOCATOR = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def _var(name: str, default: Any, meaning: str, what: str = "", parse: Callable[[str], Any] = str) -> Any:
    """The setting of a variable. `what`: of a number its unit, of a text what it is."""
    if isinstance(default, bool):
        what, parse = "0 or 1", lambda text: int(text) > 0
    elif isinstance(default, int | float):
        what, parse = f"a number of {what} ≥ 0", lambda text: _not_negative(type(default)(text))
    return field(default=default, metadata={"variable": name, "parse": parse, "what": what, "meaning": meaning})


def _not_negative(number: float) -> float:
    if number < 0:
        raise ValueError("negative")
    return number


def _range_of_ports(text: str) -> range:
    first, dash, last = text.partition("-")
    low, high = int(first), int(last if dash else first)
    if not 0 < low <= high < 2**16:
        raise ValueError(text)
    return range(low, high + 1)


def _choice(name: str, choices: tuple[str, ...], meaning: str) -> Any:
    """One of these words; the first is the default."""
    what = f"{', '.join(choices[:-1])} or {choices[-1]}"
    return _var(name, choices[0], meaning, what, lambda text: choices[choices.index(text)])


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one runtime. If ranks must agree on a value, all use rank 0's."""

    fusion_threshold_bytes: int = _var(
        "HOROVOD_FUSION_THRESHOLD", 128 * 2**20, "largest fused batch of small tensors; 0: no fusion", "bytes"
    )
    cache_capacity: int = _var("HOROVOD_CACHE_CAPACITY", 1024, "entries of the response cache; 0: no cache", "entries")
    disable_group_fusion: bool = _var(
        "HOROVOD_DISABLE_GROUP_FUSION", False, "do not fuse grouped operations with others"
    )
    dynamic_process_sets: bool = _var("HOROVOD_DYNAMIC_PROCESS_SETS", False, "allow new process sets after hvd.init()")
    timeline: str = _var(
        "HOROVOD_TIMELINE", "", "write a Chrome trace to this file, on rank 0", "a file path or DYNAMIC"
    )
    timeline_mark_cycles: bool = _var("HOROVOD_TIMELINE_MARK_CYCLES", False, "mark the engine's cycles in the timeline")
    stall_check_disable: bool = _var("HOROVOD_STALL_CHECK_DISABLE", False, "do not report ranks that stall")
    stall_warning_s: float = _var("HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0, "report a stall after this time", "seconds")
    stall_shutdown_s: float = _var(
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0, "end the job after a stall of this length; 0: never", "seconds"
    )
    init_timeout_s: float = _var(
        "HOROVOD_GLOO_TIMEOUT_SECONDS", 120.0, "time limit for the ranks' rendezvous in hvd.init()", "seconds"
    )
    interface: str = _var(
        "HOROVOD_GLOO_IFACE", "", "network interface for tensors between hosts", "a network interface"
    )
    log_level: str = _var("HOROVOD_LOG_LEVEL", "warning", "lowest level to log", "a log level")
    full_traceback: bool = _var(
        "HORA_FULL_TRACEBACK", False, "show the traceback of every rank that fails, with the frames of Hora"
    )
    log_hide_time: bool = _var("HOROVOD_LOG_HIDE_TIME", False, "log without timestamps")
    thread_affinity: tuple[int, ...] = _var(
        "HOROVOD_THREAD_AFFINITY",
        (),
        "cores to pin the engine's threads to",
        "a comma list of core numbers, one per local rank",
        lambda text: tuple(int(_not_negative(int(core))) for core in text.split(",")),
    )
    transport: str = _choice("HORA_TRANSPORT", ("auto", "tcp"), "tcp: use sockets also between ranks of one host")
    ports: range = _var(
        "HORA_PORTS",
        range(0),
        "listen at these TCP ports only (default: at ports that the system chooses)",
        "ports from 1 to 65535, as 20000-20100, the smaller one first",
        _range_of_ports,
    )
    encrypt: str = _choice(
        "HORA_ENCRYPT", ("auto", "always", "never"), "encrypt tensors between hosts; never: only on a trusted network"
    )
    native: bool = _var("HORA_NATIVE", True, "0: do not use the native part")
    cuda_ipc: bool = _var("HORA_CUDA_IPC", True, "0: ranks that share a GPU use host memory")
    keep_freed_memory: bool = _var("HORA_KEEP_FREED_MEMORY", True, "keep freed memory for the next step")
    autotune: bool = _var("HOROVOD_AUTOTUNE", False, "tune the reduction during the first steps")
    autotune_log: str = _var(
        "HOROVOD_AUTOTUNE_LOG", "", "write the trials and the best setting to this CSV file", "a file path"
    )
    autotune_warmup_samples: int = _var("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", 3, "trials that are not counted", "trials")
    autotune_steps_per_sample: int = _var("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", 10, "steps per trial", "steps")
    autotune_max_samples: int = _var("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", 20, "largest number of trials", "trials")
    telemetry_s: float = _var("HORA_TELEMETRY_S", 0.0, "interval of the ranks' reports; set by the launcher", "seconds")
    elastic_per_step: bool = _var(
        "HORA_ELASTIC_PER_STEP", False, "elastic states recover by the step, as with per_step=True"
    )
    nan_check: bool = _var("HORA_NAN_CHECK", False, "check every gradient for NaN and infinity")
    plan: bool = _var("HORA_PLAN", False, "set by hora plan")
    lifeline: str = _var("HORA_LIFELINE", "", "set by the agent", "a file of the agent's")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> EngineConfig:
        """Read the variables. Raises ValueError with the variable, its allowed values and its value."""
        env = os.environ if environ is None else environ
        values = {item.name: _read(item, env) for item in fields(cls) if env.get(item.metadata["variable"])}
        if any(name in env for name in _ALLOCATOR) or "glibc.malloc." in env.get("GLIBC_TUNABLES", ""):
            values.setdefault("keep_freed_memory", False)  # the user has configured the allocator
        return cls(**values)


def _read(setting: Field[Any], env: Mapping[str, str]) -> Any:
    """Return the value of a setting's variable; an unset one has the default."""
    variable, what = setting.metadata["variable"], setting.metadata["what"]
    text = env.get(variable)
    try:
        return setting.metadata["parse"](text) if text else setting.default
    except ValueError:
        raise ValueError(f"{variable} must be {what}, but it is {text!r}") from None


def allowed_ports(environ: Mapping[str, str] | None = None) -> range:
    """Return the ports at which this process may listen; empty if the user allows all. Raises ValueError."""
    return cast(range, _read(EngineConfig.__dataclass_fields__["ports"], os.environ if environ is None else environ))


class Reporting(NamedTuple):
    """Settings of `hora.report` in variables; `to` is None if there are none. `run_id`: the job's MLflow run."""

    to: str | None
    each_rank: bool
    run_id: str


def reporting() -> Reporting:
    """Read HORA_REPORT, HORA_REPORT_RANKS and MLflow's variable of a run."""
    ranks = os.environ.get("HORA_REPORT_RANKS", "")
    if ranks not in ("", "0", "all"):
        raise ValueError(f"HORA_REPORT_RANKS must be 0 (rank 0 reports) or all, but it is {ranks!r}")
    return Reporting(os.environ.get("HORA_REPORT") or None, ranks == "all", os.environ.get("MLFLOW_RUN_ID", ""))


def misspelt_variables(environ: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield a warning for each variable that is very close to one of the engine's."""
    env = os.environ if environ is None else environ
    known = [item.metadata["variable"] for item in fields(EngineConfig)]
    for name in sorted(env):
        if name.startswith(("HORA_", "HOROVOD_")) and name not in known:
            hint = did_you_mean(name, known, cutoff=_VERY_CLOSE)
            if hint:
                yield f"the variable {name} has no effect{hint}"


def on_databricks() -> bool:
    """Return whether this process runs in a Databricks cluster, which mounts its file system at /dbfs."""
    return bool(os.environ.get("DATABRICKS_RUNTIME_VERSION"))


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


def accept_risk(text: str, *, warn: bool = True) -> None:
    """Warn (if `warn`) about an unprotected operation; with HORA_STRICT=1 raise ValueError instead."""
    if strict():
        raise ValueError(f"refused because of HORA_STRICT=1: {text}")
    if warn:
        logging.getLogger("hora").warning("%s; HORA_STRICT=1 refuses this", text)


def strict() -> bool:
    """Return whether the user rejects every risk: HORA_STRICT=1."""
    return _switch("HORA_STRICT")


def trusts_files() -> bool:
    """Return whether the user trusts files that can run code: HORA_TRUST_FILES=1, and not HORA_STRICT=1."""
    return _switch("HORA_TRUST_FILES") and not strict()


def _switch(name: str) -> bool:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name} must be 0 or 1, but it is {value!r}")
    return value == "1"


@contextmanager
def changed_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set these variables inside the block, for libraries that only read the environment; restore them afterwards."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(before)
