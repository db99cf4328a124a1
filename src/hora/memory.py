"""Memory: how much there is (the machine's and, in a container, what its limit leaves), and keeping what is freed.

Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

__all__ = ["available_bytes", "give_back_freed_memory", "keep_freed_memory", "total_bytes"]

_CGROUP = Path("/sys/fs/cgroup")
# The limit and what is in use: of version 2, then of version 1.
_CGROUP_FILES = (
    (_CGROUP / "memory.max", _CGROUP / "memory.current"),
    (_CGROUP / "memory/memory.limit_in_bytes", _CGROUP / "memory/memory.usage_in_bytes"),
)
# From malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_KEPT_BYTES = 2**31 - 1  # at the end of the heap: the most that an int can say
_LARGEST_BYTES = 2**30  # of one block that comes from the heap
_LARGEST_BYTES_OF_OLD_GLIBC = 32 * 2**20


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


def keep_freed_memory() -> None:
    """Keep freed memory with the process: what one training step frees, the next one finds warm.

    glibc gives large blocks back to the kernel when they are freed, so each step of a training on CPUs gets its
    activations and gradients anew, page by page: thousands of page faults, up to a third of a step. Not with another
    libc. torch for 64-bit ARM brings an allocator of its own, which keeps what is freed anyway.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        # Old versions refuse more than the limit would grow to by itself.
        if not mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES):
            mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES_OF_OLD_GLIBC)


def give_back_freed_memory() -> None:
    """For once: much was freed that will not be needed again."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
