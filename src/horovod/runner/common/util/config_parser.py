"""The workers' variables by name, and flags as variables. Re-exports only."""

from hora.horovod.config_parser import LOG_LEVELS, set_env_from_args, validate_config_args
from hora.horovod.config_parser import variable_name as __getattr__

__all__ = ["LOG_LEVELS", "set_env_from_args", "validate_config_args"]
