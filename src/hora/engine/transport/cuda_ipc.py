"""Memory of a GPU that processes share: CUDA's driver, through ctypes.

torch can share its own tensors, but keeps a file for that in /dev/shm, which a SIGKILL leaves behind, and cannot do it with
every setting of its allocator. What is allocated here belongs to no allocator and has no name: it goes with the process.
`DeviceMemoryTransport` calls, with the GPU as the current one of its thread.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

__all__ = ["DriverError", "Mapped", "Shared"]

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class DriverError(Exception):
    """The driver refuses, or is not there."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class _Memory:
    """Some memory of the GPU that was the current one when it was made."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._gpu = torch.cuda.current_device()
        self._address = ctypes.c_uint64()

    def tensor(self) -> torch.Tensor:
        """All of it, as bytes; good until `close`."""
        memory = _Array(self._address.value, self.num_bytes)
        return torch.as_tensor(memory, device=torch.device("cuda", self._gpu))

    def _let_go(self, how: str) -> None:
        if self._address.value:
            with torch.cuda.device(self._gpu):
                _call(how, self._address)
            self._address.value = 0


class Shared(_Memory):
    """New memory that other processes may map by its `handle`."""

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

    def close(self) -> None:
        """Give it back. No process may use it any more."""
        self._let_go("cuMemFree_v2")


class Mapped(_Memory):
    """What another process shares, mapped here."""

    def __init__(self, handle: str, num_bytes: int) -> None:
        super().__init__(num_bytes)
        described = _Handle.from_buffer_copy(bytes.fromhex(handle))
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(self._address), described, ctypes.c_uint(_LAZY_PEER_ACCESS))

    def close(self) -> None:
        """Unmap it."""
        self._let_go("cuIpcCloseMemHandle")


class _Array:
    """What torch needs to look at memory that is not its own."""

    def __init__(self, address: int, num_bytes: int) -> None:
        data = (address, False)  # may be written to
        self.__cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": data, "version": 3}


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
