"""The reporter: a thread of every rank that tells the launcher once a second how it goes, and answers its questions.

Started by the engine when a launcher wants to know (`HORA_TELEMETRY_S`). It sends over the control connection, which
is authenticated, and ends with it. A send that blocks holds up this thread and nothing else.
"""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from hora.telemetry import stacks
from hora.telemetry.machine import Machine
from hora.telemetry.meters import Meter, Reading
from hora.telemetry.sample import Report

__all__ = ["Reporter"]

_MACHINE_S = 2.0
_SHOWN_WAIT_S = 0.5

Send = Callable[[str, bytes], None]


class Reporter:
    """`send(kind, data)` raises ConnectionError or TimeoutError when the launcher is gone. `machine`: report on it."""

    def __init__(self, meter: Meter, send: Send, *, machine: bool) -> None:
        self._meter, self._send = meter, send
        self._reading = Reading(meter)
        self._machine = Machine() if machine else None
        self._machine_at = 0.0
        self._cpu_s = _cpu_s()
        self._interval_s = 1.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hora-telemetry", daemon=True)

    def start(self, interval_s: float) -> None:
        """Report by itself."""
        self._interval_s = interval_s
        self._thread.start()

    def stop(self) -> None:
        """Send what is left and end."""
        self._stopping.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def report(self) -> Report:
        """Return the current report."""
        cpu_s, before = _cpu_s(), self._cpu_s
        self._cpu_s = cpu_s
        host: Mapping[str, Any] = {}
        if self._machine is not None and time.monotonic() - self._machine_at >= _MACHINE_S:
            self._machine_at = time.monotonic()
            host = self._machine.facts()
            if self._meter.link_bytes_per_s:
                host = {**host, "link": round(self._meter.link_bytes_per_s)}
        return Report(
            self._reading.sample(cpu_s=cpu_s - before, memory_bytes=_memory_bytes()),
            self._waiting(),
            self._meter.take_metrics(),
            self._meter.take_events(),
            host,
            self._meter.total_steps,
        )

    def _waiting(self) -> tuple[str, float, tuple[int, ...]] | None:
        """Return the operation that the training thread is blocked in, if it has been for a while."""
        blocked = self._meter.blocked
        if blocked is None:
            return None
        what, since, ranks = blocked
        waited_s = time.perf_counter() - since
        if waited_s < _SHOWN_WAIT_S:
            return None
        return str(getattr(what, "name", what)), round(waited_s, 2), tuple(ranks)

    def answer(self, question: Mapping[str, Any]) -> None:
        """The launcher asks: `stack`, `profile`, or word of the next `commit`. In the connection's thread: be quick."""
        if question.get("question") == "stack":
            with contextlib.suppress(ConnectionError, TimeoutError):
                self._send("stack", stacks.current_stacks())
        elif question.get("question") == "profile":
            seconds = min(max(float(question.get("seconds", 1.0)), 0.1), 60.0)
            threading.Thread(target=self._profile, args=(seconds,), name="hora-profile", daemon=True).start()

        elif question.get("question") == "commit":
            self._meter.on_commit = self._committed

    def _committed(self) -> None:
        self._meter.on_commit = None
        with contextlib.suppress(ConnectionError, TimeoutError):
            self._send("committed", b"")

    def _profile(self, seconds: float) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            self._send("profile", stacks.profile(seconds))

    def _run(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            while not self._stopping.wait(self._interval_s):
                self._send("report", self.report().encode())
            self._send("report", self.report().encode())


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _memory_bytes() -> float:
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm") as file:
        return float(int(file.read().split()[1]) * resource.getpagesize())
    return 0.0
