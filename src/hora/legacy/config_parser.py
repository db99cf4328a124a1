"""`horovod.runner.common.util.config_parser`, over `launch.options`: the workers' variables, and flags as such."""

from __future__ import annotations

from hora.launch.options import LOG_LEVELS, Options, all_options, check

__all__ = ["LOG_LEVELS", "set_env_from_args", "validate_config_args", "variable_name"]

_OTHERS = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_GLOO_IFACE")
_NAMES = {option.variable for option in all_options().values() if option.variable}.union(_OTHERS)


def variable_name(name: str) -> str:
    """`HOROVOD_TIMELINE` and the like, named as themselves; AttributeError for an unknown one."""
    if name in _NAMES:
        return name
    raise AttributeError(f"config_parser has no attribute {name!r}")


def validate_config_args(args: object) -> None:
    """ValueError, naming the flag, for an invalid value."""
    for name, option in all_options().items():
        value = getattr(args, name, None)
        if value is not None:
            check(option, value)


def set_env_from_args(env: dict[str, str], args: object) -> dict[str, str]:
    """Add the variables that these flags stand for to `env`, and return it."""
    env.update(Options.from_args(args, {}).worker_env())
    return env
