"""The server without a launcher or ranks: local and TCP connections in one process."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hora.errors import AuthenticationError
from hora.net import acceptor, sockets
from hora.net.server import Peer, Server
from hora.net.wire import Credentials, connect, new_secret

LIMIT_S = 20.0


class Echo:
    """Sends every message back, or passes it to `react`."""

    def __init__(self, react: Callable[[Peer, dict, bytes], None] | None = None) -> None:
        self.react = react
        self.closings: queue.SimpleQueue[Peer] = queue.SimpleQueue()

    def message(self, peer: Peer, header: dict, payload: bytes) -> None:
        if self.react is not None:
            self.react(peer, header, payload)
        else:
            peer.send(header, payload)

    def closed(self, peer: Peer) -> None:
        self.closings.put(peer)


class Place:
    """A server on a local socket and on a port."""

    def __init__(self) -> None:
        self.echo, self.credentials = Echo(), Credentials(new_secret(), "test")
        self.name = f"hora-test-{new_secret().hex()}"
        self.server = Server(self.echo, name="test", max_payload_bytes=1 << 20)
        self.server.listen(self.name)
        self.tcp = ("127.0.0.1", self.server.listen(("127.0.0.1", 0)))
        self.server.start(self.credentials)

    def connect(self, where: sockets.Where | None = None, timeout_s: float = LIMIT_S):
        return connect(where or self.name, self.credentials, timeout_s=timeout_s)


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    yield place
    place.server.close()


def test_one_server_on_a_local_socket_and_on_a_port(place: Place):
    for where in (place.name, place.tcp):
        with place.connect(where) as connection:
            connection.send({"n": 1}, b"payload")
            assert connection.receive(limit_s=LIMIT_S) == ({"n": 1}, b"payload")
        assert place.echo.closings.get(timeout=LIMIT_S)


def test_another_secret_and_another_purpose_are_rejected(place: Place):
    for credentials in (Credentials(new_secret(), "test"), Credentials(place.credentials.secret, "other")):
        for where in (place.name, place.tcp):
            with pytest.raises(AuthenticationError):
                connect(where, credentials, timeout_s=LIMIT_S)


def test_a_process_of_another_user_is_rejected(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(sockets, "process_at", lambda sock: sockets.Process(7, os.geteuid() + 1))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(LIMIT_S)
        sock.connect("\0" + place.name)
        assert sock.recv(1) == b""
    assert "it belongs to another user" in caplog.text
    with pytest.raises(ConnectionError, match=f"belongs to user {os.geteuid() + 1}"):
        place.connect()
    monkeypatch.undo()
    place.connect().close()


def test_only_unauthenticated_disconnects_from_a_port_are_reported(place: Place, caplog: pytest.LogCaptureFixture):
    """A local socket's peer is this user, who may check the owner of the name without a key."""
    for where in (place.name, place.tcp):
        sockets.open_socket(where, limit_s=LIMIT_S).close()
        with place.connect(where) as connection:  # accepted after the first one
            connection.send({})
            connection.receive(limit_s=LIMIT_S)
    (record,) = caplog.records
    assert "127.0.0.1" in record.getMessage()
    assert "disconnected without authenticating" in record.getMessage()


def test_a_payload_above_the_servers_limit_ends_the_connection(place: Place):
    with place.connect() as connection:
        connection.send({}, bytes(1 << 20))
        assert len(connection.receive(limit_s=LIMIT_S)[1]) == 1 << 20
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the server may close before it has read all
            connection.send({}, bytes((1 << 20) + 1))
        with pytest.raises((EOFError, ConnectionResetError)):
            connection.receive(limit_s=LIMIT_S)


def test_a_descriptor_travels_over_a_local_socket(place: Place):
    descriptor = os.memfd_create("test")
    os.write(descriptor, b"shared")

    def hand_over(peer: Peer, header: dict, payload: bytes) -> None:
        peer.send_descriptor(descriptor)
        peer.close()

    place.echo.react = hand_over
    with place.connect() as connection:
        connection.send({})
        received = connection.receive_descriptor(limit_s=LIMIT_S)
        assert os.pread(received, 10, 0) == b"shared"
        assert connection.receive_descriptor(limit_s=LIMIT_S) is None
    os.close(descriptor)
    os.close(received)


def test_any_thread_may_send_and_a_peer_that_does_not_read_delays_no_other(place: Place):
    found: queue.SimpleQueue[Peer] = queue.SimpleQueue()
    place.echo.react = lambda peer, header, payload: found.put(peer)
    with place.connect() as slow, place.connect() as other:
        peers = []
        for connection in (slow, other):
            connection.send({})
            peers.append(found.get(timeout=LIMIT_S))
        chunk = os.urandom(1 << 18)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda n: peers[0].send({"n": n}, chunk), range(32)))  # far more than its socket buffers
        assert not peers[0].drained
        peers[1].send({"quick": True})
        assert other.receive(limit_s=LIMIT_S)[0] == {"quick": True}
        came = [slow.receive(limit_s=LIMIT_S) for _ in range(32)]
    assert {header["n"] for header, _ in came} == set(range(32))
    assert {payload for _, payload in came} == {chunk}


def test_an_outgoing_connection_is_served_like_the_others(place: Place):
    echo = Echo(lambda peer, header, payload: heard.put((peer.number, header)))
    heard: queue.SimpleQueue[tuple] = queue.SimpleQueue()
    own = Server(echo, name="own")
    try:
        peer = own.peer_at(place.connect())
        peer.number = 3
        own.serve(peer)
        own.start(Credentials(new_secret(), "own"))
        peer.send({"say": "it"})
        assert heard.get(timeout=LIMIT_S) == (3, {"say": "it"})
        place.server.close()
        assert echo.closings.get(timeout=LIMIT_S) is peer
    finally:
        own.close()


def test_the_owner_is_notified_of_an_error_that_ends_the_thread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    told: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    server = Server(Echo(), name="test", failed=told.put)
    server.start(Credentials(new_secret(), "test"))
    server.call(lambda: 1 / 0)
    assert isinstance(told.get(timeout=LIMIT_S), ZeroDivisionError)
    server.close()


def test_a_client_displaced_by_a_crowd_reconnects(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(acceptor, "MAX_STRANGERS", 2)
    crowd = [sockets.open_socket(place.name, limit_s=LIMIT_S) for _ in range(20)]
    place.connect().close()
    for sock in crowd:
        sock.close()


def test_a_server_that_closes_every_handshake_is_named():
    with sockets.listen(("127.0.0.1", 0)) as listener:
        where = listener.getsockname()[:2]
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(connect, where, Credentials(new_secret(), "test"), timeout_s=0.2)
            num_attempts = 0
            while not waiting.done():
                listener.settimeout(0.5)
                try:
                    listener.accept()[0].close()
                    num_attempts += 1
                except TimeoutError:
                    break
            assert num_attempts < 10, "it waits longer and longer before it comes again"
            with pytest.raises(TimeoutError, match=r"closed every connection during the handshake for 0\.2 s"):
                waiting.result(LIMIT_S)


def test_an_occupied_local_name_is_rejected_and_a_closed_one_is_free(place: Place):
    with pytest.raises(OSError, match="in use"):
        sockets.listen(place.name)
    place.server.close()
    sockets.listen(place.name).close()


def test_a_server_that_was_never_started_can_be_closed():
    server = Server(Echo(), name="test")
    name = f"hora-test-{new_secret().hex()}"
    server.listen(name)
    server.close()
    with pytest.raises(ConnectionRefusedError):
        sockets.open_socket(name, limit_s=1)


def test_an_abandoned_server_frees_its_name(place: Place):
    """A forked child abandons the server that it inherited."""
    server = Server(Echo(), name="never started")
    name = f"hora-test-{new_secret().hex()}"
    server.listen(name)
    server.abandon()
    server.close()
    sockets.listen(name).close()


@pytest.mark.parametrize("local", [True, False])
def test_a_peers_last_message_is_received_although_sending_to_it_fails(place: Place, local: bool):
    """A goodbye is not lost when both ends send at the same moment."""
    came, busy, left = (threading.Event() for _ in range(3))
    heard: list[str] = []
    peers: list[Peer] = []

    def react(peer: Peer, header: dict, payload: bytes) -> None:
        heard.append(header["op"])
        if header["op"] == "here":
            peers.append(peer)
            came.set()
        elif header["op"] == "busy":
            busy.set()
            assert left.wait(LIMIT_S)
            for _ in range(3):
                peers[0].send({"notice": "too late"})
                time.sleep(0.05)

    place.echo.react = react
    first, second = (place.connect(place.name if local else place.tcp) for _ in range(2))
    try:
        first.send({"op": "here"})
        assert came.wait(LIMIT_S)
        second.send({"op": "busy"})
        assert busy.wait(LIMIT_S)
        first.send({"op": "goodbye"})
        first.close()
        left.set()
        assert place.echo.closings.get(timeout=LIMIT_S) is peers[0]
        assert heard[-1] == "goodbye"
    finally:
        second.close()


def test_the_handler_learns_of_a_dead_peer_only_after_its_current_message(place: Place):
    """It may be iterating over data that handling the death would change."""
    came, dead, told = threading.Event(), threading.Event(), queue.SimpleQueue()

    class Handler:
        at_work = False
        first: Peer | None = None

        def message(self, peer: Peer, header: dict, payload: bytes) -> None:
            if self.first is None:
                self.first = peer
                came.set()
                return
            self.at_work = True
            assert dead.wait(LIMIT_S)
            for _ in range(3):
                self.first.send({"notice": "too late"})
            self.at_work = False

        def closed(self, peer: Peer) -> None:
            told.put((peer is self.first, self.at_work))

    server = Server(Handler(), name="test")
    where = ("127.0.0.1", server.listen(("127.0.0.1", 0)))
    server.start(place.credentials)
    first, second = (place.connect(where) for _ in range(2))
    try:
        first.send({"op": "here"})
        assert came.wait(LIMIT_S)
        second.send({"op": "here"})
        first.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing sends a reset
        first.close()
        dead.set()
        assert told.get(timeout=LIMIT_S) == (True, False)
    finally:
        second.close()
        server.close()


@pytest.mark.parametrize("limit_s", [3e6, 1e300])
def test_a_limit_of_many_days_is_a_valid_wait(place, limit_s):
    """The selector accepts at most 24 days, which once ended a job with `--gloo-timeout-seconds 3000000`."""
    planned = threading.Event()
    place.server.call(lambda: (place.server.call_at(time.monotonic() + limit_s, lambda: None), planned.set()))
    assert planned.wait(LIMIT_S)
    with place.connect() as connection:  # the thread has been waiting since, and still answers
        connection.send({"n": 1})
        assert connection.receive(limit_s=LIMIT_S)[0] == {"n": 1}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_user_at_the_other_end_of_a_connection_of_this_machine(address):
    with sockets.listen((address, 0)) as listener:
        client = socket.create_connection(listener.getsockname()[:2], timeout=LIMIT_S)
        served, _ = listener.accept()
        with served:
            assert sockets.user_at(served) == sockets.user_at(client) == os.geteuid()
            client.shutdown(socket.SHUT_WR)
            assert sockets.user_at(served) is None
            client.close()
