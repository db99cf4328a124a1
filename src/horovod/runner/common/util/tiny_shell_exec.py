"""A shell command and its output. Re-exports only."""

from hora.horovod.shell import execute_quietly as execute

__all__ = ["execute"]
