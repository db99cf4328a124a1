"""CUDA's driver through ctypes: GPU memory that processes share, and copies by the copy engine.

torch can share its own tensors, but keeps a file in /dev/shm for it, which remains after a SIGKILL, and cannot do it
with every setting of its allocator. Memory allocated here belongs to no allocator and has no name: it is freed with the
process. `DeviceMemoryTransport` calls this with the GPU as its thread's current device.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from types import SimpleNamespace

import torch

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_HOST, _DEVICE = 1, 2  # CUmemorytype


class DriverError(Exception):
    """The driver reports an error or is missing."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class _DeviceMemory:
    """Memory of the GPU that was current when it was created."""

    _release = ""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._gpu = torch.cuda.current_device()
        self._address = ctypes.c_uint64()

    def tensor(self) -> torch.Tensor:
        """Return all of it as bytes; valid until `close`."""
        data = (self._address.value, False)  # writable
        interface = {"shape": (self.num_bytes,), "typestr": "|u1", "data": data, "version": 3}
        memory = SimpleNamespace(__cuda_array_interface__=interface)
        return torch.as_tensor(memory, device=torch.device("cuda", self._gpu))

    def close(self) -> None:
        """Free it, when no process may use it any more, or unmap it."""
        if self._address.value:
            with torch.cuda.device(self._gpu):
                _call(self._release, self._address)
            self._address.value = 0


class Shared(_DeviceMemory):
    """New memory that other processes may map by its `handle`."""

    _release = "cuMemFree_v2"

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        _call("cuMemAlloc_v2", ctypes.byref(self._address), ctypes.c_size_t(num_bytes))
        handle = _Handle()
        try:
            _call("cuIpcGetMemHandle", ctypes.byref(handle), self._address)
        except DriverError:
            self.close()
            raise
        self.handle = bytes(handle).hex()


class Mapped(_DeviceMemory):
    """Device memory of another process, mapped here."""

    _release = "cuIpcCloseMemHandle"

    def __init__(self, handle: str, num_bytes: int) -> None:
        super().__init__(num_bytes)
        described = _Handle.from_buffer_copy(bytes.fromhex(handle))
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(self._address), described, ctypes.c_uint(_LAZY_PEER_ACCESS))


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = tuple(
        (name, getattr(ctypes, f"c_{kind}"))
        for kind, names in (
            ("int64", "source_x source_y"),
            ("int32", "source_type"),
            ("void_p", "source_host source_device source_array"),
            ("int64", "source_pitch target_x target_y"),
            ("int32", "target_type"),
            ("void_p", "target_host target_device target_array"),
            ("int64", "target_pitch row_bytes num_rows"),
        )
        for name in names.split()
    )


def copy_by_engine(host: torch.Tensor, target: torch.Tensor) -> None:
    """Queue a copy of pinned memory to the GPU, an even number of bytes, on the current stream.

    The GPU's processors perform a plain copy of less than 32 KiB, for which the GPU must switch from another process to
    this one: 150 to 290 µs if two processes share an H200. A copy of two rows uses the copy engine: 13 µs.
    """
    half = host.nbytes // 2
    copy = _Copy2D(
        source_type=_HOST, source_host=host.data_ptr(), source_pitch=half, target_type=_DEVICE,
        target_device=target.data_ptr(), target_pitch=half, row_bytes=half, num_rows=2,
    )  # fmt: skip
    _call("cuMemcpy2DAsync_v2", ctypes.byref(copy), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))


def copy_to_host(tensor: torch.Tensor, host: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Copy a contiguous tensor to pinned memory, after the work queued on the stream, and wait for it."""
    on = ctypes.c_void_p(stream.cuda_stream)
    _call(
        "cuMemcpyDtoHAsync_v2",
        ctypes.c_void_p(host.data_ptr()),
        ctypes.c_uint64(tensor.data_ptr()),
        ctypes.c_size_t(host.nbytes),
        on,
    )
    _call("cuStreamSynchronize", on)


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(str(error)) from error


def _call(name: str, *arguments: object) -> None:
    driver = _driver()
    result = getattr(driver, name)(*arguments)
    if result != 0:
        words = ctypes.c_char_p()
        driver.cuGetErrorString(result, ctypes.byref(words))
        raise DriverError(f"{name} failed: {(words.value or b'unknown error').decode()} ({result})")
