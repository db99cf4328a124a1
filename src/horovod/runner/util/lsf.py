"""Whether this is an LSF job, under the old name. Re-exports only."""

from hora.horovod.env import LSFUtils

__all__ = ["LSFUtils"]
