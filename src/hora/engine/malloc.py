"""Freed memory stays with the process: what one training step frees, the next one finds warm.

glibc gives large blocks back to the kernel when they are freed, so each step of a training on CPUs gets its activations
and gradients anew, page by page: thousands of page faults, up to a third of a step. `hvd.init()` raises the two limits.
Not with another libc, and not when the user has chosen (`config.py`). torch for 64-bit ARM brings an allocator of its
own, which keeps what is freed anyway.
"""

from __future__ import annotations

import ctypes

__all__ = ["give_back_freed_memory", "keep_freed_memory"]

# From malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_KEPT_BYTES = 2**31 - 1  # at the end of the heap: the most that an int can say
_LARGEST_BYTES = 2**30  # of one block that comes from the heap
_LARGEST_BYTES_OF_OLD_GLIBC = 32 * 2**20


def keep_freed_memory() -> None:
    """Raise glibc's limits."""
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
