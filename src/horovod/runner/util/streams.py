"""A pipe of text between threads, under its old name. Re-exports only."""

from hora.horovod.streams import Pipe

__all__ = ["Pipe"]
