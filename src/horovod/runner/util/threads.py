"""Tools around threads under their old name. Re-exports only."""

from hora.horovod.threads import execute_function_multithreaded, in_thread, on_event

__all__ = ["execute_function_multithreaded", "in_thread", "on_event"]
