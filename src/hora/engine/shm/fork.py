"""Shared memory in a forked child: its own copy, as it was when it was forked.

A mapping that is shared stays so in a child: a child that writes a checkpoint or evaluates a model would see the next
steps' parameters, and one that writes to them or to gradients would spoil the training. So every such mapping is
replaced in the child, at the same address, by private memory: with the same contents where its tensors may look, with
zeros elsewhere (the other members' gradients). Pages that are copied when they are written to would still show what
other ranks write later, and so would a copy that the child makes while its parent goes on: the parent makes it, before
it forks.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from typing import NamedTuple

__all__ = ["copy_in_children"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FAILED = ctypes.c_void_p(-1).value
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2

# The pieces that a child gets a copy of, as (offset, bytes). A mapping lives as long as a tensor looks into it.
_copied: weakref.WeakKeyDictionary[mmap.mmap, list[tuple[int, int]]] = weakref.WeakKeyDictionary()


class _Copy(NamedTuple):
    """Of one mapping, for a child that is about to be forked."""

    address: int  # of the mapping
    private: int  # where the copy lies
    num_bytes: int


_copies: dict[int, list[_Copy]] = {}  # by the thread that forks


def copy_in_children(memory: mmap.mmap, offset: int, num_bytes: int) -> None:
    """From now on a forked child has private memory in this mapping's place, with a copy of this piece (and of
    others).
    """
    _copied.setdefault(memory, []).append((offset, num_bytes))


def _before_fork() -> None:
    live = [(memory, pieces) for memory, pieces in _copied.items() if not memory.closed]
    _copies[threading.get_ident()] = [_copy(memory, pieces) for memory, pieces in live]


def _copy(memory: mmap.mmap, pieces: list[tuple[int, int]]) -> _Copy:
    address, num_bytes = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    private = _libc.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)
    if private != _FAILED:
        for offset, size in pieces:
            ctypes.memmove(private + offset, address + offset, size)
    return _Copy(address, private, num_bytes)


def _after_fork_in_parent() -> None:
    for copy in _copies.pop(threading.get_ident(), []):
        if copy.private != _FAILED:
            _libc.munmap(copy.private, copy.num_bytes)


def _after_fork_in_child() -> None:
    for copy in _copies.get(threading.get_ident(), []):
        size, flags = copy.num_bytes, _MREMAP_MAYMOVE | _MREMAP_FIXED
        if copy.private == _FAILED or _libc.mremap(copy.private, size, size, flags, copy.address) == _FAILED:
            _refuse(size)
    _copies.clear()
    _copied.clear()


def _refuse(num_bytes: int) -> None:
    """A hook of a fork cannot raise, and the child must not go on."""
    text = (
        f"a forked process cannot have its own copy of {num_bytes / 2**20:.0f} MiB of shared parameters and state: "
        "there "
        'is too little memory; start it with multiprocessing\'s "spawn" or "forkserver", or train with sharded=False\n'
    )
    os.write(2, text.encode())
    os._exit(1)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
