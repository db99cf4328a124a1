"""The records of one direction of a stream for the native part (`records.h`): the same bytes as `Records` makes.

They are sealed and opened by the libcrypto that Python itself was linked with, whatever its version: nothing more has
to be installed, and where Python has none of its own `usable` says so, and Python does the same with the package
cryptography.
"""

from __future__ import annotations

import ctypes
import importlib
import weakref
from functools import lru_cache
from typing import Any

from hora.engine.shm.native import fields
from hora.net.cipher import Records

__all__ = ["NativeRecords", "RecordsOfOneDirection", "usable"]

_FUNCTIONS = ("EVP_CipherInit_ex", "EVP_CipherUpdate", "EVP_CipherFinal_ex", "EVP_CIPHER_CTX_ctrl")


class RecordsOfOneDirection(ctypes.Structure):
    """`struct records`."""

    _fields_ = (*fields("pointer context begin update end control room"), ("number", ctypes.c_uint64))


@lru_cache(maxsize=1)
def _libcrypto() -> Any:
    try:
        # A module that is linked with it: what is looked up there is looked up in all that it needs.
        found = ctypes.CDLL(importlib.import_module("_hashlib").__file__)
        for name in (*_FUNCTIONS, "EVP_aes_128_gcm", "EVP_CIPHER_CTX_new", "EVP_CIPHER_CTX_free"):
            getattr(found, name)
    except (ImportError, OSError, AttributeError):
        return None
    found.EVP_CIPHER_CTX_new.restype = found.EVP_aes_128_gcm.restype = ctypes.c_void_p
    found.EVP_CIPHER_CTX_free.argtypes = (ctypes.c_void_p,)
    found.EVP_CIPHER_CTX_free.restype = None
    found.EVP_CipherInit_ex.argtypes = (*(ctypes.c_void_p,) * 3, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int)
    return found


def usable() -> bool:
    """Return whether this Python has a libcrypto that can be called."""
    return _libcrypto() is not None


class NativeRecords:
    """Seals or opens what `records` would, and takes turns with it: between jobs of the native part either may be
    used.
    """

    def __init__(self, records: Records, *, seals: bool) -> None:
        self._records, self._seals, self._key = records, seals, b""
        library = _libcrypto()
        context = library.EVP_CIPHER_CTX_new()
        if not context:
            raise MemoryError("no room for a cipher")
        weakref.finalize(self, library.EVP_CIPHER_CTX_free, context)
        self._room = ctypes.create_string_buffer(Records.most_bytes + Records.tag_bytes)
        functions = [ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in _FUNCTIONS]
        self._description = RecordsOfOneDirection(context, *functions, ctypes.addressof(self._room), 0)

    def lend(self, most: int) -> RecordsOfOneDirection:
        """For at most so many records. Both ends of a connection lend alike."""
        key, number = self._records.lend(most)
        if key != self._key:
            library, context = _libcrypto(), self._description.context
            if library.EVP_CipherInit_ex(context, library.EVP_aes_128_gcm(), None, key, None, int(self._seals)) != 1:
                raise RuntimeError("libcrypto does not take a key for AES-GCM")
            self._key = key
        self._description.number = number
        return self._description

    def take_back(self) -> None:
        """The native part has made all the records that it will."""
        self._records.take_back(self._description.number)
