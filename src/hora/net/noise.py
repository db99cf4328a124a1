"""Noise_NNpsk0_25519_AESGCM_SHA256 (noiseprotocol.org, revision 34): the handshake and ciphers of every connection.

There are two messages. The initiator's can only be read with the pre-shared key, so nothing else from an
unauthenticated peer is ever processed. The responder's completes a fresh key exchange, so a pre-shared key that leaks
later does not decrypt recorded traffic. This module moves no bytes and is independent of Hora: `wire` provides the key
and the prologue. See docs/protocol.md.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from hora.errors import AuthenticationError

TAG_BYTES = 16
_PUBLIC_BYTES = 32

_NAME = b"Noise_NNpsk0_25519_AESGCM_SHA256"  # 32 bytes, the length of the hash: not hashed
NONCE = struct.Struct(">4xQ")
_REKEY_NONCE = NONCE.pack(2**64 - 1)
_MESSAGES_OF_A_KEY = 2**16


def hkdf(chaining_key: bytes, material: bytes, num_outputs: int) -> list[bytes]:
    temporary, outputs = hmac.digest(chaining_key, material, "sha256"), [b""]
    for number in range(1, num_outputs + 1):
        outputs.append(hmac.digest(temporary, outputs[-1] + bytes([number]), "sha256"))
    return outputs[1:]


def warm_up() -> None:
    """Run OpenSSL's one-time initialization of 15 ms, before other processes are forked from this one."""
    Handshake(bytes(32), b"", initiator=True).write()


class Cipher:
    """Noise's CipherState: numbers, encrypts and authenticates the messages of one direction.

    After every 65,536 messages both ends switch to the next key (Noise's Rekey) without a message, because both count.
    """

    def __init__(self, key: bytes) -> None:
        self._aead, self._number = AESGCM(key), 0

    def seal(self, plain: bytes | memoryview, data: bytes | None = None) -> bytes:
        """Encrypt a message; the result has `TAG_BYTES` more. `data` is authenticated with it."""
        nonce = self._nonce()  # may change the key, so it comes first
        return self._aead.encrypt(nonce, plain, data)

    def open(self, sealed: bytes, data: bytes | None = None) -> bytes:
        """Decrypt a message; raises AuthenticationError unless it is the next one that the other end has sealed."""
        nonce = self._nonce()
        try:
            return self._aead.decrypt(nonce, sealed, data)
        except InvalidTag:
            raise AuthenticationError(
                "a message was modified in transit, or is not this connection's next one"
            ) from None

    def _nonce(self) -> bytes:
        if self._number and self._number % _MESSAGES_OF_A_KEY == 0:
            self._aead = AESGCM(self._aead.encrypt(_REKEY_NONCE, bytes(32), None)[:32])
        number, self._number = self._number, self._number + 1
        return NONCE.pack(number)


class Handshake:
    """One end of a handshake: `write` and `read`, or the other way round; then `split`. `ephemeral`: for tests."""

    def __init__(
        self, psk: bytes, prologue: bytes, *, initiator: bool, ephemeral: X25519PrivateKey | None = None
    ) -> None:
        self._initiator, self._ephemeral = initiator, ephemeral
        self._theirs = b""
        self.hash = self._chaining_key = _NAME
        self._mix_hash(prologue)
        self._chaining_key, mixed, _ = hkdf(self._chaining_key, psk, 3)
        self._mix_hash(mixed)

    def write(self, payload: bytes = b"") -> bytes:
        try:
            private = self._ephemeral = self._ephemeral or X25519PrivateKey.generate()
            public = private.public_key().public_bytes_raw()
            cipher = self._mix(public, exchange=not self._initiator)
        except UnsupportedAlgorithm as error:
            raise AuthenticationError(
                f"the OpenSSL of this host lacks X25519 or AES-GCM, which every connection of Hora needs: {error} "
                "(a FIPS mode that rejects X25519? pip's build of cryptography has it)"
            ) from None
        sealed = cipher.seal(payload, self.hash)
        self._mix_hash(sealed)
        return public + sealed

    def read(self, message: bytes) -> bytes:
        """Return the payload of the other end's message; raises AuthenticationError if its key differs."""
        self._theirs, sealed = message[:_PUBLIC_BYTES], message[_PUBLIC_BYTES:]
        payload = self._mix(self._theirs, exchange=self._initiator).open(sealed, self.hash)
        self._mix_hash(sealed)
        return payload

    def split(self) -> tuple[bytes, bytes]:
        """Return the keys for the initiator's and for the responder's messages."""
        to_responder, to_initiator = hkdf(self._chaining_key, b"", 2)
        return to_responder, to_initiator

    def _mix(self, public: bytes, *, exchange: bool) -> Cipher:
        """Mix in one end's public key, and in the second message the shared secret."""
        self._mix_hash(public)
        self._chaining_key, key = hkdf(self._chaining_key, public, 2)
        if exchange:
            assert self._ephemeral is not None, "write comes before the exchange"
            try:
                shared = self._ephemeral.exchange(X25519PublicKey.from_public_bytes(self._theirs))
            except ValueError:
                raise AuthenticationError("the other end's public key yields no shared key") from None
            self._chaining_key, key = hkdf(self._chaining_key, shared, 2)
        return Cipher(key)

    def _mix_hash(self, data: bytes) -> None:
        self.hash = hashlib.sha256(self.hash + data).digest()


_KEY_BYTES = 16
# 16 GiB in the longest records: AES-GCM allows twenty times that under one key.
_RECORDS_OF_A_KEY = 2**16


class Records:
    """Encrypts and authenticates one direction of a stream in records whose lengths both ends know.

    A record takes `tag_bytes` more. Its number is its nonce. After a fixed number of records, both ends derive the next
    key without a message, because both count.
    """

    tag_bytes = TAG_BYTES
    most_bytes = 256 * 1024

    def __init__(self, key: bytes) -> None:
        """`key`: of the connection's direction; the records' key derives from it."""
        self._key, self._number = _expand(key, b"hora records"), 0
        self._begin()

    def seal(self, data: memoryview, out: memoryview) -> None:
        """Write the record of these bytes to `out`."""
        nonce = self._next()  # may change the key, so it comes first
        if self._in_place:
            self._cipher.encrypt_into(nonce, data, None, out)
        else:
            out[:] = self._cipher.encrypt(nonce, data, None)

    def open(self, sealed: memoryview, out: memoryview) -> None:
        """Decrypt a record to `out`; raises AuthenticationError if it is not the one that was sent."""
        nonce = self._next()
        try:
            if self._in_place:
                self._cipher.decrypt_into(nonce, sealed, None, out)
            else:
                out[:] = self._cipher.decrypt(nonce, sealed, None)
        except InvalidTag:
            raise AuthenticationError("data from a peer was modified in transit") from None

    def lend(self) -> tuple[bytes, int]:
        """Return the key and the number of the next record, for a caller that processes an operation's records itself.

        Both ends do the same: if less than half of this key's records are left, both switch to the next one.
        """
        if self._number > _RECORDS_OF_A_KEY // 2:
            self._rekey()
        return self._key[:_KEY_BYTES], self._number

    def reclaim(self, number: int) -> None:
        """Continue with this number, after a caller has processed records."""
        self._number = number

    def _begin(self) -> None:
        self._cipher = AESGCM(self._key[:_KEY_BYTES])
        self._in_place = hasattr(self._cipher, "encrypt_into")  # older versions of cryptography allocate new bytes

    def _rekey(self) -> None:
        self._key, self._number = _expand(self._key, b"hora next key"), 0
        self._begin()

    def _next(self) -> bytes:
        if self._number >= _RECORDS_OF_A_KEY:
            self._rekey()
        number, self._number = self._number, self._number + 1
        return NONCE.pack(number)


def _expand(key: bytes, purpose: bytes) -> bytes:
    """Compute HKDF-Expand (RFC 5869) to the length of one hash."""
    return hmac.digest(key, purpose + b"\x01", "sha256")
