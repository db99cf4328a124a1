"""`horovod.runner.elastic`: host discovery, the intervals of the driver, and queries about an elastic job.

`horovod.runner.elastic.driver` is this same module, so that a program can set the intervals.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from hora.launch.controller.hosts import DiscoveryScript
from hora.launch.slots import INVALID_SLOT_INFO, Slot

# horovod.runner.elastic.worker: variables of Horovod's rendezvous; Hora's workers have their own address and a secret.
HOROVOD_GLOO_RENDEZVOUS_ADDR = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
HOROVOD_GLOO_RENDEZVOUS_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
HOROVOD_GLOO_IFACE = "HOROVOD_GLOO_IFACE"
HOROVOD_HOSTNAME = "HOROVOD_HOSTNAME"
HOROVOD_LOCAL_RANK = "HOROVOD_LOCAL_RANK"

# horovod.runner.elastic.rendezvous, an HTTP service in Horovod
GET_RANK_AND_SIZE = "rank_and_size"
PUT_WORKER_ADDRESSES = "worker_addresses"


class HostDiscovery:
    """Interface that lists the current hosts and their slots."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        raise NotImplementedError


class HostDiscoveryScript(HostDiscovery):
    """Runs a program that prints `host` or `host:slots` lines. Raises RuntimeError if it fails."""

    def __init__(self, discovery_script: str, slots: int | None) -> None:
        self._script = DiscoveryScript(discovery_script, default_slots=slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return {host.hostname: host.slots for host in self._script.run()}


class FixedHosts(HostDiscovery):
    """Hosts that change only when the program sets them."""

    def __init__(self, available_host_slots: Mapping[str, int]) -> None:
        self._hosts = dict(available_host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return dict(self._hosts)

    def set(self, available_host_slots: Mapping[str, int]) -> None:
        self._hosts = dict(available_host_slots)


DISCOVER_HOSTS_FREQUENCY_SECS = 1.0  # how often Ray's executors query a discovery
ELASTIC_TIMEOUT_SECS = 600.0  # how long they wait for enough workers by default


class ElasticDriver:
    """An elastic job seen from outside: the current assignment of slots."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, int], Slot] = {}  # replaced as a whole, by another thread than that which reads
        self._finished = False

    def places(self, of_workers: Mapping[int, Slot]) -> None:
        """Set the slots of a new generation of the job."""
        self._places = {(slot.hostname, slot.local_rank): slot for slot in of_workers.values()}

    def get_slot_info(self, host: str, local_rank: int) -> Slot:
        """Return the slot of this process; rank -1 if the current generation has no such process."""
        return self._places.get((host, local_rank), INVALID_SLOT_INFO)

    def get_worker_client(self, slot: Slot) -> Slot | None:
        """Return a true value if the process is a member of the current generation and is notified of changes."""
        return self._places.get((slot.hostname, slot.local_rank))

    def finished(self) -> bool:
        return self._finished

    def stop(self) -> None:
        """Mark the job as finished."""
        self._finished, self._places = True, {}


def create_rendezvous_handler(driver: Any) -> NoReturn:
    """Raise ValueError: there is no such rendezvous."""
    raise ValueError("there is no rendezvous over HTTP here: use horovod.run(…, min_num_proc=…) for elastic jobs")
