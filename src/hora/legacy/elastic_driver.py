"""`horovod.runner.elastic.driver`: its intervals, which may be set here, and the queries of an elastic job."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from hora.launch.slots import Slot

__all__ = ["DISCOVER_HOSTS_FREQUENCY_SECS", "ELASTIC_TIMEOUT_SECS", "ElasticDriver"]

DISCOVER_HOSTS_FREQUENCY_SECS = 1.0  # how often Ray's executors ask a discovery
ELASTIC_TIMEOUT_SECS = 600.0  # how long they wait for enough workers, where their settings leave it open

_NOWHERE = Slot(hostname="", rank=-1, local_rank=-1, cross_rank=-1, size=-1, local_size=-1, cross_size=-1)


class ElasticDriver:
    """An elastic job, as seen from outside: who has which place."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[tuple[str, int], Slot] = {}
        self._finished = False

    def places(self, of_workers: Mapping[int, Slot]) -> None:
        """A generation of the job begins; these are its places."""
        with self._lock:
            self._places = {(slot.hostname, slot.local_rank): slot for slot in of_workers.values()}

    def get_slot_info(self, host: str, local_rank: int) -> Slot:
        """The place of this process; one with rank -1 where the current generation has no such process."""
        with self._lock:
            return self._places.get((host, local_rank), _NOWHERE)

    def get_worker_client(self, slot: Slot) -> Slot | None:
        """Return a true value if the process is a member of the current generation and would be notified of changes."""
        with self._lock:
            return self._places.get((slot.hostname, slot.local_rank))

    def finished(self) -> bool:
        return self._finished

    def stop(self) -> None:
        """The job is over."""
        with self._lock:
            self._finished, self._places = True, {}
