"""Workers: extra processes that a session starts, waits for and stops, as on Cloudera's platform.

    launch_workers(2, cpu=1, memory=2, code="print('hello')")
    await_workers(ids); list_workers(); stop_workers()

The functions speak to the session of this process, or to the one that started this process as a worker, or to a session
that `hora workers launch` keeps running for this folder. `hora.compat` gives them their old module names.
"""

from hora.workers.api import (
    await_workers,
    end_session,
    keep_session,
    launch_workers,
    list_workers,
    stop_workers,
    worker_output,
)

__all__ = [
    "await_workers",
    "end_session",
    "keep_session",
    "launch_workers",
    "list_workers",
    "stop_workers",
    "worker_output",
]
