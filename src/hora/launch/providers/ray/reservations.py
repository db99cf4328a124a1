"""Ray's reservations for an elastic job: one placement group for each slot, on the node where that slot is.

A slot that Ray has not granted yet (another job holds the cores) does not count and is not a failure. A slot outlives
its worker, so that a failed worker is replaced in the same place. A slot that the hosts no longer have is released when
its worker has left.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from hora.errors import StartTimeoutError
from hora.launch.slots import HostInfo

_CLOSE_LIMIT_S = 10.0
# Ray grants free slots within this time: wait for them before the job begins.
_BATCH_WAIT_S = 1.0
_GRANT_S = 0.2

_log = logging.getLogger("hora.launch")
_NODE_SHARE = 0.01  # of the resource that each node has under its own name: enough to be placed there
# A host that has not granted a slot for this long is tried again after the others.
_PATIENCE_S = 10.0


class Discovery(Protocol):
    """Interface of host discovery, which users may implement too."""

    def find_available_hosts_and_slots(self) -> Mapping[str, int]: ...


@dataclass(eq=False)
class Reservation:
    """A requested slot."""

    group: Any
    asked_at: float = field(default_factory=time.monotonic)
    granted: bool = False
    workers: int = 0  # the job's processes in it, usually 0 or 1


class RayHosts:
    """The hosts of a discovery with the slots that Ray grants there.

    `resources`: those of one worker. `most`: how many slots to hold at most. `interval_s`: the pause between two polls,
    read each time.
    """

    def __init__(
        self,
        discovery: Discovery,
        interval_s: Callable[[], float],
        *,
        resources: Mapping[str, float],
        most: int | None,
    ) -> None:
        self._discovery, self._interval_s, self._resources, self._most = discovery, interval_s, dict(resources), most
        self._lock = threading.Lock()
        self._slots: dict[str, list[Reservation]] = {}  # by host: first those granted, in their order
        self._refused_at: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failing = False
        self._found: Mapping[str, int] = {}

    def wait_for(self, num_slots: int, limit_s: float) -> list[HostInfo]:
        """Return the first hosts once they have this many slots. Raises StartTimeoutError after the limit."""
        deadline, enough_since = time.monotonic() + limit_s, None
        while True:
            granted = self._poll(wait_s=_GRANT_S)
            num_granted, now = sum(host.slots for host in granted), time.monotonic()
            if num_granted >= num_slots:
                enough_since = enough_since or now
                if num_granted >= sum(self._found.values()) or now - enough_since > _BATCH_WAIT_S:
                    return granted
            if now > deadline:
                raise StartTimeoutError(
                    f"Timed out waiting for {num_slots} slots on the Ray cluster: {num_granted} are free, of "
                    f"{dict(self._found) or 'no host at all'}. Add nodes, end what else runs there, or raise "
                    f"elastic_timeout. Timeout after {limit_s:g} seconds."
                )
            if num_granted < num_slots:
                self._stop.wait(self._interval_s())

    def watch(self, known: Sequence[HostInfo], changed: Callable[[Sequence[HostInfo]], None]) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, args=(list(known), changed, self._stop), name="hora-ray-hosts", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_LIMIT_S)
            self._thread = None

    def _watch(
        self, known: list[HostInfo], changed: Callable[[Sequence[HostInfo]], None], stop: threading.Event
    ) -> None:
        while not stop.wait(self._interval_s()):
            granted = self._poll()
            if granted != known and not stop.is_set():
                known = granted
                changed(granted)

    def _poll(self, wait_s: float = 0.0) -> list[HostInfo]:
        """Poll the discovery and return the granted slots. `wait_s`: how long to wait for one more."""
        try:
            self._found = dict(self._discovery.find_available_hosts_and_slots())
            self._failing = False
        except Exception as error:  # if the user's discovery fails, keep the hosts
            if not self._failing:
                _log.warning("the host discovery failed (%r); it is polled again every %g s", error, self._interval_s())
            self._failing = True
        with self._lock:
            self._drop()
            self._accept_granted(wait_s)
            self._reserve()
            counted = {host: min(self._num_granted(host), num_slots) for host, num_slots in self._found.items()}
        return [HostInfo(host, num_slots) for host, num_slots in counted.items() if num_slots]

    def enter(self, host: str, slot: int) -> Reservation | None:
        """Return the slot for a worker that starts there; None if it is gone."""
        with self._lock:
            if slot >= self._num_granted(host):
                return None
            self._slots[host][slot].workers += 1
            return self._slots[host][slot]

    def leave(self, reservation: Reservation) -> None:
        """Record that a worker there has ended."""
        with self._lock:
            reservation.workers -= 1

    def release(self) -> None:
        """Release all slots."""
        with self._lock:
            slots, self._slots = [one for held in self._slots.values() for one in held], {}
        if ray.is_initialized():
            for one in slots:
                _give_back(one)

    # ---- with the lock held ---------------------------------------------------------------------------------

    def _num_granted(self, host: str) -> int:
        return sum(one.granted for one in self._slots.get(host, ()))

    def _drop(self) -> None:
        """Release slots that no host has and no worker uses, and requests that block requests elsewhere."""
        for host, held in self._slots.items():
            while len(held) > self._found.get(host, 0) and not held[-1].workers:
                _give_back(held.pop())
        if self._most is None:
            return
        full, now = sum(map(self._num_granted, self._slots)) >= self._most, time.monotonic()
        for host, held in self._slots.items():
            for one in [one for one in held if not one.granted]:
                late = now - one.asked_at > _PATIENCE_S
                if full or late:
                    held.remove(one)
                    _give_back(one)
                if late:
                    self._refused_at[host] = now

    def _accept_granted(self, wait_s: float) -> None:
        for held in self._slots.values():
            for one in [one for one in held if not one.granted]:
                if wait_s > 0:
                    one.granted = bool(one.group.wait(wait_s))
                else:
                    one.granted = placement_group_table(one.group).get("state") == "CREATED"
                wait_s = wait_s if one.granted else 0.0
            held.sort(key=lambda one: not one.granted)  # stable

    def _reserve(self) -> None:
        total = sum(map(len, self._slots.values()))
        for host in sorted(self._found, key=lambda name: self._refused_at.get(name, 0.0)):
            held = self._slots.setdefault(host, [])
            while len(held) < self._found[host]:
                if self._most is not None and total >= self._most:
                    return
                held.append(Reservation(placement_group([{**self._resources, f"node:{host}": _NODE_SHARE}])))
                total += 1


def _give_back(reservation: Reservation) -> None:
    with contextlib.suppress(Exception):  # Ray may raise anything if the node or the cluster is gone
        remove_placement_group(reservation.group)
