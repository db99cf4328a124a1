"""Wire protocol of the control plane: authentication, the encoding of messages, and the client's connection.

Every connection begins with a Noise handshake (`noise`) under a key that both ends hold; from then on everything is
encrypted and authenticated. A message is a small JSON header and a raw payload, split into bounded frames: nothing here
unpickles or evaluates.

    client -> server   hello         magic, speaker, Noise's first message
    server -> client   answer        Noise's second message, or a refusal
    client -> server   confirmation  an empty frame: the hello alone could be a replay
    both               frames        length, a Noise message

docs/protocol.md defines every byte. The protocol classes move no bytes: `server` drives them from its event loop,
`Connection` from a blocking socket. The owners of servers and connections define the meaning of messages; `keys`
defines which process holds which key. The package cryptography is imported with the first connection of a process: many
have none.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from hora.errors import AuthenticationError
from hora.net import sockets
from hora.net.sockets import Where

if TYPE_CHECKING:
    from hora.net.noise import Handshake, Records

Header = dict[str, Any]

SECRET_BYTES = 32
MAX_FRAME_BYTES = 65535 - 16  # of a frame's body: a Noise message has at most 65,535 bytes, with its tag
MAX_HEADER_BYTES = 60 * 1024
MAX_PAYLOAD_BYTES = 16 * 1024**3
RECEIVE_BYTES = 256 * 1024  # at most, at once
RECONNECT_PAUSE_S = 0.1

ANYBODY = -1
REFUSAL = b"refused\n"

_MAGIC = b"HORA/4\r\n"
_SPEAKER = struct.Struct(">i")
_PART = struct.Struct(">II")  # a rank, and the length of its data
_TAG_BYTES = 16
_NOISE_BYTES = 32 + _TAG_BYTES
_LENGTH = struct.Struct(">H")
_LONG = struct.Struct(">I")
_BEGIN_BYTES = len(_MAGIC) + _SPEAKER.size
_HELLO_BYTES = _BEGIN_BYTES + _NOISE_BYTES
_CONFIRMATION_BYTES = _LENGTH.size + _TAG_BYTES


def new_secret() -> bytes:
    """Return a fresh random secret for one job."""
    return os.urandom(SECRET_BYTES)


def derived_secret(secret: bytes, purpose: str) -> bytes:
    """Derive another secret for another purpose, on both ends alike; it reveals nothing about the first."""
    return hmac.digest(secret, b"derived secret: " + purpose.encode(), "sha256")


def worker_key(job_secret: bytes, worker: int) -> bytes:
    """Return a worker's own key; for -1, a holder of the job's secret, that secret."""
    return job_secret if worker < 0 else derived_secret(job_secret, f"worker {worker}")


@dataclass(frozen=True)
class Credentials:
    """Credentials of both ends of a connection."""

    secret: bytes = field(repr=False)
    purpose: str  # a job, the control tree, a session of workers: messages of one service are invalid in another
    speaker: int = ANYBODY  # the number of the worker or rank that owns the key, if each has its own

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            raise ValueError(f"a job's secret must have {SECRET_BYTES} bytes, but this one has {len(self.secret)}")

    @property
    def begin(self) -> bytes:
        """Return a client's bytes before Noise's first message."""
        return _MAGIC + _SPEAKER.pack(self.speaker)

    def handshake(self, *, initiator: bool) -> Handshake:
        """Begin a handshake that succeeds only if the other end has the same secret, purpose and speaker."""
        from hora.net.noise import Handshake

        name = self.purpose.encode()
        return Handshake(self.secret, self.begin + _LONG.pack(len(name)) + name, initiator=initiator)


CredentialsOf = Callable[[int], Credentials]  # for servers: the credentials of the speaker that a client names


class Session(NamedTuple):
    """Result of a handshake: the two ciphers of an end."""

    sealer: Sealer
    opener: Opener


class ServerHandshake:
    """The server's half. It reads and stores at most 78 bytes of an unauthenticated peer.

    `speaker`: the identity that the client claims, proven once there is a `session`. `refuses`: this client spoke the
    protocol, but under another key; `REFUSAL` as the answer tells it not to retry.
    """

    def __init__(self, credentials: Credentials | CredentialsOf, *, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._credentials, self._max_payload_bytes = credentials, max_payload_bytes
        self.speaker = ANYBODY
        self.refuses = False
        self.session: Session | None = None
        self._received = bytearray()
        self._unconfirmed: Session | None = None

    @property
    def wanted_bytes(self) -> int:
        """Number of bytes that may be read from the peer now."""
        return (_HELLO_BYTES if self._unconfirmed is None else _CONFIRMATION_BYTES) - len(self._received)

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the peer (at most `wanted_bytes`); returns the answer to send."""
        self._received += data
        if self._unconfirmed is None and not _MAGIC.startswith(bytes(self._received[: len(_MAGIC)])):
            raise AuthenticationError("it does not speak the control protocol")
        if self.wanted_bytes > 0:
            return b""
        received, self._received = bytes(self._received), bytearray()
        if self._unconfirmed is None:
            return self._answer(received)
        if list(self._unconfirmed.opener.bodies(received)) != [b""]:
            raise AuthenticationError("it does not hold the job's secret: its messages are a replay")
        self.session = self._unconfirmed
        return b""

    def _answer(self, hello: bytes) -> bytes:
        (self.speaker,) = _SPEAKER.unpack_from(hello, len(_MAGIC))
        self.refuses = True
        expected = self._credentials if isinstance(self._credentials, Credentials) else self._credentials(self.speaker)
        if expected.speaker != self.speaker:
            raise AuthenticationError(f"it claims to be number {self.speaker}, which has no key here")
        handshake = expected.handshake(initiator=False)
        try:
            handshake.read(hello[_BEGIN_BYTES:])
        except AuthenticationError:
            raise AuthenticationError("it does not hold the job's secret") from None
        self.refuses = False
        answer = handshake.write()
        to_server, to_client = handshake.split()
        self._unconfirmed = Session(Sealer(to_client), Opener(to_server, max_payload_bytes=self._max_payload_bytes))
        return answer


class ClientHandshake:
    """The client's half: send `hello`, then `finish` with the server's answer."""

    answer_bytes = _NOISE_BYTES

    def __init__(self, credentials: Credentials) -> None:
        self._handshake = credentials.handshake(initiator=True)
        self.hello = credentials.begin + self._handshake.write()

    def finish(self, answer: bytes) -> tuple[Session, bytes]:
        """Return the session, and the confirmation to send. AuthenticationError: the server lacks the secret."""
        try:
            self._handshake.read(answer)
        except AuthenticationError:
            raise AuthenticationError("the server does not hold this job's secret") from None
        to_server, to_client = self._handshake.split()
        session = Session(Sealer(to_server), Opener(to_client))
        return session, session.sealer.frame(b"")


class _Direction:
    """One direction of a connection, under its key."""

    def __init__(self, key: bytes) -> None:
        from hora.net.noise import Cipher

        self._key, self._cipher = key, Cipher(key)

    def records(self) -> Records:
        """Return this end's part of a stream of tensors that follows the messages."""
        from hora.net.noise import Records

        return Records(self._key)


class Sealer(_Direction):
    """Encodes messages as encrypted frames."""

    def frames(self, header: Header, payload: bytes | memoryview = b"") -> Iterator[bytes]:
        """Yield the frames of one message; send them before the next message's first frame."""
        view = memoryview(payload).cast("B")
        if view.nbytes > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a message may carry at most {MAX_PAYLOAD_BYTES} bytes, but this one has {view.nbytes}")
        text = json.dumps(header | {"_n": view.nbytes}, separators=(",", ":")).encode()
        if len(text) > MAX_HEADER_BYTES:
            raise ValueError(f"a message's header may have at most {MAX_HEADER_BYTES} bytes, but it has {len(text)}")
        taken = min(view.nbytes, MAX_FRAME_BYTES - _LENGTH.size - len(text))
        yield self.frame(b"".join((_LENGTH.pack(len(text)), text, view[:taken])))
        for start in range(taken, view.nbytes, MAX_FRAME_BYTES):
            yield self.frame(view[start : start + MAX_FRAME_BYTES])

    def frame(self, body: bytes | memoryview) -> bytes:
        """Return one frame; the other end treats its body as part of a message."""
        return _LENGTH.pack(len(body) + _TAG_BYTES) + self._cipher.seal(body)


class Opener(_Direction):
    """Decodes received bytes to messages; raises AuthenticationError at the first forged frame."""

    def __init__(self, key: bytes, *, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        super().__init__(key)
        self._max_payload_bytes = max_payload_bytes
        self._buffer = bytearray()
        self._header: Header | None = None
        self._payload = bytearray()
        self._missing = 0

    def feed(self, data: bytes | memoryview) -> Iterator[tuple[Header, bytes]]:
        """Yield the messages completed by these bytes."""
        for body in self.bodies(data):
            message = self._completed(body)
            if message is not None:
                yield message

    def bodies(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Yield the bodies of the frames completed by these bytes."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if end < _LENGTH.size + _TAG_BYTES:
                raise AuthenticationError(f"a frame of {end - _LENGTH.size} bytes was announced, which is too short")
            if len(self._buffer) < end:
                return
            with memoryview(self._buffer) as view:
                sealed = bytes(view[_LENGTH.size : end])
            del self._buffer[:end]
            yield self._cipher.open(sealed)

    def _completed(self, body: bytes) -> tuple[Header, bytes] | None:
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
    """Return the header in a message's first frame (genuine, but perhaps from a hostile member) and the rest."""
    length = int.from_bytes(body[: _LENGTH.size], "big")
    if len(body) < _LENGTH.size or length > MAX_HEADER_BYTES or length > len(body) - _LENGTH.size:
        raise AuthenticationError(f"a header of {length} bytes was announced; the limit is {MAX_HEADER_BYTES}")
    try:
        header = _DECODER.decode(body[_LENGTH.size : _LENGTH.size + length].decode())
    except (ValueError, RecursionError) as error:
        raise AuthenticationError(f"a header is not JSON: {str(error)[:200]}") from None
    size = header.get("_n") if isinstance(header, dict) else None
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise AuthenticationError("a message had no valid header")
    return header, body[_LENGTH.size + length :]


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_no_number)  # `json.loads` would create one for every message


def join_parts(parts: Sequence[tuple[int, bytes]]) -> bytes:
    """Join payloads after the ranks that sent them: a header has no room for thousands."""
    return b"".join([*(_PART.pack(rank, len(data)) for rank, data in parts), *(data for _, data in parts)])


def cut_parts(payload: bytes, num_parts: int) -> list[tuple[int, bytes]]:
    """Split the result of `join_parts`."""
    at = num_parts * _PART.size
    pieces = []
    for rank, length in _PART.iter_unpack(payload[:at]):
        pieces.append((rank, payload[at : at + length]))
        at += length
    return pieces


_SHORTEST_REST_S, _LONGEST_REST_S = 0.005, 0.2


def connect(where: Where, credentials: Credentials, *, timeout_s: float, silence_limit_s: int = 30) -> Connection:
    """Connect and authenticate both ends within the time limit.

    Raises AuthenticationError if the server does not hold the secret, TimeoutError after the limit, and another OSError
    (refused, unreachable, another user's socket) at once.
    """
    deadline, rest_s, what = time.monotonic() + timeout_s, _SHORTEST_REST_S, "did not answer"
    while True:
        try:
            return _attempt(where, credentials, deadline, silence_limit_s)
        except EOFError:
            # A flood of strangers can displace a handshake on the server: retry.
            what = "closed every connection during the handshake"
            if time.monotonic() + rest_s < deadline:
                time.sleep(rest_s)
                rest_s = min(2 * rest_s, _LONGEST_REST_S)
                continue
        except TimeoutError:
            pass
        name = where if isinstance(where, str) else f"{where[0]}:{where[1]}"
        raise TimeoutError(f"{name} {what} for {timeout_s:g} s")


def _attempt(where: Where, credentials: Credentials, deadline: float, silence_limit_s: int) -> Connection:
    sock = sockets.open_socket(where, limit_s=deadline - time.monotonic())
    try:
        sockets.tune(sock, silence_limit_s=silence_limit_s)
        handshake = ClientHandshake(credentials)
        sock.sendall(handshake.hello)
        session, confirmation = handshake.finish(_receive_answer(sock, handshake.answer_bytes, deadline))
        sock.sendall(confirmation)
        sock.settimeout(None)
    except (ConnectionResetError, BrokenPipeError):
        sock.close()
        raise EOFError from None
    except BaseException:
        sock.close()
        raise
    return Connection(sock, session)


def _receive_answer(sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Return the server's part of the handshake. Raises EOFError if the server closes the connection."""
    received = bytearray()
    while len(received) < num_bytes:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        data = sock.recv(num_bytes - len(received))
        if not data and received == REFUSAL:  # from the server, or from an attacker in between
            break
        if not data:
            raise EOFError
        received += data
    return bytes(received)


@dataclass(frozen=True)
class Stream:
    """A connection that carries raw bytes in one direction instead of messages; unencrypted without `records`."""

    sock: socket.socket
    records: Records | None = None


class Connection:
    """An authenticated connection on a blocking socket. One sender and one receiver at a time."""

    def __init__(self, sock: socket.socket, session: Session) -> None:
        self.sock = sock
        self.sealer, self.opener = session
        self._ready: deque[tuple[Header, bytes]] = deque()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def send(self, header: Header, payload: bytes | memoryview = b"") -> None:
        for frame in self.sealer.frames(header, payload):
            self.sock.sendall(frame)

    def receive(self, *, limit_s: float | None = None) -> tuple[Header, bytes]:
        """Return the next message. EOFError: the server closed the connection; TimeoutError: after the limit."""
        if limit_s is not None:
            self.sock.settimeout(limit_s)
        while not self._ready:
            data = self.sock.recv(RECEIVE_BYTES)
            if not data:
                raise EOFError("the server closed the connection")
            self._ready.extend(self.opener.feed(data))
        return self._ready.popleft()

    def receive_descriptor(self, *, limit_s: float) -> int | None:
        """Return the file descriptor that the server passes over a local socket; None if it has none."""
        self.sock.settimeout(max(limit_s, 0.001))
        _, descriptors, _, _ = socket.recv_fds(self.sock, 1, 1)
        return descriptors[0] if descriptors else None

    def shutdown(self) -> None:
        """Wake a blocked receiver with EOFError. Harmless on a dead connection."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # already disconnected: no receiver to wake
            return

    def close(self) -> None:
        self.sock.close()
