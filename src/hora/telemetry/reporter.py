"""The reporter: a thread of every rank that sends telemetry once a second and answers the launcher's questions.

The engine starts it if a launcher asks for telemetry (`HORA_TELEMETRY_S`). It sends over the authenticated control
connection and ends with it. A blocked send delays only this thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from hora.telemetry import stacks
from hora.telemetry.meters import Meter
from hora.telemetry.sample import Report

_MACHINE_S = 2.0
_SHOWN_WAIT_S = 0.5

Send = Callable[[str, bytes], None]


class Machine:
    """`facts()` returns rates since the last call."""

    def __init__(self) -> None:
        self._cpu = _cpu_times()
        self._net = _net_bytes()
        self._at = time.monotonic()
        self._gpus = _Gpus()

    def facts(self) -> dict[str, Any]:
        earlier, self._at = self._at, time.monotonic()
        passed_s = max(self._at - earlier, 1e-3)
        facts: dict[str, Any] = {"num_cpus": os.cpu_count() or 1}
        with contextlib.suppress(OSError, ValueError, IndexError):
            before, self._cpu = self._cpu, _cpu_times()
            busy, total = (new - old for new, old in zip(self._cpu, before, strict=True))
            if total > 0:
                facts["cpu"] = round(busy / total, 3)
        with contextlib.suppress(OSError, ValueError, IndexError):
            before, self._net = self._net, _net_bytes()
            received, sent = (round((new - old) / passed_s) for new, old in zip(self._net, before, strict=True))
            facts |= {"net_in": received, "net_out": sent}
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            memory = _memory()
            used = memory["MemTotal"] - memory["MemAvailable"]
            facts |= {"memory_total": memory["MemTotal"], "memory": used, "shm": memory["Shmem"]}
            shm = os.statvfs("/dev/shm")
            facts["shm_total"] = shm.f_blocks * shm.f_frsize
        with contextlib.suppress(OSError):
            facts["load"] = round(os.getloadavg()[0], 2)
        if gpus := self._gpus.facts():
            facts["gpus"] = gpus
        return facts


def _cpu_times() -> tuple[int, int]:
    """Return (busy, total) ticks since the machine started."""
    with open("/proc/stat") as file:
        times = [int(word) for word in file.readline().split()[1:9]]
    idle = times[3] + times[4]
    return sum(times) - idle, sum(times)


def _net_bytes() -> tuple[int, int]:
    """Return bytes (received, sent) over all interfaces except loopback."""
    received = sent = 0
    with contextlib.suppress(OSError), open("/proc/net/dev") as file:
        for line in file.readlines()[2:]:
            name, _, rest = line.partition(":")
            if name.strip() != "lo":
                words = rest.split()
                received, sent = received + int(words[0]), sent + int(words[8])
    return received, sent


def _memory() -> dict[str, int]:
    with open("/proc/meminfo") as file:
        lines = (line.split() for line in file)
        return {words[0][:-1]: int(words[1]) * 1024 for words in lines}


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Use(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Gpus:
    """NVIDIA's management library, part of the driver. Without it no GPUs are reported."""

    _MAX = 16

    def __init__(self) -> None:
        self._devices: list[tuple[str, ctypes.c_void_p]] = []
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
            if self._nvml.nvmlInit_v2() != 0:
                return
            count = ctypes.c_uint()
            self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
            for index in range(min(count.value, self._MAX)):
                device, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
                if self._nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
                    self._nvml.nvmlDeviceGetName(device, name, 96)
                    self._devices.append((name.value.decode(errors="replace"), device))
        except (OSError, AttributeError):
            self._devices = []

    def facts(self) -> list[dict[str, Any]]:
        found = []
        for name, device in self._devices:
            use, memory = _Use(), _Memory()
            if self._nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(use)) != 0:
                continue
            self._nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
            found.append(
                {"name": name[:60], "busy": use.gpu / 100, "memory": memory.used, "memory_total": memory.total}
            )
        return found


class Reporter:
    """`send(kind, data)` raises ConnectionError or TimeoutError if the launcher is gone. `machine`: report on it."""

    def __init__(self, meter: Meter, send: Send, *, machine: bool) -> None:
        self._meter, self._send = meter, send
        meter.pop_sample()  # the first report begins here
        self._machine = Machine() if machine else None
        self._machine_at = 0.0
        self._interval_s = 1.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hora-telemetry", daemon=True)

    def start(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._thread.start()

    def stop(self) -> None:
        """Send the last report and end."""
        self._stopping.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def report(self) -> Report:
        host: Mapping[str, Any] = {}
        if self._machine is not None and time.monotonic() - self._machine_at >= _MACHINE_S:
            self._machine_at = time.monotonic()
            host = self._machine.facts()
            if self._meter.link_bytes_per_s:
                host = {**host, "link": round(self._meter.link_bytes_per_s)}
        return Report(
            self._meter.pop_sample(),
            self._waiting(),
            self._meter.pop_metrics(),
            self._meter.pop_events(),
            host,
            self._meter.total_steps,
        )

    def _waiting(self) -> tuple[str, float, tuple[int, ...]] | None:
        """Return the operation that the training thread has been blocked in for a while; None if there is none."""
        blocked = self._meter.blocked
        if blocked is None:
            return None
        what, since, ranks = blocked
        waited_s = time.perf_counter() - since
        if waited_s < _SHOWN_WAIT_S:
            return None
        return str(getattr(what, "name", what)), round(waited_s, 2), tuple(ranks)

    def answer(self, question: Mapping[str, Any]) -> None:
        """Answer `stack`, `profile`, or the next `commit`. Must be quick: it runs on the connection's thread."""
        if question.get("question") == "stack":
            self._respond("stack", stacks.current_stacks())
        elif question.get("question") == "profile":
            seconds = min(max(float(question.get("seconds", 1.0)), 0.1), 60.0)
            threading.Thread(
                target=lambda: self._respond("profile", stacks.profile(seconds)), name="hora-profile", daemon=True
            ).start()
        elif question.get("question") == "commit":
            self._meter.on_commit = self._committed

    def _committed(self) -> None:
        self._meter.on_commit = None
        self._respond("committed", b"")

    def _respond(self, kind: str, data: bytes) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            self._send(kind, data)

    def _run(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            while not self._stopping.wait(self._interval_s):
                self._send_report()
            self._send_report()

    def _send_report(self) -> None:
        report = self.report()
        try:
            self._send("report", report.encode())
        except (ConnectionError, TimeoutError):
            self._meter.put_back(report.events)  # for the reporter of the next connection
            raise
