"""Environment variables of the Spark side: those the driver forwards, and those a rank gets."""

from __future__ import annotations

from collections.abc import Mapping

from hora.launch.environment import variables

__all__ = [
    "GPU_VARIABLE",
    "assigned_gpus",
    "elastic_timeout_s",
    "forwarded_variables",
    "launcher_timeout_s",
    "start_timeout_s",
]

GPU_VARIABLE = "HORA_SPARK_GPUS"
_DEFAULT_TIMEOUT_S = 600.0
_FORWARDED = ("HOROVOD_", "HORA_", "NCCL_", "GLOO_")
# Who the driver itself is, if it runs inside a job, is nothing that its own ranks should inherit.
_OWN = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HORA_SECRET_FILE",
    "HORA_WORKER_ORDER_FILE",
    "HORA_JOB",
    "HORA_WORKER",
    GPU_VARIABLE,
)


def forwarded_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The driver's settings for the runtime (`HOROVOD_TIMELINE` and the like), which its ranks get too."""
    env = variables() if environ is None else environ
    return {name: value for name, value in env.items() if name.startswith(_FORWARDED) and name not in _OWN}


def start_timeout_s(environ: Mapping[str, str] | None = None) -> float:
    """`HOROVOD_SPARK_START_TIMEOUT`, or ten minutes."""
    return _seconds("HOROVOD_SPARK_START_TIMEOUT", environ)


def elastic_timeout_s(environ: Mapping[str, str] | None = None) -> float:
    """`HOROVOD_ELASTIC_TIMEOUT`, or ten minutes."""
    return _seconds("HOROVOD_ELASTIC_TIMEOUT", environ)


def launcher_timeout_s(environ: Mapping[str, str] | None = None) -> float:
    """`HORA_LAUNCHER_TIMEOUT`, or half a minute: ranks whose connection to the driver breaks go on for so long."""
    return _seconds("HORA_LAUNCHER_TIMEOUT", environ, default_s=30.0)


def _seconds(name: str, environ: Mapping[str, str] | None, default_s: float = _DEFAULT_TIMEOUT_S) -> float:
    text = (variables() if environ is None else environ).get(name, "")
    try:
        seconds = float(text) if text else default_s
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ValueError(f"{name} must be a positive number of seconds, but it is {text!r}")
    return seconds


def assigned_gpus(environ: Mapping[str, str] | None = None) -> list[str]:
    """The addresses of the GPUs that Spark assigned to this rank's task."""
    text = (variables() if environ is None else environ).get(GPU_VARIABLE, "")
    return text.split(",") if text else []
