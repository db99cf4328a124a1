"""Lease of workers for ranks that run at their addresses: the ranks use these workers' GPUs and end with the workers.

A job at such addresses (`mpirun -H <workers>`, `horovodrun -H …`) takes a lease from the workers' session. The lease is
a connection that stays open while the ranks run, so that the session can wait for them when it stops workers.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection
from typing import Any

from hora.workers.gateway import exchange, find, named, open_connection, runs

_POLL_S = 0.05


class Lease:
    """Lease of the workers at the addresses of a job's ranks. See `launch.job.HostLease`."""

    def __init__(self, session: tuple[str, str], hosts: Collection[str]) -> None:
        self._connection = open_connection(*session)
        try:
            found: list[dict[str, Any]] = exchange(self._connection, "workers")
        except BaseException:
            self._connection.close()
            raise
        workers = [worker for worker in found if worker["finished_at"] is None and worker["ip_address"] in hosts]
        self._addresses = {str(worker["id"]): str(worker["ip_address"]) for worker in workers}
        self.devices = {worker["ip_address"]: ",".join(worker["gpus"]) for worker in workers if worker["gpus"]}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __bool__(self) -> bool:
        return bool(self._addresses)

    def watch(self, end_host: Callable[[str, str], Callable[[], bool]]) -> None:
        self._thread = threading.Thread(target=self._watch, args=(end_host,), name="hora-workers-lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._connection.shutdown()
        if self._thread is not None:
            self._thread.join()
        self._connection.close()

    def _watch(self, end_host: Callable[[str, str], Callable[[], bool]]) -> None:
        left = dict(self._addresses)
        while left:
            try:
                ended = exchange(self._connection, "hold", limit_s=None, ids=list(left))
                why = "was stopped or has ended"
            except (OSError, EOFError):
                ended, why = list(left), "has ended with its session"
            if self._over.is_set():
                return
            ends = {left.pop(worker): worker for worker in ended if worker in left}
            emptied = [(address, worker) for address, worker in ends.items() if address not in left.values()]
            gone = [end_host(address, f"its worker {worker} {why}") for address, worker in emptied]
            while not all(is_gone() for is_gone in gone):
                if self._over.wait(_POLL_S):
                    return


def lease_of(hosts: Collection[str]) -> Lease | None:
    """Return the lease of a job on these hosts from the session that is found here; None if no host is a worker."""
    session, folder = named(), os.getcwd()
    if session is None or not runs(session[0]):
        session = find(folder) or find(folder, "script")
    if session is None:
        return None
    with contextlib.suppress(OSError, EOFError):  # it ended just now
        lease = Lease(session, hosts)
        if lease:
            return lease
        lease.close()
    return None
