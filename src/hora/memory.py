"""Amounts of memory: the machine's and, in a container, what its limit leaves of that. Linux only."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["available_bytes", "total_bytes"]

_CGROUP = Path("/sys/fs/cgroup")
# The limit and what is in use: of version 2, then of version 1.
_CGROUP_FILES = (
    (_CGROUP / "memory.max", _CGROUP / "memory.current"),
    (_CGROUP / "memory/memory.limit_in_bytes", _CGROUP / "memory/memory.usage_in_bytes"),
)


def total_bytes() -> int:
    """Return the machine's memory, or the container's limit."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, _ in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # not in a container, or "max"
            found = min(found, int(limit.read_text()))
    return found


def available_bytes() -> int:
    """Return the memory that the machine and, in a container, its limit have left."""
    meminfo = Path("/proc/meminfo").read_text()
    found = int(meminfo.partition("MemAvailable:")[2].split()[0]) * 1024
    for limit, used in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # as above
            found = min(found, int(limit.read_text()) - int(used.read_text()))
    return found
