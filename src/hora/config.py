"""The engine's settings: parses the `HOROVOD_*` run-time variables.

They are read at `hvd.init()`, not at import, because scripts set these variables in `os.environ` first. Launcher
settings are elsewhere: `hora.launch.options` turns flags into the same variables. `on_databricks` tells where a process
runs, `accept_risk` whether an unsafe operation is allowed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["EngineConfig", "accept_risk", "changed_environment", "on_databricks", "strict", "trusts_files"]


def _boolean(text: str) -> bool:
    return int(text) > 0


def _seconds(text: str) -> float:
    value = float(text)
    if value < 0:
        raise ValueError("negative")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("negative")
    return value


def _cores(text: str) -> tuple[int, ...]:
    return tuple(_count(item) for item in text.split(","))


def _transport(text: str) -> str:
    if text not in ("auto", "tcp"):
        raise ValueError("unknown transport")
    return text


def _encrypt(text: str) -> str:
    if text not in ("auto", "always", "never"):
        raise ValueError("unknown choice")
    return text


_ALLOCATOR = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def _variable(name: str, default: Any, parse: Callable[[str], Any], what: str, meaning: str) -> Any:
    return field(default=default, metadata={"variable": name, "parse": parse, "what": what, "meaning": meaning})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one runtime. If ranks must agree on a value, all use rank 0's."""

    fusion_threshold_bytes: int = _variable(
        "HOROVOD_FUSION_THRESHOLD",
        128 * 2**20,
        _count,
        "a number of bytes ≥ 0",
        "largest fused batch of small tensors; 0: no fusion",
    )
    cache_capacity: int = _variable(
        "HOROVOD_CACHE_CAPACITY", 1024, _count, "a number of entries ≥ 0", "entries of the response cache; 0: no cache"
    )
    disable_group_fusion: bool = _variable(
        "HOROVOD_DISABLE_GROUP_FUSION", False, _boolean, "0 or 1", "do not fuse grouped operations with others"
    )
    dynamic_process_sets: bool = _variable(
        "HOROVOD_DYNAMIC_PROCESS_SETS", False, _boolean, "0 or 1", "allow new process sets after hvd.init()"
    )
    timeline: str = _variable(
        "HOROVOD_TIMELINE", "", str, "a file path or DYNAMIC", "write a Chrome trace to this file, on rank 0"
    )
    timeline_mark_cycles: bool = _variable(
        "HOROVOD_TIMELINE_MARK_CYCLES", False, _boolean, "0 or 1", "mark the engine's cycles in the timeline"
    )
    stall_check_disable: bool = _variable(
        "HOROVOD_STALL_CHECK_DISABLE", False, _boolean, "0 or 1", "do not report ranks that stall"
    )
    stall_warning_s: float = _variable(
        "HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0, _seconds, "a number of seconds ≥ 0", "report a stall after this time"
    )
    stall_shutdown_s: float = _variable(
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        0.0,
        _seconds,
        "a number of seconds ≥ 0",
        "end the job after a stall of this length; 0: never",
    )
    init_timeout_s: float = _variable(
        "HOROVOD_GLOO_TIMEOUT_SECONDS",
        120.0,
        _seconds,
        "a number of seconds ≥ 0",
        "time limit for the ranks' rendezvous in hvd.init()",
    )
    interface: str = _variable(
        "HOROVOD_GLOO_IFACE", "", str, "a network interface", "network interface for tensors between hosts"
    )
    log_level: str = _variable("HOROVOD_LOG_LEVEL", "warning", str, "a log level", "lowest level to log")
    log_hide_time: bool = _variable("HOROVOD_LOG_HIDE_TIME", False, _boolean, "0 or 1", "log without timestamps")
    thread_affinity: tuple[int, ...] = _variable(
        "HOROVOD_THREAD_AFFINITY",
        (),
        _cores,
        "a comma list of core numbers, one per local rank",
        "cores to pin the engine's threads to",
    )
    transport: str = _variable(
        "HORA_TRANSPORT", "auto", _transport, "auto or tcp", "tcp: use sockets also between ranks of one host"
    )
    encrypt: str = _variable(
        "HORA_ENCRYPT",
        "auto",
        _encrypt,
        "auto, always or never",
        "encrypt tensors between hosts; never: only on a trusted network",
    )
    native: bool = _variable("HORA_NATIVE", True, _boolean, "0 or 1", "0: do not use the native part")
    cuda_ipc: bool = _variable("HORA_CUDA_IPC", True, _boolean, "0 or 1", "0: ranks that share a GPU use host memory")
    keep_freed_memory: bool = _variable(
        "HORA_KEEP_FREED_MEMORY", True, _boolean, "0 or 1", "keep freed memory for the next step"
    )
    autotune: bool = _variable(
        "HOROVOD_AUTOTUNE", False, _boolean, "0 or 1", "tune the reduction during the first steps"
    )
    autotune_log: str = _variable("HOROVOD_AUTOTUNE_LOG", "", str, "a file path", "write the trials to this CSV file")
    autotune_warmup_samples: int = _variable(
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", 3, _count, "a number of trials ≥ 0", "trials that are not counted"
    )
    autotune_steps_per_sample: int = _variable(
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", 10, _count, "a number of steps ≥ 0", "steps per trial"
    )
    autotune_max_samples: int = _variable(
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", 20, _count, "a number of trials ≥ 0", "largest number of trials"
    )
    telemetry_s: float = _variable(
        "HORA_TELEMETRY_S",
        0.0,
        _seconds,
        "the seconds between two reports to the launcher",
        "interval of the ranks' reports; set by the launcher",
    )
    elastic_per_step: bool = _variable(
        "HORA_ELASTIC_PER_STEP", False, _boolean, "0 or 1", "elastic states recover by the step, as with per_step=True"
    )
    nan_check: bool = _variable(
        "HORA_NAN_CHECK", False, _boolean, "0 or 1", "check every gradient for NaN and infinity"
    )
    plan: bool = _variable("HORA_PLAN", False, _boolean, "0 or 1", "set by hora plan")  # set by `hora plan`
    lifeline: str = _variable("HORA_LIFELINE", "", str, "a file of the agent's", "set by the agent")  # set by it

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> EngineConfig:
        """Read the variables. Raises ValueError with the variable, its allowed values and its value."""
        env = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for item in fields(cls):
            variable = item.metadata["variable"]
            text = env.get(variable)
            if text is None or text == "":
                continue
            try:
                values[item.name] = item.metadata["parse"](text)
            except ValueError:
                raise ValueError(f"{variable} must be {item.metadata['what']}, but it is {text!r}") from None
        if any(name in env for name in _ALLOCATOR) or "glibc.malloc." in env.get("GLIBC_TUNABLES", ""):
            values.setdefault("keep_freed_memory", False)  # the user has configured the allocator
        return cls(**values)


def on_databricks(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether this process runs in a Databricks cluster, which mounts its file system at /dbfs."""
    env = os.environ if environ is None else environ
    return bool(env.get("DATABRICKS_RUNTIME_VERSION"))


def accept_risk(text: str, environ: Mapping[str, str] | None = None, *, warn: bool = True) -> None:
    """Warn (if `warn`) about an unprotected operation; with HORA_STRICT=1 raise ValueError instead."""
    if strict(environ):
        raise ValueError(f"refused because of HORA_STRICT=1: {text}")
    if warn:
        logging.getLogger("hora").warning("%s; HORA_STRICT=1 refuses this", text)


def strict(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether the user rejects every risk: HORA_STRICT=1."""
    return _switch("HORA_STRICT", environ)


def trusts_files(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether the user trusts files that can run code: HORA_TRUST_FILES=1, and not HORA_STRICT=1."""
    return _switch("HORA_TRUST_FILES", environ) and not strict(environ)


def _switch(name: str, environ: Mapping[str, str] | None) -> bool:
    value = (os.environ if environ is None else environ).get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name} must be 0 or 1, but it is {value!r}")
    return value == "1"


@contextmanager
def changed_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set these variables inside the block, for libraries that only read the environment; restore them afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
