"""Nodes of a Ray cluster and each one's capacity in workers, whatever else runs there at the moment."""

from __future__ import annotations

import logging
import random
import time
from typing import Any

import ray

from hora.legacy.elastic import HostDiscovery

__all__ = ["RayHostDiscovery", "RaySlotDiscovery", "TestDiscovery"]

_log = logging.getLogger("hora.ray")


class RayHostDiscovery(HostDiscovery):
    """The nodes that are alive and not about to go, by address."""

    def __init__(self, use_gpu: bool = False, cpus_per_worker: int = 1, gpus_per_worker: int = 1) -> None:
        self.use_gpu, self.cpus_per_worker, self.gpus_per_worker = use_gpu, cpus_per_worker, gpus_per_worker

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        found: dict[str, int] = {}
        leaving = _draining_nodes()
        for node in ray.nodes():
            slots = self._slots(node["Resources"]) if node["alive"] and node.get("NodeID") not in leaving else 0
            if slots > 0:
                address = node["NodeManagerAddress"]
                found[address] = found.get(address, 0) + slots
        return found

    def _slots(self, resources: dict[str, Any]) -> int:
        slots = resources.get("CPU", 0) // self.cpus_per_worker
        if self.use_gpu:
            slots = min(slots, resources.get("GPU", 0) // self.gpus_per_worker)
        return int(slots)


class RaySlotDiscovery(RayHostDiscovery):
    """The same, with the arguments' older names."""

    def __init__(self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int = 1) -> None:
        super().__init__(use_gpu, cpus_per_slot, gpus_per_slot)


def _draining_nodes() -> set[str]:
    """Nodes whose cloud has announced their preemption to Ray."""
    if not ray.is_initialized() or ray.util.client.ray.is_connected():
        return set()
    from ray._private.state import state  # there is no public way to ask

    return set(state.get_draining_nodes())


class TestDiscovery(RayHostDiscovery):
    """Takes nodes away and gives them back at random, to try what a training function makes of it."""

    __test__ = False  # pytest shall not take it for a test

    def __init__(
        self,
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus_per_worker: int = 1,
        gpus_per_worker: int = 1,
        verbose: bool = True,
        _graceful: bool = True,
    ) -> None:
        super().__init__(use_gpu, cpus_per_worker, gpus_per_worker)
        self._min_hosts, self._max_hosts, self._change_frequency_s = min_hosts, max_hosts, change_frequency_s
        self._verbose, self._graceful = verbose, _graceful
        self._removed: set[str] = set()
        self._changed_at = time.monotonic()

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        found = super().find_available_hosts_and_slots()
        if time.monotonic() - self._changed_at > self._change_frequency_s:
            self._changed_at = time.monotonic()
            self._change(found)
        kept = [host for host in found if host not in self._removed][: self._max_hosts]
        return {host: found[host] for host in kept}

    def _change(self, found: dict[str, int]) -> None:
        shown = [host for host in found if host not in self._removed]
        removed = [host for host in found if host in self._removed]
        may = {"take": len(shown) > self._min_hosts, "give": bool(removed) and len(shown) < self._max_hosts}
        choice = random.choice([name for name, allowed in may.items() if allowed] or [""])
        if choice == "take":
            host = random.choice(shown)
            self._removed.add(host)
            if not self._graceful:
                _end_workers_on(host)
        elif choice == "give":
            host = random.choice(removed)
            self._removed.discard(host)
        if choice and self._verbose:
            _log.warning("the discovery %ss %s; it now has %s", choice, host, sorted(set(found) - self._removed))


def _end_workers_on(host: str) -> None:
    """Kill this job's actors there, as a machine that goes without notice would."""
    nodes = {node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == host}
    job = ray.get_runtime_context().get_job_id()
    driver: Any = ray._private.worker.global_worker
    for actor, facts in ray._private.state.actors().items():
        if facts["State"] == "ALIVE" and facts["JobID"] == job and facts["Address"]["NodeID"] in nodes:
            driver.core_worker.kill_actor(ray.ActorID.from_hex(actor), True)
