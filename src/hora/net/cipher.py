"""Encryption of connections: a fresh exchange of keys for each of them (X25519), then ChaCha20-Poly1305 for the frames of
control messages, and AES-GCM for the bytes of tensors, which processors do several times faster.

Who learns a secret later cannot read what was recorded. Whether a connection is encrypted is decided here, at both ends, and is
part of the proofs that `wire` exchanges. Needs the package `cryptography`, which is imported for connections that leave the
host, and for no others.
"""

from __future__ import annotations

import enum
import hmac
import importlib.util
import socket
import struct

from hora.config import encryption
from hora.errors import AuthenticationError

__all__ = ["Cipher", "Encryption", "Exchange", "Records", "available", "leaves_the_host", "wanted"]

_NONCE = struct.Struct(">4xQ")
_LENGTH = struct.Struct(">I")
_KEY_BYTES = 16
# 16 GiB in the longest records: AES-GCM would be good for twenty times that under one key.
_RECORDS_OF_A_KEY = 2**16


class Encryption(enum.IntEnum):
    """What one end of a connection has to say about its encryption."""

    NONE = 0
    OFFERED = 1
    REQUIRED = 2


def available() -> bool:
    """Whether this process can encrypt."""
    return importlib.util.find_spec("cryptography") is not None


def wanted(sock: socket.socket, choice: str | None = None) -> Encryption:
    """For a connected socket, by `HORA_ENCRYPT` (or `choice`).

    Local sockets stay plain, and so do connections between our own addresses, unless the user wants it always.
    """
    choice = choice or encryption()
    if choice == "never" or sock.family == socket.AF_UNIX:
        return Encryption.NONE
    if choice == "always":
        return Encryption.REQUIRED
    return Encryption.OFFERED if leaves_the_host(sock) and available() else Encryption.NONE


def leaves_the_host(sock: socket.socket) -> bool:
    """Whether the other end of this connected socket is at an address that is not ours."""
    try:
        return sock.family != socket.AF_UNIX and bool(sock.getsockname()[0] != sock.getpeername()[0])
    except OSError:  # it has gone already
        return False


class Exchange:
    """One end's half of an exchange of keys."""

    def __init__(self) -> None:
        try:
            from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
        except ImportError:
            raise AuthenticationError(
                "HORA_ENCRYPT=always, but the package cryptography is not installed here (pip install 'hora[tls]')"
            ) from None
        self._key, self._public_key = X25519PrivateKey.generate(), X25519PublicKey
        self.public = self._key.public_key().public_bytes_raw()

    def shared(self, other: bytes) -> bytes:
        """What only we and the one who sent us this half can know."""
        try:
            return self._key.exchange(self._public_key.from_public_bytes(other))
        except ValueError:
            raise AuthenticationError("it sent a half of an exchange of keys that gives no key") from None


class Cipher:
    """Numbers, encrypts and authenticates the frames of one direction."""

    tag_bytes = 16

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        self._cipher, self._number = ChaCha20Poly1305(key), 0

    def seal(self, body: bytes | memoryview) -> tuple[bytes, bytes]:
        """The frame's tag, and what takes the place of its body."""
        sealed = self._cipher.encrypt(self._next(), bytes(body), _LENGTH.pack(len(body)))
        return sealed[len(body) :], sealed[: len(body)]

    def open(self, tag: bytes, body: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(self._next(), body + tag, _LENGTH.pack(len(body)))
        except InvalidTag:
            raise AuthenticationError("a frame carried a wrong signature") from None

    def _next(self) -> bytes:
        """The number of a frame is its nonce: each is used once with a key that is this connection's alone."""
        number, self._number = self._number, self._number + 1
        return _NONCE.pack(number)


class Records:
    """Encrypts and authenticates the bytes of one direction in records, of which both ends know how long they are.

    A record takes `tag_bytes` more. Its number is its nonce, and after a while a new key follows from the old one: neither
    end says so, because both count.
    """

    tag_bytes = 16
    most_bytes = 256 * 1024

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0
        self._begin()

    def seal(self, data: memoryview, out: memoryview) -> None:
        """Write the record of these bytes to `out`."""
        if self._in_place:
            self._cipher.encrypt_into(self._next(), data, None, out)
        else:
            out[:] = self._cipher.encrypt(self._next(), data, None)

    def open(self, sealed: memoryview, out: memoryview) -> None:
        """Write what the record holds to `out`; AuthenticationError if it is not the one that was sent."""
        from cryptography.exceptions import InvalidTag

        try:
            if self._in_place:
                self._cipher.decrypt_into(self._next(), sealed, None, out)
            else:
                out[:] = self._cipher.decrypt(self._next(), sealed, None)
        except InvalidTag:
            raise AuthenticationError("what came from a peer was changed on the way") from None

    @property
    def num_left(self) -> int:
        """How many more there are before another key."""
        return _RECORDS_OF_A_KEY - self._number

    def take(self, count: int) -> tuple[bytes, int]:
        """For who seals or opens the next `count` records itself: the key, and the number of the first one."""
        assert count <= self.num_left, (count, self.num_left)
        number, self._number = self._number, self._number + count
        return self._key[:_KEY_BYTES], number

    def _begin(self) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(self._key[:_KEY_BYTES])
        self._in_place = hasattr(self._cipher, "encrypt_into")  # older versions make new bytes of everything

    def _next(self) -> bytes:
        if self._number == _RECORDS_OF_A_KEY:
            self._key, self._number = hmac.digest(self._key, b"the next key", "sha256"), 0
            self._begin()
        number, self._number = self._number, self._number + 1
        return _NONCE.pack(number)
