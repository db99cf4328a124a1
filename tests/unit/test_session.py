"""Sessions with broken connections: every message arrives once, in order; a client that stays away is lost."""

from __future__ import annotations

import threading

import pytest

from hora.net.server import Server
from hora.net.session import ClientSession, Sessions
from hora.net.wire import Credentials, connect, new_secret
from waiting import wait_until

LIMIT_S = 30.0


class Echo:
    """A server that sends every message back, and whose connections the test can break."""

    def __init__(self, limit_s: float) -> None:
        self.credentials = Credentials(new_secret(), "test")
        self.heard: list[int] = []
        self.gone = threading.Event()
        sessions = Sessions(self, limit_s=limit_s)
        self.server = Server(sessions, name="echo")
        sessions.server = self.server
        self.port = self.server.listen(("127.0.0.1", 0))
        self.server.start(self.credentials)

    def reach(self, limit_s: float):
        return connect(("127.0.0.1", self.port), self.credentials, timeout_s=limit_s)

    def client(self, limit_s: float = LIMIT_S) -> ClientSession:
        return ClientSession(self.reach(LIMIT_S), self.reach, limit_s=limit_s)

    def message(self, peer, header, payload) -> None:
        self.heard.append(header["i"])
        peer.send({"i": header["i"]}, payload)

    def closed(self, peer) -> None:
        self.gone.set()


@pytest.fixture
def echo():
    opened = Echo(LIMIT_S)
    yield opened
    opened.server.close()


def test_no_message_is_lost_or_repeated_when_connections_break(echo):
    client = echo.client()
    got: list[int] = []

    def send() -> None:
        for number in range(1000):
            client.send({"i": number}, b"x" * 1000)
            if number % 100 == 50:
                client.connection.shutdown()

    sender = threading.Thread(target=send)
    sender.start()
    while len(got) < 1000:
        header, payload = client.receive(limit_s=LIMIT_S)
        assert payload == b"x" * 1000
        got.append(header["i"])
        if len(got) % 170 == 0:
            for peer in echo.server.peers:
                peer.close()
    sender.join(LIMIT_S)
    assert got == echo.heard == list(range(1000))
    assert client.unsent_bytes < 1000 * 1000, "what has arrived is not kept"
    client.close()
    assert echo.gone.wait(LIMIT_S)


def test_a_client_that_says_goodbye_is_gone_at_once_and_cannot_return(echo):
    client = echo.client()
    client.send({"i": 1})
    assert client.receive(limit_s=LIMIT_S)[0] == {"i": 1}
    client.close()
    assert echo.gone.wait(LIMIT_S)
    again = echo.reach(LIMIT_S)
    again.send({"session": client._name, "received": 1})
    assert again.receive(limit_s=LIMIT_S)[0] == {"ended": client._name}
    with pytest.raises(EOFError):
        again.receive(limit_s=LIMIT_S)
    again.close()


def test_a_client_that_dies_is_gone_soon(echo):
    client = echo.client()
    client.send({"i": 1})
    client.connection.close()  # as the kernel does for a process that is killed
    assert echo.gone.wait(LIMIT_S)


def test_without_a_limit_a_broken_connection_ends_the_session():
    echo = Echo(0.0)
    client = echo.client(0.0)
    client.send({"i": 1})
    client.receive()
    client.connection.shutdown()
    with pytest.raises(EOFError):
        client.receive()
    assert echo.gone.wait(LIMIT_S)
    client.close()
    echo.server.close()


def test_a_client_does_not_wait_for_a_closed_server(echo):
    client = echo.client(1e6)
    client.send({"i": 1})
    client.receive()
    echo.server.close()
    with pytest.raises(EOFError):
        client.receive()
    client.send({"i": 2})  # not an error: the receiver notices
    client.close()


def test_another_workers_session_is_rejected():
    secret = new_secret()
    echo = Echo(LIMIT_S)
    echo.server.close()
    sessions = Sessions(echo, limit_s=LIMIT_S)
    server = Server(sessions, name="echo")
    sessions.server = server
    port = server.listen(("127.0.0.1", 0))
    server.start(lambda number: Credentials(secret, "test", number))
    first = connect(("127.0.0.1", port), Credentials(secret, "test", 1), timeout_s=LIMIT_S)
    client = ClientSession(first, lambda limit_s: first)
    client.send({"i": 1})
    client.receive(limit_s=LIMIT_S)
    thief = connect(("127.0.0.1", port), Credentials(secret, "test", 2), timeout_s=LIMIT_S)
    thief.send({"session": client._name, "received": 1})
    with pytest.raises(EOFError):
        thief.receive(limit_s=LIMIT_S)
    client.send({"i": 2})
    assert client.receive(limit_s=LIMIT_S)[0] == {"i": 2}
    wait_until("both were heard", lambda: echo.heard == [1, 2])
    thief.close()
    client.close()
    server.close()
