"""Hosts of an elastic job: discovery by a script, limits, and hosts or slots that are barred for a while."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hora.config import EngineConfig
from hora.launch.controller.policy import Limits, Worker
from hora.launch.slots import HostInfo, Slot, slots_by_host
from hora.net import sockets

_INTERVAL_S = 1.0
_RUN_LIMIT_S = 60.0
_SHOWN_BYTES = 2000

_log = logging.getLogger("hora.launch")
_Barred = tuple[str, int | None]  # a host, and one of its slots (None: the whole host)


def parse_discovered(text: str, default_slots: int | None) -> list[HostInfo]:
    """Parse the script's output. Raises ValueError for a host without slots if there is no default."""
    found: dict[str, HostInfo] = {}
    for line in text.splitlines():
        content = line.strip()
        if not content:
            continue
        if ":" not in content:
            if default_slots is None:
                raise ValueError(
                    f"the host discovery script names host {content!r} without slots; print `{content}:N`, or give "
                    "--slots-per-host"
                )
            content = f"{content}:{default_slots}"
        try:
            host = HostInfo.from_string(content)
        except ValueError as error:
            raise ValueError(f"the host discovery script printed a line that names no host. {error}") from None
        found[host.hostname] = host
    return list(found.values())


class HostWatch(Protocol):
    """Source of the current hosts: a script, the tasks of a Spark stage."""

    def watch(self, known: Sequence[HostInfo], changed: Callable[[Sequence[HostInfo]], None]) -> None:
        """Call `changed`, in any thread, with each list of hosts that differs from the one before."""

    def close(self) -> None:
        """Stop calling it."""


class DiscoveryScript:
    """A script that lists hosts. `watch` polls it every second, until closed."""

    def __init__(self, command: str, *, default_slots: int | None) -> None:
        self._command, self._default_slots = command, default_slots
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def watch(self, known: Sequence[HostInfo], changed: Callable[[Sequence[HostInfo]], None]) -> None:
        arguments = list(known), changed
        self._thread = threading.Thread(target=self._watch, args=arguments, name="hora-discovery", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        with self._lock:
            if self._process is not None:
                _kill_group(self._process)
        if self._thread is not None:
            self._thread.join(_INTERVAL_S + 5.0)

    def _watch(self, known: list[HostInfo], changed: Callable[[Sequence[HostInfo]], None]) -> None:
        failing = False
        while not self._stop.wait(_INTERVAL_S):
            try:
                found = self.run()
                failing = False
            except (RuntimeError, ValueError) as error:
                if not failing and not self._stop.is_set():
                    _log.warning("%s; it is tried again every %g s", error, _INTERVAL_S)
                failing = True
                continue
            if found != known and not self._stop.is_set():
                known = found
                changed(found)

    def run(self) -> list[HostInfo]:
        """Run the script and return its hosts. Raises RuntimeError if it fails, ValueError if its output is invalid."""
        with self._lock:
            if self._stop.is_set():
                return []
            process = self._process = subprocess.Popen(
                self._command,
                shell=True,  # the user's own command line, with its own arguments
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        try:
            out, err = process.communicate(timeout=_RUN_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"the host discovery script {self._command!r} did not end within {_RUN_LIMIT_S:g} s"
            ) from None
        finally:
            with self._lock:
                _kill_group(process)
                process.wait()
                self._process = None
        if process.returncode != 0:
            output = (err or out)[-_SHOWN_BYTES:].decode(errors="replace").strip() or "no output"
            raise RuntimeError(
                f"the host discovery script {self._command!r} failed with exit status {process.returncode}: {output}"
            )
        return parse_discovered(out.decode(errors="replace"), self._default_slots)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End the script and what it started in its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class ElasticSpec:
    """Hosts and limits of an elastic job."""

    limits: Limits
    hosts: tuple[HostInfo, ...] = ()  # where workers may run
    script: HostWatch | None = None  # reports changes of the hosts
    local_only: bool = False  # the launcher starts workers on this machine only
    cooldown_range: tuple[int, int] | None = None
    leave_s: float = 25.0  # how long a job waits after SIGTERM for its ranks' next commit
    # Failures that bar no place of a host: one says little about a machine that a cluster manager supervises
    forgiven: int = 0
    # Called with the places of every generation, by worker
    on_places: Callable[[Mapping[int, Slot]], None] | None = None

    def limits_for(self, env: Mapping[str, str]) -> Limits:
        """The limits, with the silence that the workers' variables allow a rank; ValueError for impossible ones."""
        stall = {name: value for name, value in env.items() if name.startswith("HOROVOD_STALL_")}
        config = EngineConfig.from_env(stall)
        enabled = config.stall_shutdown_s > 0 and not config.stall_check_disable
        return replace(self.limits, stall_shutdown_s=config.stall_shutdown_s if enabled else None)


class Hosts:
    """The hosts of an elastic job as they are now, and which of their slots may be used.

    A place where a worker failed is barred for a while: a host, or one slot of the only one. `chance`: uniform in
    [0, 1).
    """

    def __init__(self, spec: ElasticSpec, chance: Callable[[], float] | None = None) -> None:
        self.spec, self._chance = spec, chance or random.random
        self._num_slots = slots_by_host(spec.hosts)
        self._failures: dict[str, int] = {}  # host -> how many
        # How often a place was barred, and when it is usable again; None: never.
        self._barred: dict[_Barred, tuple[int, float | None]] = {}

    def change(self, hosts: Sequence[HostInfo]) -> list[str]:
        """Replace the hosts; return a message for the user."""
        reachable = [host for host in hosts if not self.spec.local_only or sockets.is_local(host.hostname)]
        messages = [
            f"host {host.hostname} cannot be used: the job began on this machine alone and listens nowhere "
            "else. Name the network with --network-interfaces, or begin with another host"
            for host in hosts
            if host not in reachable
        ]
        self._num_slots = slots_by_host(reachable)
        return [*messages, f"the hosts are now {','.join(map(str, reachable)) or 'none'}"]

    def saved(self, now: float) -> dict[str, Any]:
        """Return what another launcher must know: failures, and the barred places, how often and for how long."""
        barred = [
            [*place, times, None if until is None else until - now] for place, (times, until) in self._barred.items()
        ]
        return {"barred": barred, "failures": self._failures}

    def restore(self, saved: Mapping[str, Any], now: float) -> None:
        self._failures = dict(saved["failures"])
        for host, slot, times, left_s in saved["barred"]:
            self._barred[host, slot] = times, None if left_s is None else now + left_s

    def is_barred(self, host: str, slot: int | None, now: float) -> bool:
        """Return whether this slot (None: the whole host) is barred now."""
        untils = [self._barred[place][1] for place in {(host, None), (host, slot)} if place in self._barred]
        return any(until is None or now < until for until in untils)

    def usable(self, now: float) -> dict[str, tuple[int, ...]]:
        """Return the slots that are not barred, by host."""
        numbers = {host: range(num) for host, num in self._num_slots.items()}
        free = {host: tuple(s for s in slots if not self.is_barred(host, s, now)) for host, slots in numbers.items()}
        return {host: slots for host, slots in free.items() if slots}

    def barred(self, now: float) -> frozenset[str]:
        """Return the hosts that are barred as a whole."""
        return frozenset(host for host in self._num_slots if self.is_barred(host, None, now))

    def may_grow(self, now: float) -> bool:
        """Return whether discovery may find more slots."""
        return self.spec.script is not None or self.next_return(now) is not None

    def next_return(self, now: float) -> float | None:
        """Return when the next barred place becomes usable again; None: never."""
        return min((until for _, until in self._barred.values() if until is not None and until > now), default=None)

    def num_slots(self, hostname: str) -> int:
        return self._num_slots.get(hostname, 1)

    def bar(self, worker: Worker, now: float) -> None:
        """Bar the place where this worker failed, unless its host is forgiven once more."""
        failures = self._failures[worker.host] = self._failures.get(worker.host, 0) + 1
        if failures <= self.spec.forgiven:
            return
        # Barring the only host would end the job, so bar the slot. One worker's failure says nothing about other slots.
        whole = len(self._num_slots) > 1 and worker.generation >= 0
        self.bar_place((worker.host, None if whole else worker.slot), now)

    def bar_place(self, place: _Barred, now: float) -> float | None:
        """Bar a place; return until when (None: forever). Each cooldown is about twice as long as the last."""
        times = self._barred.get(place, (0, None))[0] + 1
        until = None
        if self.spec.cooldown_range is not None:
            shortest, longest = self.spec.cooldown_range
            doubled = shortest * 2.0 ** min(times, 64)
            until = now + min(max(doubled + self._chance() * shortest, shortest), longest)
        self._barred[place] = times, until
        return until
