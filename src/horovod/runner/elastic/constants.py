"""The words at the end of a job that was changed too often, under their old name. Re-exports only."""

from hora.launch.control.elastic_policy import RESET_LIMIT_EXCEEDED_MESSAGE

__all__ = ["RESET_LIMIT_EXCEEDED_MESSAGE"]
