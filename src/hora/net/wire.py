"""The authenticated wire: who may speak on the control plane, and how bytes become messages.

Both ends prove with HMAC-SHA256 that they hold the job's secret before anything else is read; then every
frame carries a MAC under a key that belongs to this connection and this direction and covers the frame's
number, so that frames can be neither forged nor replayed nor reordered nor carried to another job. Between hosts
they are encrypted as well, where both ends can (`cipher`); their nonces then are halves of an exchange of keys. A message is a
small JSON header and a raw payload, cut into bounded frames: nothing here unpickles or evaluates.

    client -> server   hello      magic, offers encryption, speaker, client nonce
    server -> client   challenge  is encrypted, server nonce, server's proof
    client -> server   proof      client's proof
    both               frames     length, MAC(number, length, body), body

The classes hold state and move no bytes: `server` drives them from its event loop, `connection` from a blocking socket.
What messages mean is decided by the owners of servers and connections; who is given which key, in `keys`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hora.errors import AuthenticationError
from hora.net.cipher import Cipher, Encryption, Exchange, Records

__all__ = [
    "MAX_FRAME_BYTES",
    "MAX_HEADER_BYTES",
    "MAX_PAYLOAD_BYTES",
    "ClientHandshake",
    "Credentials",
    "CredentialsOf",
    "Header",
    "Keys",
    "Opener",
    "Sealer",
    "ServerHandshake",
    "derived_secret",
    "mask",
    "new_secret",
]

Header = dict[str, Any]

SECRET_BYTES = 32
MAX_FRAME_BYTES = 256 * 1024
MAX_HEADER_BYTES = 64 * 1024
MAX_PAYLOAD_BYTES = 16 * 1024**3

ANYBODY = -1
VALUE_LENGTH = struct.Struct(">Q")  # of a value in a payload that holds several

_MAGIC = b"HORA/2\r\n"
_NONCE_BYTES = 32
_MAC_BYTES = 32
_SPEAKER = struct.Struct(">i")
_HELLO_BYTES = len(_MAGIC) + 1 + _SPEAKER.size + _NONCE_BYTES
_CHALLENGE_BYTES = 1 + _NONCE_BYTES + _MAC_BYTES
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")


def new_secret() -> bytes:
    """A fresh random secret for one job."""
    return os.urandom(SECRET_BYTES)


def derived_secret(secret: bytes, purpose: str) -> bytes:
    """Another secret for another purpose, which tells nothing of the first one. Both ends derive it: it never travels."""
    return hmac.digest(secret, b"derived secret: " + purpose.encode(), "sha256")


def mask(secret: bytes, nonce: bytes, data: bytes) -> bytes:
    """The data, hidden from listeners; applied twice it is itself again. The nonce must be new for every message.

    For what has to stay secret on a connection that authenticates what it carries but does not encrypt it.
    """
    key = derived_secret(secret, "mask")
    pad = b"".join(hmac.digest(key, nonce + block.to_bytes(4, "big"), "sha256") for block in range(-(-len(data) // 32)))
    masked = int.from_bytes(data, "big") ^ int.from_bytes(pad[: len(data)], "big")
    return masked.to_bytes(len(data), "big")


@dataclass(frozen=True)
class Credentials:
    """What both ends of a connection must hold: a secret, what it is for, and who is at the client's end.

    The purpose (a job, the hub of a world, a session of workers) is part of every proof, so that what was said in one
    place is worth nothing in another. `speaker`: the number of the worker or the rank whose key it is, where each has its own.
    """

    secret: bytes = field(repr=False)
    purpose: str
    speaker: int = ANYBODY

    def __post_init__(self) -> None:
        if len(self.secret) < SECRET_BYTES:
            raise ValueError(f"a job's secret must have {SECRET_BYTES} bytes, but this one has {len(self.secret)}")


CredentialsOf = Callable[[int], Credentials]  # a server's: those of the one for whom a client says that it speaks


class Keys:
    """The proofs and the two directions' keys of one connection.

    `offered`: the client can encrypt. `exchanged`: what the two ends' halves give, if the connection is encrypted.
    """

    def __init__(
        self,
        credentials: Credentials,
        client_nonce: bytes,
        server_nonce: bytes,
        *,
        offered: bool = False,
        exchanged: bytes = b"",
    ) -> None:
        name = credentials.purpose.encode()
        self.encrypted = bool(exchanged)
        self._secret = credentials.secret
        speaker = _SPEAKER.pack(credentials.speaker)
        said = _LENGTH.pack(len(name)) + name + bytes([offered, self.encrypted]) + speaker
        self._transcript = _MAGIC + said + client_nonce + server_nonce + exchanged
        self.server_proof = self._derive(b"server proof")
        self.client_proof = self._derive(b"client proof")
        self.to_server = self._derive(b"client to server")
        self.to_client = self._derive(b"server to client")

    def _derive(self, purpose: bytes) -> bytes:
        return hmac.digest(self._secret, _LENGTH.pack(len(purpose)) + purpose + self._transcript, "sha256")


class ServerHandshake:
    """The server's half. It reads at most 77 bytes of a stranger and stores no more than these.

    `speaker`: for whom the client speaks, which is proven when the handshake is `done`.
    """

    def __init__(self, credentials: Credentials | CredentialsOf, encryption: Encryption = Encryption.NONE) -> None:
        self._credentials, self._encryption = credentials, encryption
        self.speaker = ANYBODY
        self._received = bytearray()
        self.keys: Keys | None = None
        self.done = False

    @property
    def wanted_bytes(self) -> int:
        """How many bytes may be read from the peer now."""
        whole = _HELLO_BYTES if self.keys is None else _MAC_BYTES
        return whole - len(self._received)

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the peer (no more than `wanted_bytes`); returns what to answer."""
        self._received += data
        if self.keys is None and not _MAGIC.startswith(bytes(self._received[: len(_MAGIC)])):
            raise AuthenticationError("it does not speak the control protocol")
        if self.wanted_bytes > 0:
            return b""
        received, self._received = bytes(self._received), bytearray()
        if self.keys is None:
            return self._challenge(received[len(_MAGIC)], received[len(_MAGIC) + 1 :])
        if not hmac.compare_digest(received, self.keys.client_proof):
            raise AuthenticationError("it does not hold the job's secret")
        self.done = True
        return b""

    def _challenge(self, offered: int, rest: bytes) -> bytes:
        (self.speaker,), theirs = _SPEAKER.unpack_from(rest), rest[_SPEAKER.size :]
        if offered > 1:
            raise AuthenticationError("it does not speak the control protocol")
        if self._encryption is Encryption.REQUIRED and not offered:
            raise AuthenticationError("it does not encrypt, which HORA_ENCRYPT=always asks for")
        expected, exchanged, nonce = self._expected(self.speaker), b"", os.urandom(_NONCE_BYTES)
        if offered and self._encryption:
            exchange = Exchange()
            exchanged, nonce = exchange.shared(theirs), exchange.public
        self.keys = Keys(expected, theirs, nonce, offered=bool(offered), exchanged=exchanged)
        return bytes([self.keys.encrypted]) + nonce + self.keys.server_proof

    def _expected(self, speaker: int) -> Credentials:
        found = self._credentials if isinstance(self._credentials, Credentials) else self._credentials(speaker)
        if found.speaker != speaker:
            raise AuthenticationError(f"it wants to speak for number {speaker}, which has no key here")
        return found


class ClientHandshake:
    """The client's half: say `hello`, then answer the challenge."""

    def __init__(self, credentials: Credentials, encryption: Encryption = Encryption.NONE) -> None:
        self._credentials, self._encryption = credentials, encryption
        self._exchange = Exchange() if encryption else None
        self._nonce = os.urandom(_NONCE_BYTES) if self._exchange is None else self._exchange.public
        self.hello = _MAGIC + bytes([bool(encryption)]) + _SPEAKER.pack(credentials.speaker) + self._nonce
        self.challenge_bytes = _CHALLENGE_BYTES

    def answer(self, challenge: bytes) -> tuple[Keys, bytes]:
        """The connection's keys and the proof to send. AuthenticationError if the server has no secret."""
        encrypted, theirs, proof = challenge[0], challenge[1 : 1 + _NONCE_BYTES], challenge[1 + _NONCE_BYTES :]
        exchanged = self._exchange.shared(theirs) if encrypted and self._exchange is not None else b""
        keys = Keys(self._credentials, self._nonce, theirs, offered=bool(self._encryption), exchanged=exchanged)
        if not hmac.compare_digest(proof, keys.server_proof):
            raise AuthenticationError("the server does not hold this job's secret")
        if self._encryption is Encryption.REQUIRED and not keys.encrypted:
            raise AuthenticationError("the server does not encrypt, which HORA_ENCRYPT=always asks for")
        return keys, keys.client_proof


class _Mac:
    """Numbers and signs the frames of one direction. Takes turns with `Cipher`, which also encrypts them."""

    tag_bytes = _MAC_BYTES

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def seal(self, body: bytes | memoryview) -> tuple[bytes, bytes | memoryview]:
        """The frame's tag, and what takes the place of its body."""
        return self._next(body), body

    def open(self, tag: bytes, body: bytes) -> bytes:
        if not hmac.compare_digest(tag, self._next(body)):
            raise AuthenticationError("a frame carried a wrong signature")
        return body

    def _next(self, body: bytes | bytearray | memoryview) -> bytes:
        mac = hmac.new(self._key, _NUMBER.pack(self._number) + _LENGTH.pack(len(body)), hashlib.sha256)
        mac.update(body)
        self._number += 1
        return mac.digest()


class Sealer:
    """Turns messages into signed frames."""

    def __init__(self, key: bytes, *, encrypted: bool = False) -> None:
        self._protection = Cipher(key) if encrypted else _Mac(key)
        self._key, self._encrypted = key, encrypted

    def records(self) -> Records | None:
        """What protects a stream that begins after the messages; None if it is not encrypted."""
        return Records(derived_secret(self._key, "records")) if self._encrypted else None

    def frames(self, header: Header, payload: bytes | memoryview = b"") -> Iterator[bytes]:
        """The frames of one message, made one at a time so that a large payload is never held twice.

        All frames of a message must be sent before the next message's first.
        """
        view = memoryview(payload).cast("B")
        if view.nbytes > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a message may carry {MAX_PAYLOAD_BYTES} bytes, but this one has {view.nbytes}")
        text = json.dumps(header | {"_n": view.nbytes}, separators=(",", ":")).encode()
        if len(text) > MAX_HEADER_BYTES:
            raise ValueError(f"a message's header may have {MAX_HEADER_BYTES} bytes, but it has {len(text)}")
        taken = min(view.nbytes, MAX_FRAME_BYTES - _LENGTH.size - len(text))
        yield self._frame(b"".join((_LENGTH.pack(len(text)), text, view[:taken])))
        for start in range(taken, view.nbytes, MAX_FRAME_BYTES):
            yield self._frame(view[start : start + MAX_FRAME_BYTES])

    def _frame(self, body: bytes | memoryview) -> bytes:
        return b"".join((_LENGTH.pack(len(body)), *self._protection.seal(body)))


class Opener:
    """Turns received bytes back into messages; AuthenticationError at the first frame that is not genuine."""

    def __init__(self, key: bytes, *, encrypted: bool = False, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._protection = Cipher(key) if encrypted else _Mac(key)
        self._key, self._encrypted = key, encrypted
        self._prefix_bytes = _LENGTH.size + self._protection.tag_bytes
        self._max_payload_bytes = max_payload_bytes
        self._buffer = bytearray()
        self._header: Header | None = None
        self._payload = bytearray()
        self._missing = 0

    def records(self) -> Records | None:
        """The other end of `Sealer.records`."""
        return Records(derived_secret(self._key, "records")) if self._encrypted else None

    def feed(self, data: bytes | memoryview) -> Iterator[tuple[Header, bytes]]:
        """Messages completed by these bytes."""
        self._buffer += data
        prefix_bytes = self._prefix_bytes
        while True:
            if len(self._buffer) < prefix_bytes:
                return
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise AuthenticationError(f"a frame of {length} bytes was announced; the limit is {MAX_FRAME_BYTES}")
            if len(self._buffer) < prefix_bytes + length:
                return
            with memoryview(self._buffer) as view:
                tag, body = bytes(view[_LENGTH.size : prefix_bytes]), bytes(view[prefix_bytes : prefix_bytes + length])
            del self._buffer[: prefix_bytes + length]
            message = self._take(self._protection.open(tag, body))
            if message is not None:
                yield message

    def _take(self, body: bytes) -> tuple[Header, bytes] | None:
        if self._header is None:
            self._header, body = _opened(body)
            self._missing = self._header.pop("_n")
            if self._missing > self._max_payload_bytes:
                raise AuthenticationError(
                    f"a payload of {self._missing} bytes was announced; the limit is {self._max_payload_bytes}"
                )
        self._payload += body
        self._missing -= len(body)
        if self._missing < 0:
            raise AuthenticationError("a message's length does not match its header")
        if self._missing:
            return None
        message = self._header, bytes(self._payload)
        self._header, self._payload = None, bytearray()
        return message


def _opened(body: bytes) -> tuple[Header, bytes]:
    """The header in a message's first frame, and the rest of the frame. Genuine, but perhaps made by a hostile member."""
    length = int.from_bytes(body[: _LENGTH.size], "big")
    if len(body) < _LENGTH.size or length > MAX_HEADER_BYTES or length > len(body) - _LENGTH.size:
        raise AuthenticationError(f"a header of {length} bytes was announced; the limit is {MAX_HEADER_BYTES}")
    try:
        header = _DECODER.decode(body[_LENGTH.size : _LENGTH.size + length].decode())
    except (ValueError, RecursionError) as error:
        raise AuthenticationError(f"a header that is no JSON was sent: {str(error)[:200]}") from None
    size = header.get("_n") if isinstance(header, dict) else None
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise AuthenticationError("a message had no proper header")
    return header, body[_LENGTH.size + length :]


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)  # `json.loads` would make one for every message
