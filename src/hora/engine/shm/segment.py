"""Memory shared by the ranks of one host.

A segment is an anonymous memory file: it has no name in any file system, so a SIGKILL anywhere leaves nothing
behind and the size of `/dev/shm` is no limit. Its descriptor is passed over a local socket (`control_tree`). The memory
is reserved at creation, so a lack of memory is an error here and never a SIGBUS later.

A forked child gets a private copy of shared memory, as of the fork. A shared mapping would stay shared in the child: a
child that writes a checkpoint or evaluates a model would see the next steps' parameters, and a child that writes to
parameters or gradients would corrupt the training. So private memory replaces every such mapping in the child, at the
same address: with the same contents where its tensors may read, with zeros elsewhere (the other members' gradients).
Copy-on-write pages would still show later writes of other ranks, and so would a copy that the child makes while its
parent continues. So the parent copies before it forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import tempfile
import threading
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hora.memory import available_bytes

PAGE_BYTES = mmap.PAGESIZE


def aligned(num_bytes: int, to_bytes: int = PAGE_BYTES) -> int:
    """Return the smallest multiple of `to_bytes` that holds `num_bytes`."""
    return -(-num_bytes // to_bytes) * to_bytes


@dataclass(eq=False)
class Segment:
    """A mapped piece of shared memory."""

    memory: mmap.mmap
    num_bytes: int
    descriptor: int | None = None  # kept open by its creator alone, to pass it to peers

    @classmethod
    def create(cls, num_bytes: int, *, label: str = "hora") -> Segment:
        """Create a zeroed segment. Raises MemoryError with the requested size if the machine lacks memory."""
        num_bytes = aligned(max(num_bytes, 1))
        # Reserving too much would not fail: the kernel would kill processes to free memory.
        left_bytes = available_bytes()
        if num_bytes > left_bytes:
            raise MemoryError(_refusal(num_bytes, label, f"only {left_bytes / 2**20:.0f} MiB are available"))
        descriptor = _anonymous_file(label)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            memory = mmap.mmap(descriptor, num_bytes)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise MemoryError(_refusal(num_bytes, label, os.strerror(error.errno))) from error
            raise
        return cls(memory, num_bytes, descriptor)

    @classmethod
    def attach(cls, descriptor: int) -> Segment:
        """Map a segment whose descriptor a peer sent; the descriptor is closed."""
        try:
            num_bytes = os.fstat(descriptor).st_size
            return cls(mmap.mmap(descriptor, num_bytes), num_bytes)
        finally:
            os.close(descriptor)

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat view of `count` elements at `offset`. It keeps the mapping alive."""
        if count == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        # numpy keeps the mapping while the view exists; with torch.frombuffer `close` would unmap it.
        raw = np.frombuffer(self.memory, dtype=np.uint8, offset=offset, count=count * dtype.itemsize)
        return torch.from_numpy(raw).view(dtype)

    def close(self) -> None:
        """Close the descriptor; the memory is freed with its last view."""
        if self.descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self.descriptor)
            self.descriptor = None
        with contextlib.suppress(BufferError):  # tensors still use it; the last of them unmaps it
            self.memory.close()


class Window:
    """A second mapping of a piece that `SharedMemory.allocate` returned, unmapped with its last tensor.

    The values of a tensor of a window can be kept while the piece is written again: `keep`.
    """

    def __init__(self, piece: torch.Tensor) -> None:
        self.num_bytes = aligned(piece.nbytes)
        # An old size of 0 maps shared pages once more.
        address = _libc.mremap(piece.data_ptr(), 0, self.num_bytes, _MREMAP_MAYMOVE, None)
        if address == _FAILED:
            raise MemoryError(f"cannot map {self.num_bytes / 2**20:.1f} MiB of shared memory a second time")
        self.address = address
        raw = (ctypes.c_uint8 * piece.nbytes).from_address(address)
        _windows[address] = self.num_bytes
        weakref.finalize(raw, _unmap, address, self.num_bytes).atexit = False
        self.tensor = torch.from_numpy(np.frombuffer(memoryview(raw), dtype=np.uint8)).view(piece.dtype)

    def keep(self) -> None:
        """Replace the mapping with private memory of the same contents at the same address."""
        copy = _copy(self.address, self.num_bytes, [(0, self.num_bytes)])
        if copy.private == _FAILED or not _replace(copy):
            raise MemoryError(f"there is no memory to keep {self.num_bytes / 2**20:.1f} MiB that a program still uses")
        _windows.pop(self.address)


class SharedMemory:
    """A segment that all members of a set have mapped, allocated piece by piece. Every member allocates the same
    pieces in the same order.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._position = 0

    @staticmethod
    def space(count: int, dtype: torch.dtype) -> int:
        """Return the bytes that `allocate` uses."""
        return aligned(count * dtype.itemsize)

    def allocate(self, count: int, dtype: torch.dtype, *, copied: bool = True) -> torch.Tensor:
        """Return the next piece, which begins on a new page.

        In a forked child it is private, and empty unless `copied`.
        """
        num_bytes = count * dtype.itemsize
        offset = self.reserve(num_bytes)
        _copy_in_children(self.segment.memory, offset, num_bytes if copied else 0)
        return self.segment.tensor(offset, count, dtype)

    def reserve(self, num_bytes: int) -> int:
        """Return the offset of the next piece in the segment."""
        offset = self._position
        self._position += aligned(num_bytes)
        return offset


def _refusal(num_bytes: int, label: str, why: str) -> str:
    return (
        f"cannot reserve {num_bytes / 2**20:.1f} MiB of shared memory for {label}: {why}; free memory, "
        "start fewer ranks on this host, or set HORA_TRANSPORT=tcp to do without shared memory"
    )


def _anonymous_file(label: str) -> int:
    try:
        return os.memfd_create(label, os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        descriptor, path = tempfile.mkstemp(prefix=f"{label}-")
        os.unlink(path)
        return descriptor


# Forked children.

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FAILED = ctypes.c_void_p(-1).value
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2

# The pieces that a child gets a copy of, as (offset, bytes). A mapping lives as long as a tensor uses it.
_copied: weakref.WeakKeyDictionary[mmap.mmap, list[tuple[int, int]]] = weakref.WeakKeyDictionary()


class _Copy(NamedTuple):
    """A copy of one mapping, for the child of the next fork."""

    address: int  # of the mapping
    private: int  # address of the copy
    num_bytes: int


_copies: dict[int, list[_Copy]] = {}  # by the thread that forks
_windows: dict[int, int] = {}  # address and bytes of each whose mapping is shared


def _copy_in_children(memory: mmap.mmap, offset: int, num_bytes: int) -> None:
    """Give forked children private memory in place of this mapping, with a copy of this piece (and of others)."""
    _copied.setdefault(memory, []).append((offset, num_bytes))


def _before_fork() -> None:
    live = [(memory, pieces) for memory, pieces in _copied.items() if not memory.closed]
    of_memory = [_copy(_address_of(memory), len(memory), pieces) for memory, pieces in live]
    of_windows = [_copy(address, num_bytes, [(0, num_bytes)]) for address, num_bytes in [*_windows.items()]]
    _copies[threading.get_ident()] = of_memory + of_windows


def _unmap(address: int, num_bytes: int) -> None:
    _windows.pop(address, None)
    _libc.munmap(address, num_bytes)


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _copy(address: int, num_bytes: int, pieces: list[tuple[int, int]]) -> _Copy:
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
        if copy.private == _FAILED or not _replace(copy):
            _refuse(copy.num_bytes)
    _copies.clear()
    _copied.clear()
    _windows.clear()


def _replace(copy: _Copy) -> bool:
    """Put a copy in place of its mapping."""
    size, flags = copy.num_bytes, _MREMAP_MAYMOVE | _MREMAP_FIXED
    return bool(_libc.mremap(copy.private, size, size, flags, copy.address) != _FAILED)


def _refuse(num_bytes: int) -> None:
    """End the child with a message: a fork hook cannot raise, and the child must not continue."""
    text = (
        f"a forked process cannot have its own copy of {num_bytes / 2**20:.0f} MiB of shared parameters and state: "
        "there "
        'is too little memory; start it with multiprocessing\'s "spawn" or "forkserver", or train with sharded=False\n'
    )
    os.write(2, text.encode())
    os._exit(1)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
