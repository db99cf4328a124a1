"""docs/protocol.md: its test vectors, and an independent client that talks to the real server."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from pathlib import Path

import another_end
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from hora.engine.control_tree import ControlEvents, ControlTree
from hora.errors import AuthenticationError
from hora.net import noise, wire
from hora.net.keys import RankKeys
from hora.net.noise import Records
from hora.net.rendezvous import Rendezvous, RendezvousEvents
from hora.net.wire import ClientHandshake, Credentials, Opener, ServerHandshake, new_secret, worker_key

LIMIT_S = 60.0
_EVENTS = ("lost", "leaving", "fault", "negotiating", "whereabouts", "standstill", "tick")
DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
VECTORS = {
    name: bytes.fromhex(text)
    for name, text in json.loads(DOCUMENT.read_text().partition("```json")[2].partition("```")[0]).items()
}
SECRET = bytes(range(32))


def test_the_independent_client_reproduces_the_documents_vectors():
    assert {name: bytes.fromhex(text) for name, text in another_end.vectors().items()} == VECTORS


def test_our_implementation_reproduces_the_documents_vectors(monkeypatch: pytest.MonkeyPatch):
    private = iter(X25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in (0x11, 0x22))
    monkeypatch.setattr(noise.X25519PrivateKey, "generate", lambda: next(private), raising=True)
    credentials = Credentials(worker_key(SECRET, 3), "job-1", 3)
    assert credentials.secret == VECTORS["psk"]
    client, server = ClientHandshake(credentials), ServerHandshake(credentials)
    assert client.hello == VECTORS["hello"]
    assert server.feed(client.hello) == VECTORS["answer"]
    session, confirmation = client.finish(VECTORS["answer"])
    assert confirmation == VECTORS["confirmation"]
    assert (session.sealer._key, session.opener._key) == (
        VECTORS["client_to_server_key"],
        VECTORS["server_to_client_key"],
    )
    short, long = (b"".join(session.sealer.frames(*message)) for message in another_end.MESSAGES)
    assert short == VECTORS["short_message"]
    assert hashlib.sha256(long).digest() == VECTORS["sha256_of_long_message"]
    session.sealer._cipher._number = 65536
    assert session.sealer.frame(b"after 65,536 messages") == VECTORS["frame_65536"]
    records = session.sealer.records()
    for number, data in ((0, b"first"), (1, b"second"), (65536, b"third")):
        records._number = number
        out = bytearray(len(data) + Records.tag_bytes)
        records.seal(memoryview(data), memoryview(out))
        assert out == VECTORS[f"record_{number}"]


@pytest.fixture
def rendezvous():
    server = Rendezvous("127.0.0.1", secret=SECRET, job="job-1", events=RendezvousEvents())
    yield server
    server.close()


def worker(server: Rendezvous, number: int, stack: contextlib.ExitStack) -> another_end.Client:
    sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S))
    return another_end.Client(another_end.derived(SECRET, f"worker {number}"), "job-1", number).connect(sock)


def test_the_independent_client_at_the_rendezvous(rendezvous: Rendezvous):
    large = os.urandom(200_000)
    with contextlib.ExitStack() as stack:
        workers = [worker(rendezvous, number, stack) for number in range(2)]
        for number, one in enumerate(workers):
            one.send({"op": "hello", "id": 1, "name": f"worker {number}", "worker": -1})
            assert one.receive() == ({"re": 1}, b"")
            one.send(
                {"op": "gather", "id": 2, "key": "g", "rank": number, "size": 2, "timeout_s": LIMIT_S}, b"%d" % number
            )
        for one in workers:
            members = b"".join(number.to_bytes(4, "big") + (1).to_bytes(4, "big") for number in (0, 1))
            header = {"re": 2, "members": 2, "values": 2, "index": 0, "groups": 1}
            assert one.receive() == (header, members + b"01")
        workers[0].send({"op": "set", "id": 3, "key": "k"}, large)
        assert workers[0].receive() == ({"re": 3}, b"")
        workers[1].send({"op": "get", "id": 4, "key": "k", "timeout_s": LIMIT_S})
        assert workers[1].receive() == ({"re": 4}, large)


def test_keys_change_during_a_conversation(rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch):
    """Both ends rekey after three messages per direction, instead of the documented 65,536."""
    monkeypatch.setattr(noise, "_MESSAGES_OF_A_KEY", 3)

    def next_key(self: another_end.Direction):
        if self.number and self.number % 3 == 0:
            self.key = another_end.AESGCM(self.key).encrypt(another_end.nonce(2**64 - 1), bytes(32), b"")[:32]
        self.number += 1
        return another_end.AESGCM(self.key), another_end.nonce(self.number - 1)

    monkeypatch.setattr(another_end.Direction, "next", next_key)
    with contextlib.ExitStack() as stack:
        one = worker(rendezvous, 0, stack)
        for number in range(10):
            one.send({"op": "add", "id": number, "key": "k", "amount": 1})
            assert one.receive() == ({"re": number}, b"%d" % (number + 1))


@pytest.mark.parametrize("how", ["secret", "purpose", "number"])
def test_an_independent_client_with_other_credentials_is_rejected(rendezvous: Rendezvous, how: str):
    secret = another_end.derived(new_secret() if how == "secret" else SECRET, "worker 1")
    client = another_end.Client(secret, "job-2" if how == "purpose" else "job-1", 2 if how == "number" else 1)
    with socket.create_connection(("127.0.0.1", rendezvous.port), timeout=LIMIT_S) as sock:
        sock.sendall(client.hello)
        assert another_end.received(sock, 8) == b"refused\n"


def test_the_independent_client_sends_a_stream_to_a_rank(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(noise, "_RECORDS_OF_A_KEY", 3)
    derived, world = another_end.derived, new_secret()
    control_tree = ControlTree(0, 2, ControlEvents(**{name: lambda *_: None for name in _EVENTS}))
    try:
        control_tree.start(RankKeys.derived(world, 0))
        with socket.create_connection(("127.0.0.1", control_tree.listen_tcp("127.0.0.1")), timeout=LIMIT_S) as sock:
            key = derived(derived(world, "to rank 0"), "from rank 1")
            client = another_end.Client(key, "control", 1).connect(sock)
            client.send({"want": "stream", "key": "some"})
            assert client.receive() == ({"t": "stream"}, b"")
            stream = control_tree.handoff.accept_stream("some", 1, limit_s=LIMIT_S)
            theirs = another_end.Records(client.out.first_key, records_of_a_key=3)
            with stream.sock:
                for number in range(8):
                    data = os.urandom(1000 + number)
                    sock.sendall(theirs.record(data))
                    got = bytearray(len(data))
                    sealed = another_end.received(stream.sock, len(data) + 16)
                    stream.records.open(memoryview(sealed), memoryview(got))
                    assert got == data
    finally:
        control_tree.close()


def test_each_end_detects_that_the_other_lacks_the_key():
    hello = another_end.Client(SECRET, "job-1").hello
    with pytest.raises(AuthenticationError):
        ServerHandshake(Credentials(new_secret(), "job-1")).feed(hello)
    server = ServerHandshake(Credentials(SECRET, "job-1"))
    answer = server.feed(hello)
    with pytest.raises(InvalidTag):
        another_end.Client(SECRET, "job-1").finish(answer)  # the answer to another hello


def test_the_documents_limits_match_the_code():
    text = DOCUMENT.read_text()
    assert wire.MAX_FRAME_BYTES + 16 == 65535
    assert f"{wire.MAX_HEADER_BYTES:,} bytes at most" in text
    assert f"at most {Records.most_bytes:,} bytes" in text
    assert f"{noise._MESSAGES_OF_A_KEY:,} frames" in text
    assert f"{noise._RECORDS_OF_A_KEY:,} records" in text
    with pytest.raises(AuthenticationError):
        list(Opener(SECRET).feed(b"\x00\x0f"))
