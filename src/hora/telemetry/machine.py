"""State of this machine: processors, memory, shared memory, network, GPUs. Read from /proc and NVML, nothing installed.

One rank of each host reads it, every few seconds; what cannot be read is left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from typing import Any

__all__ = ["Machine"]


class Machine:
    """`facts()` gives rates since the last call."""

    def __init__(self) -> None:
        self._cpu = _cpu_times()
        self._net = _net_bytes()
        self._at = time.monotonic()
        self._gpus = _Gpus()

    def facts(self) -> dict[str, Any]:
        now, before = time.monotonic(), self._at
        passed_s, self._at = max(now - before, 1e-3), now
        facts: dict[str, Any] = {"num_cpus": os.cpu_count() or 1}
        with contextlib.suppress(OSError, ValueError, IndexError):
            cpu, self._cpu, old = _cpu_times(), _cpu_times(), self._cpu
            total = cpu[1] - old[1]
            if total > 0:
                facts["cpu"] = round((cpu[0] - old[0]) / total, 3)
        with contextlib.suppress(OSError, ValueError, IndexError):
            net, old_net = _net_bytes(), self._net
            self._net = net
            facts["net_in"], facts["net_out"] = (
                round((new - old) / passed_s) for new, old in zip(net, old_net, strict=True)
            )
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            memory = _memory()
            facts["memory_total"] = memory["MemTotal"]
            facts["memory"] = memory["MemTotal"] - memory["MemAvailable"]
            facts["shm"] = memory["Shmem"]
            shm = os.statvfs("/dev/shm")
            facts["shm_total"] = shm.f_blocks * shm.f_frsize
        with contextlib.suppress(OSError):
            facts["load"] = round(os.getloadavg()[0], 2)
        gpus = self._gpus.facts()
        if gpus:
            facts["gpus"] = gpus
        return facts


def _cpu_times() -> tuple[int, int]:
    """(busy, all), in ticks since the machine started."""
    with open("/proc/stat") as file:
        times = [int(word) for word in file.readline().split()[1:9]]
    idle = times[3] + times[4]
    return sum(times) - idle, sum(times)


def _net_bytes() -> tuple[int, int]:
    """(received, sent) over all interfaces but loopback."""
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
    """NVIDIA's management library, which comes with the driver. Without one there are no GPUs."""

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
