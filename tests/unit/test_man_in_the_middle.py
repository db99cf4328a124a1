"""An attacker between both ends changes, cuts, drops, repeats, reorders, reflects or splices traffic, at random.

Each end receives an intact prefix of the messages, and then the connection ends with an explanation. `make
test` tries four hundred manipulations of connections and as many of streams, `make test-security` ten thousand.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hora.engine.transport.base import Membership
from hora.engine.transport.stream import StreamGroup, Streams
from hora.errors import AuthenticationError, HorovodInternalError
from hora.net import acceptor
from hora.net.noise import Records
from hora.net.server import Peer, Server
from hora.net.wire import REFUSAL, Credentials, Header, Stream, connect, new_secret

LIMIT_S = 60.0
CREDENTIALS = Credentials(new_secret(), "job", 3)
MESSAGES = [({"n": number}, bytes([number]) * (200 * number)) for number in range(4)]
HELLO_BYTES, ANSWER_BYTES, LENGTH_BYTES = 60, 48, 2
# All reasons that a server may give for the end of a connection.
WORDS = (
    "it does not speak the control protocol",
    "it does not hold the job's secret",
    "which has no key here",
    "it disconnected without authenticating",
    "a message was modified in transit, or is not this connection's next one",
    "which is too short",
)


class Echo:
    """A server's handler that records each message and sends it back."""

    def __init__(self) -> None:
        self.heard: list[tuple[Header, bytes]] = []

    def message(self, peer: Peer, header: Header, payload: bytes) -> None:
        self.heard.append((header, payload))
        peer.send(header, payload)

    def closed(self, peer: Peer) -> None: ...


class Place:
    """The real server, and conversations with it; their units are the hello, the answer and frames."""

    def __init__(self, complaints: list[str]) -> None:
        self.echo, self.complaints = Echo(), complaints
        self.server = Server(self.echo, name="echo")
        self.port = self.server.listen(("127.0.0.1", 0))
        self.server.start(CREDENTIALS)

    def converse(self, between: Between | None) -> tuple[list[tuple[Header, bytes]], Between, BaseException | None]:
        """Send all messages through `between`; return the replies, and the error that ended it, if any."""
        between = between or Between()
        self.echo.heard.clear()
        got: list[tuple[Header, bytes]] = []
        with ThreadPoolExecutor(1) as pool, socket.create_server(("127.0.0.1", 0)) as listener:
            carried = pool.submit(between.carry, listener, self.port)
            try:
                with connect(listener.getsockname(), CREDENTIALS, timeout_s=LIMIT_S) as connection:
                    connection.sock.sendall(b"".join(f for m in MESSAGES for f in connection.sealer.frames(*m)))
                    while len(got) < len(MESSAGES):
                        got.append(connection.receive(limit_s=LIMIT_S))
                error = None
            except (AuthenticationError, EOFError, OSError) as problem:
                error = problem
            carried.result(LIMIT_S)
        return got, between, error


class Between:
    """Forwards a conversation unchanged; it knows the units of each phase."""

    def __init__(self) -> None:
        self.said: list[list[bytes]] = []  # hello; answer; confirmation and messages; the server's replies

    def carry(self, listener: socket.socket, port: int) -> None:
        client = listener.accept()[0]
        listener.close()  # no second connection
        with client, socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as server:
            client.settimeout(LIMIT_S)
            with contextlib.suppress(OSError, EOFError):
                ends = ((client, server), (server, client), (client, server), (server, client))
                for phase, (source, target) in enumerate(ends):
                    units = self._units(phase, source)
                    self.said.append(units)
                    data = self.changed(phase, units)
                    target.sendall(data)
                    if data != b"".join(units):  # the conversation is corrupt: let both ends detect it
                        target.shutdown(socket.SHUT_WR)
                        if target is server:
                            client.sendall(_all(server))
                        break

    def changed(self, phase: int, units: list[bytes]) -> bytes:
        return b"".join(units)

    @staticmethod
    def _units(phase: int, source: socket.socket) -> list[bytes]:
        if phase < 2:
            return [_exactly(source, (HELLO_BYTES, ANSWER_BYTES)[phase])]
        return [_frame(source) for _ in range(len(MESSAGES) + (phase == 2))]


class Attacker(Between):
    """Manipulates one phase. `recorded` is another conversation under the same key."""

    def __init__(self, rng: random.Random, recorded: list[list[bytes]]) -> None:
        super().__init__()
        self._rng, self._recorded = rng, recorded
        self.phase = rng.randrange(4)
        self.data = b""  # the manipulated bytes

    def changed(self, phase: int, units: list[bytes]) -> bytes:
        if phase != self.phase:
            return b"".join(units)
        while not self.data or self.data == b"".join(units):
            self.data = manipulated(self._rng, units, [*self.said, *self._recorded])
        return self.data


def manipulated(rng: random.Random, units: Sequence[bytes], others: Sequence[Sequence[bytes]]) -> bytes:
    """Return the units, manipulated by an attacker that has also recorded `others`."""
    units, whole = list(units), b"".join(units)
    at, place = rng.randrange(len(units)), rng.randrange(len(whole))
    other = rng.choice([unit for some in others for unit in some])
    match rng.randrange(8):
        case 0:
            return whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :]
        case 1:
            return whole[: max(place, 1)]
        case 2:
            return whole[:place] + whole[place + rng.randint(1, 40) :]
        case 3:  # a replay, at once or later
            return b"".join([*units[: at + 1], units[rng.randint(0, at)], *units[at + 1 :]])
        case 4:
            rng.shuffle(units)
        case 5:  # a splice or a reflection: a unit of another phase, conversation or direction
            units[at] = other[-len(units[at]) :] if rng.random() < 0.3 else other
        case 6:
            units.insert(at, other)
        case 7:
            return whole[:place] + rng.randbytes(rng.randint(1, 60)) + whole[place:]
    return b"".join(units)


def _all(sock: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while more := sock.recv(2**16):
            data += more
    return data


def _exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = sock.recv(num_bytes, socket.MSG_WAITALL)
    if len(data) < num_bytes:
        raise EOFError
    return data


def _frame(sock: socket.socket) -> bytes:
    length = _exactly(sock, LENGTH_BYTES)
    return length + _exactly(sock, int.from_bytes(length, "big"))


def num_intact(units: Sequence[bytes], data: bytes) -> int:
    """Return the number of whole units that `data` begins with."""
    ends = itertools.accumulate(len(unit) for unit in units)
    return sum(data[:end] == b"".join(units)[:end] for end in ends)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    complaints: list[str] = []
    died: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(acceptor.RejectionLog, "add", lambda self, where, why: complaints.append(why))
    monkeypatch.setattr(threading, "excepthook", died.append)
    place = Place(complaints)
    yield place
    place.server.close()
    assert not died


def test_connections(place: Place, cases: Iterator[tuple[str, random.Random]]):
    got, between, error = place.converse(None)
    assert (got, place.echo.heard, error) == (MESSAGES, MESSAGES, None)
    recorded = between.said
    for case, rng in itertools.islice(cases, 0, None, 5):
        attacker = Attacker(rng, recorded)
        got, _, error = place.converse(attacker)
        phase, data = attacker.phase, attacker.data
        intact = num_intact(attacker.said[phase], data)
        assert (error is None) == (got == MESSAGES), case
        assert got == MESSAGES[: len(got)], case
        if phase < 2:
            assert not place.echo.heard, case
            assert not got, case
        elif phase == 2:
            assert place.echo.heard == MESSAGES[: max(intact - 1, 0)], case
            assert len(got) <= len(place.echo.heard), case
        else:
            assert place.echo.heard == MESSAGES, case
            assert len(got) <= intact, case
        assert error is None or str(error), case
        assert all(any(word in why for word in WORDS) for why in place.complaints), (case, place.complaints)
        place.complaints.clear()
    got, _, error = place.converse(None)
    assert (got, error) == (MESSAGES, None)


def test_a_forged_refusal_ends_the_attempt_with_an_explanation(place: Place):
    class Refuses(Between):
        def changed(self, phase: int, units: list[bytes]) -> bytes:
            return REFUSAL if phase == 1 else b"".join(units)

    got, _, error = place.converse(Refuses())
    assert not got
    assert isinstance(error, AuthenticationError)
    assert "does not hold this job's secret" in str(error)


SIZES = [1, 1000, 70_000, 300_000, 5]  # the fourth is split into two records


def records_of(key: bytes, pieces: Sequence[bytes]) -> list[bytes]:
    sealer, sealed = Records(key), []
    for piece in pieces:
        for start in range(0, len(piece), Records.most_bytes):
            part = piece[start : start + Records.most_bytes]
            record = bytearray(len(part) + Records.tag_bytes)
            sealer.seal(memoryview(part), memoryview(record))
            sealed.append(bytes(record))
    return sealed


def test_streams(cases: Iterator[tuple[str, random.Random]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hora.engine.transport.group._GRACE_S", 0.0)
    key = new_secret()
    pieces = [random.Random(size).randbytes(size) for size in SIZES]
    units, elsewhere = records_of(key, pieces), records_of(new_secret(), pieces)
    ends = list(itertools.accumulate(len(piece) for piece in pieces))
    with ThreadPoolExecutor(1) as pool:
        assert received(b"".join(units), key, pool) == (pieces, "")
        for case, rng in itertools.islice(cases, 0, None, 5):
            data = b"".join(units)
            while data == b"".join(units):
                data = manipulated(rng, units, [units, elsewhere])
            got, error = received(data, key, pool)
            whole = sum(len(unit) - Records.tag_bytes for unit in units[: num_intact(units, data)])
            num_pieces = sum(end <= whole for end in ends)
            assert got == pieces[:num_pieces], case
            assert num_pieces == len(pieces) or any(w in error for w in ("modified in transit", "a peer is lost")), case


def received(data: bytes, key: bytes, pool: ThreadPoolExecutor) -> tuple[list[bytes], str]:
    """Return the pieces that member 1 of a group receives from these bytes, one operation each, and its error."""
    wire, into = socket.socketpair()
    back, sink = socket.socketpair()
    group = StreamGroup(
        Streams({0: Stream(back, Records(key))}, {0: Stream(into, Records(key))}),
        Membership(1, 2, lambda: None),
    )
    got: list[bytes] = []

    def send() -> None:
        with wire, contextlib.suppress(OSError):
            wire.sendall(data)

    sent = pool.submit(send)
    try:
        for size in SIZES:
            output = torch.zeros(size, dtype=torch.uint8)
            group.finish(group.start_alltoall(output, torch.empty(0, dtype=torch.uint8), [size, 0], [0, 0]))
            got.append(output.numpy().tobytes())
    except HorovodInternalError as error:
        return got, str(error)
    finally:
        group.close()
        sink.close()
        sent.result(LIMIT_S)
    return got, ""
