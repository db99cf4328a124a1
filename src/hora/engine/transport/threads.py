"""Keeps torch from spreading the transport's own operations over several threads.

torch splits an element-wise operation above `SERIAL_ELEMENTS`. The ranks of a host share its cores, and the
pieces of a transport are small, so starting threads costs more than it brings. `torch.set_num_threads` would
change threads that start later as well; OpenMP's own setting belongs to the calling thread alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch

__all__ = ["SERIAL_ELEMENTS", "single_threaded"]

SERIAL_ELEMENTS = 32768


@contextmanager
def single_threaded() -> Iterator[None]:
    """Operations of the calling thread use this thread only, where torch is built with OpenMP."""
    num_threads = torch.get_num_threads()
    set_num_threads = _setter()
    if num_threads == 1 or set_num_threads is None:
        yield
        return
    set_num_threads(1)
    try:
        yield
    finally:
        set_num_threads(num_threads)


@lru_cache(maxsize=1)
def _setter() -> Callable[[int], None] | None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        setter = ctypes.PyDLL(str(library)).omp_set_num_threads
    except (OSError, AttributeError):
        return None
    setter.argtypes = (ctypes.c_int,)
    setter.restype = None

    def set_num_threads(num_threads: int) -> None:
        setter(num_threads)

    return set_num_threads
