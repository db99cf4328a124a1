"""Workers: extra processes that a session starts, awaits and stops, with the API of Cloudera's platform.

    launch_workers(2, cpu=1, memory=2, code="print('hello')")
    await_workers(ids); list_workers(); stop_workers()

The functions call the session of this process, the session that started this process as a worker, or the session that
`hora workers launch` keeps running for this folder. `hora.compat` makes them importable under their original module
names.
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
