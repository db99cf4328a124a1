"""A shell command that leaves nothing behind. Re-exports only."""

from hora.horovod.shell import GRACEFUL_TERMINATION_TIME_S, execute

__all__ = ["GRACEFUL_TERMINATION_TIME_S", "execute"]
