"""Memory of the machine or container, and control over the allocator's freed memory. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
# Limit and usage: of cgroups version 2, then of version 1.
_CGROUP_FILES = (
    (_CGROUP / "memory.max", _CGROUP / "memory.current"),
    (_CGROUP / "memory/memory.limit_in_bytes", _CGROUP / "memory/memory.usage_in_bytes"),
)
# From malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_KEPT_BYTES = 2**31 - 1  # at the end of the heap: the maximum of an int
_LARGEST_BYTES = 2**30  # of one block from the heap
_LARGEST_BYTES_OF_OLD_GLIBC = 32 * 2**20


def total_bytes() -> int:
    """Return the machine's memory, or the container's limit."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, _ in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # not in a container, or "max"
            found = min(found, int(limit.read_text()))
    return found


def available_bytes() -> int:
    """Return the available memory of the machine or, in a container, within its limit."""
    meminfo = Path("/proc/meminfo").read_text()
    found = int(meminfo.partition("MemAvailable:")[2].split()[0]) * 1024
    for limit, used in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # as above
            found = min(found, int(limit.read_text()) - int(used.read_text()))
    return found


def keep_freed_memory() -> None:
    """Make the allocator keep freed memory, so that the next training step finds it warm.

    glibc returns large blocks to the kernel when they are freed, so each training step on a CPU allocates its
    activations and gradients anew, page by page: thousands of page faults, up to a third of a step. Does nothing with
    another libc, nor with torch's own allocator on 64-bit ARM (`launch.environment.allocator_variables`).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        # Old versions reject more than the threshold's own maximum.
        if not mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES):
            mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES_OF_OLD_GLIBC)


def give_back_freed_memory() -> None:
    """Return freed memory to the kernel once, after freeing much that is not needed again."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
