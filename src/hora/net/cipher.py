"""Encryption of streams of tensors between hosts: AES-128-GCM, which processors do in hardware, in records of up to 256
KiB.

Their key comes of the connection's handshake (`noise`, `wire`); docs/protocol.md has every byte of it. The native part
makes the same records (`hora.engine.transport.stream`).
"""

from __future__ import annotations

import hmac

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from hora.errors import AuthenticationError
from hora.net.noise import NONCE, TAG_BYTES

__all__ = ["Records"]

_KEY_BYTES = 16
# 16 GiB in the longest records: AES-GCM would be good for twenty times that under one key.
_RECORDS_OF_A_KEY = 2**16


class Records:
    """Encrypts and authenticates the bytes of one direction in records, of which both ends know how long they are.

    A record takes `tag_bytes` more. Its number is its nonce, and after a while a new key follows from the old one:
    neither end says so, because both count.
    """

    tag_bytes = TAG_BYTES
    most_bytes = 256 * 1024

    def __init__(self, key: bytes) -> None:
        """`key`: of the connection's direction, from which that of the records follows."""
        self._key, self._number = _expand(key, b"hora records"), 0
        self._begin()

    def seal(self, data: memoryview, out: memoryview) -> None:
        """Write the record of these bytes to `out`."""
        nonce = self._next()  # which may change the key: before it is used
        if self._in_place:
            self._cipher.encrypt_into(nonce, data, None, out)
        else:
            out[:] = self._cipher.encrypt(nonce, data, None)

    def open(self, sealed: memoryview, out: memoryview) -> None:
        """Write what the record holds to `out`; AuthenticationError if it is not the one that was sent."""
        nonce = self._next()
        try:
            if self._in_place:
                self._cipher.decrypt_into(nonce, sealed, None, out)
            else:
                out[:] = self._cipher.decrypt(nonce, sealed, None)
        except InvalidTag:
            raise AuthenticationError("what came from a peer was changed on the way") from None

    def lend(self, most: int) -> tuple[bytes, int]:
        """Return the key and the number of the next record, for a caller that seals or opens up to `most` records
        itself.

        Both ends lend alike: where this key would not last for so many records, both begin the next one.
        """
        if self._number + most > _RECORDS_OF_A_KEY:
            self._rekey()
        return self._key[:_KEY_BYTES], self._number

    def take_back(self, number: int) -> None:
        """Go on with this number, after records were made elsewhere."""
        self._number = number

    def _begin(self) -> None:
        self._cipher = AESGCM(self._key[:_KEY_BYTES])
        self._in_place = hasattr(self._cipher, "encrypt_into")  # older versions make new bytes of everything

    def _rekey(self) -> None:
        self._key, self._number = _expand(self._key, b"hora next key"), 0
        self._begin()

    def _next(self) -> bytes:
        if self._number >= _RECORDS_OF_A_KEY:
            self._rekey()
        number, self._number = self._number, self._number + 1
        return NONCE.pack(number)


def _expand(key: bytes, purpose: bytes) -> bytes:
    """HKDF-Expand (RFC 5869) to the length of one hash."""
    return hmac.digest(key, purpose + b"\x01", "sha256")
