"""The acceptor survives every shortage, limits unauthenticated connections, and is the only one in the sources."""

from __future__ import annotations

import ast
import contextlib
import errno
import os
import queue
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hora.launch.ha.following import Relay
from hora.net import acceptor, sockets
from hora.net.server import Peer, Server
from hora.net.wire import Credentials, connect, new_secret
from waiting import wait_until

LIMIT_S = 20.0
SOURCES = Path(__file__).parents[2] / "src"


class Echo:
    def message(self, peer: Peer, header: dict, payload: bytes) -> None:
        if header.get("thread"):
            raise RuntimeError("can't start new thread")
        peer.send(header, payload)

    def closed(self, peer: Peer) -> None:
        pass


@pytest.fixture
def served() -> Iterator[tuple[tuple[str, int], Credentials]]:
    credentials = Credentials(new_secret(), "test")
    server = Server(Echo(), name="test")
    port = server.listen(("127.0.0.1", 0))
    server.start(credentials)
    yield ("127.0.0.1", port), credentials
    server.close()


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Take every descriptor of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 3, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def answers(where: sockets.Where, credentials: Credentials) -> bool:
    with connect(where, credentials, timeout_s=LIMIT_S) as connection:
        connection.send({"n": 1}, b"hello")
        return connection.receive(limit_s=LIMIT_S) == ({"n": 1}, b"hello")


def test_connections_that_arrive_without_free_descriptors_are_accepted_later(served, caplog):
    where, credentials = served
    early = [socket.socket() for _ in range(3)]
    with no_descriptor_left():
        for sock in early:
            sock.connect(where)
        wait_until("the server says it", lambda: "no connection can be accepted for now" in caplog.text)
    assert answers(where, credentials)
    said = [record for record in caplog.records if "no connection can be accepted" in record.getMessage()]
    assert len(said) == 1
    assert "ulimit -n" in said[0].getMessage()
    for sock in early:
        sock.close()


@pytest.mark.parametrize("number", [errno.EPROTO, errno.ENOMEM, errno.EPERM, errno.EINVAL])
def test_no_error_of_accept_stops_a_server(served, number, monkeypatch, caplog):
    where, credentials = served
    left = [1, 1]
    real = socket.socket.accept

    def accept(self: socket.socket) -> tuple[socket.socket, tuple[str, int]]:
        if left and self.getsockname()[1] == where[1]:
            left.pop()
            raise OSError(number, os.strerror(number))
        return real(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    assert answers(where, credentials)
    assert not left


def test_a_handler_without_a_thread_loses_only_its_own_connection(served, caplog):
    where, credentials = served
    with connect(where, credentials, timeout_s=LIMIT_S) as connection:
        connection.send({"thread": True})
        with pytest.raises(EOFError):
            connection.receive(limit_s=LIMIT_S)
    assert "cannot start another thread" in caplog.text
    assert answers(where, credentials)


def test_unauthenticated_connections_hold_at_most_an_eighth_of_the_descriptors(monkeypatch):
    for soft, limit in ((1 << 20, 128), (1024, 128), (256, 32), (4, 1), (resource.RLIM_INFINITY, 128)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert acceptor.max_pending() == limit


def silent_leader(sock: socket.socket, came: queue.SimpleQueue[socket.socket]) -> None:
    with contextlib.suppress(OSError):
        while True:
            came.put(sock.accept()[0])


def test_a_relay_survives_silent_connections_and_a_lack_of_descriptors(monkeypatch):
    monkeypatch.setattr(acceptor, "MAX_STRANGERS", 8)
    relay, came = Relay(), queue.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as leader:
        threading.Thread(target=silent_leader, args=(leader, came), daemon=True).start()
        relay.set_target(leader.getsockname())
        crowd = [sockets.open_socket(relay.name, limit_s=LIMIT_S) for _ in range(40)]
        wait_until("the crowd is kept small", lambda: 0 < len(relay._tasks.connections) <= 8)
        early = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        with no_descriptor_left():
            for sock in early:
                sock.connect("\0" + relay.name)
        for sock in (*crowd, *early):
            sock.close()
        wait_until("the crowd is gone", lambda: not relay._tasks.connections)
        while not came.empty():
            came.get().close()
        with sockets.open_socket(relay.name, limit_s=LIMIT_S) as worker:
            worker.sendall(b"hello")
            seen: list[bytes] = []
            while not any(seen):  # the leader's backlog may still hold connections of the crowd
                other = came.get(timeout=LIMIT_S)
                seen.append(other.recv(5))
            other.sendall(b"welcome")
            assert (seen[-1], worker.recv(7)) == (b"hello", b"welcome")
            other.close()
        relay.close()


def test_a_relay_accepts_only_its_own_user(monkeypatch):
    relay = Relay()
    monkeypatch.setattr(sockets, "process_at", lambda sock: sockets.Process(7, os.geteuid() + 1))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(LIMIT_S)
        sock.connect("\0" + relay.name)
        assert sock.recv(1) == b""
    relay.close()


def test_one_place_accepts_connections():
    """Every listening socket is created by `net.sockets` and passed to an acceptor, so all limits apply."""
    accepting, listening = set(), set()
    for path in sorted(SOURCES.rglob("*.py")):
        module = path.relative_to(SOURCES).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name, receiver = node.func.attr, ast.unparse(node.func.value)
            if name in ("accept", "accept4"):
                accepting.add(module)
            makes = {"create_server", "create_unix_server", "start_server", "start_unix_server", "serve_forever"}
            if name in makes or (name == "listen" and not receiver.lower().endswith("server")):
                listening.add((module, receiver))
    # The agent's part takes only connections of its own user to an MPI library's port, and reads nothing of them.
    assert accepting == {"hora/net/acceptor.py", "hora/launch/agent/pmi.py"}
    assert listening == {
        ("hora/net/sockets.py", "socket"),
        ("hora/net/sockets.py", "sock"),
        ("hora/net/server.py", "sockets"),
        ("hora/watch/address.py", "sockets"),
        ("hora/launch/agent/pmi.py", "inner"),
        ("hora/launch/ha/following.py", "sockets"),  # the relay's listening socket
        ("hora/cli/doctor.py", "sockets"),  # peers only connect to its backlog
        ("hora/workers/capacity.py", "sockets"),  # a claim; nothing is accepted there
    }
    assert acceptor.__doc__ is not None
