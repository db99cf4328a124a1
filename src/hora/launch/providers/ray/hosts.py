"""Hosts of an elastic job on Ray: those its discovery finds, as far as Ray has granted them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from hora.errors import StartTimeoutError
from hora.launch.providers.ray.reservations import Reservations
from hora.launch.slots import HostInfo

__all__ = ["Discovery", "RayHosts"]

_CLOSE_LIMIT_S = 10.0
# What was requested a moment ago comes within this time, if it is free: a job does not begin just before.
_BATCH_WAIT_S = 1.0
_GRANT_S = 0.2

_log = logging.getLogger("hora.launch")


class Discovery(Protocol):
    """Interface of host discovery, which users may implement too."""

    def find_available_hosts_and_slots(self) -> Mapping[str, int]: ...


class RayHosts:
    """`interval_s`: the pause between two polls, read each time."""

    def __init__(self, discovery: Discovery, reservations: Reservations, interval_s: Callable[[], float]) -> None:
        self._discovery, self._reservations, self._interval_s = discovery, reservations, interval_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failing = False
        self._found: Mapping[str, int] = {}

    def wait_for(self, num_slots: int, limit_s: float) -> list[HostInfo]:
        """The hosts to begin with, as soon as they have this many slots. StartTimeoutError when they never do."""
        deadline, enough_since = time.monotonic() + limit_s, None
        while True:
            granted = self._ask(wait_s=_GRANT_S)
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
            granted = self._ask()
            if granted != known and not stop.is_set():
                known = granted
                changed(granted)

    def _ask(self, wait_s: float = 0.0) -> list[HostInfo]:
        try:
            self._found = dict(self._discovery.find_available_hosts_and_slots())
            self._failing = False
        except Exception as error:  # whatever a user's own discovery does, the hosts stay as they were
            if not self._failing:
                _log.warning("the host discovery failed (%r); it is polled again every %g s", error, self._interval_s())
            self._failing = True
        return self._reservations.update(self._found, wait_s=wait_s)
