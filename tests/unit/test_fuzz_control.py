"""Hostile input on the control plane causes only documented errors, takes bounded memory, and stops no server.

`make test` tries ten thousand cases in all, `make fuzz` a million.
"""

from __future__ import annotations

import json
import random
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hora.errors import AuthenticationError
from hora.net.rendezvous import Rendezvous
from hora.net.wire import (
    MAX_FRAME_BYTES,
    ClientHandshake,
    Connection,
    Credentials,
    Opener,
    Sealer,
    ServerHandshake,
    connect,
    new_secret,
)

LIMIT_S = 20.0
KEY = bytes(32)
SECRET = new_secret()


class Events:
    """Ignores all events."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


@contextmanager
def a_rendezvous() -> Iterator[Rendezvous]:
    server = Rendezvous("127.0.0.1", secret=SECRET, job="job", events=Events())
    try:
        yield server
    finally:
        server.close()


def a_member(server: Rendezvous) -> Connection:
    return connect(("127.0.0.1", server.port), Credentials(SECRET, "job"), timeout_s=LIMIT_S)


def still_answers(server: Rendezvous) -> bool:
    with a_member(server) as connection:
        connection.send({"op": "check", "id": 1, "keys": []})
        return connection.receive(limit_s=LIMIT_S) == ({"re": 1}, b"1")


def body(text: str, payload: bytes = b"") -> bytes:
    encoded = text.encode()
    return struct.pack(">H", len(encoded)) + encoded + payload


HOSTILE = {
    "a frame of three bytes": b"abc",
    "an empty frame": b"",
    "deep JSON": body('{"_n":0,"op":"get","x":' + "[" * 20000 + "]" * 20000 + "}"),
    "a limit of Infinity": body('{"_n":0,"op":"get","id":1,"key":"k","timeout_s":Infinity}'),
    "a limit of 1e999": body('{"_n":0,"op":"get","id":1,"key":"k","timeout_s":1e999}'),
    "a limit of NaN": body('{"_n":0,"op":"get","id":1,"key":"k","timeout_s":NaN}'),
    "a limit of 35 days": body('{"_n":0,"op":"get","id":1,"key":"k","timeout_s":3000000}'),
    "rank 1e999": body('{"_n":0,"op":"gather","id":1,"key":"k","rank":1e999,"size":2,"timeout_s":1}'),
    "a gather of 2e7 ranks": body('{"_n":0,"op":"gather","id":1,"key":"k","rank":0,"size":20000000,"timeout_s":0.01}'),
    "a name of 20000 snowmen": body(
        json.dumps({"_n": 0, "op": "hello", "id": 1, "name": "☃" * 20000, "worker": -1}, ensure_ascii=False)
    ),
    "a key of 30000 characters": body(json.dumps({"_n": 0, "op": "get", "id": 1, "key": "k" * 30000, "timeout_s": 0})),
    "an unknown operation": body('{"_n":0,"op":"nope"}'),
    "an operation that is a list": body('{"_n":0,"op":[]}'),
    "no id": body('{"_n":0,"op":"set","key":"k"}'),
    "a list for a header": body("[1]"),
    "a negative length": body('{"_n":-5,"op":"pong"}'),
    "a length of true": body('{"_n":true,"op":"pong"}', b"x"),
    "a number of 5000 digits": body('{"_n":0,"op":"add","id":1,"key":"k","amount":"' + "9" * 5000 + '"}'),
    "no keys": body('{"_n":0,"op":"check","id":1,"keys":null}'),
    "id 1e999": body('{"_n":0,"op":"get","id":1e999,"key":"k","timeout_s":1}'),
    "a payload of an exabyte": body('{"_n":1000000000000000000,"op":"pong"}'),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_member_that_sends_nonsense_harms_only_itself(what: str, monkeypatch: pytest.MonkeyPatch):
    died: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    with a_rendezvous() as server:
        with a_member(server) as hostile:
            hostile.sock.sendall(hostile.sealer.frame(HOSTILE[what]))
            assert still_answers(server)
        assert still_answers(server)
    assert not died


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Return the bytes with some of them changed, removed, repeated or moved."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        piece = rng.choice((rng.randbytes(rng.randint(0, 6)), bytes(changed[at : at + 8]), b"\xff" * 4, b"\0" * 4))
        changed[at : at + rng.choice((0, len(piece), 9))] = piece
    return bytes(changed)


def value(rng: random.Random, depth: int = 0) -> object:
    """Return any JSON value, or NaN or an infinity."""
    kind = rng.randrange(9 if depth < 3 else 7)
    if kind >= 7:
        inner = [value(rng, depth + 1) for _ in range(rng.randrange(4))]
        return inner if kind == 7 else {f"k{index}": one for index, one in enumerate(inner)}
    odd = (float("nan"), float("inf"), -float("inf"), 1e308, -0.0)
    whole = (-1, 0, 1, 2, 2**31, -(2**63), 10**30)
    return (None, rng.random() < 0.5, rng.choice(whole), rng.choice(odd), rng.random(), "a", "☃" * rng.randrange(40))[
        kind
    ]


def test_unauthenticated_clients_never_pass_the_handshake(cases):
    hello = ClientHandshake(Credentials(SECRET, "job")).hello
    for case, rng in cases:
        handshake = ServerHandshake(Credentials(SECRET, "job"))
        data = damaged(rng, hello + rng.randbytes(40))
        try:
            while data and handshake.session is None:
                wanted = handshake.wanted_bytes
                assert 0 < wanted <= 60, case
                handshake.feed(data[:wanted])
                data = data[wanted:]
        except AuthenticationError:
            continue
        assert handshake.session is None, case


def test_an_answer_without_the_secret_is_rejected(cases):
    for _, rng in cases:
        handshake = ClientHandshake(Credentials(SECRET, "job"))
        with pytest.raises(AuthenticationError):
            handshake.finish(rng.randbytes(handshake.answer_bytes))


def test_damaged_frames_never_become_a_message(cases):
    messages = [({"op": "set", "key": "k", "id": 7}, b"payload"), ({"op": "pong"}, b"")]
    for case, rng in cases:
        sealer, opener = Sealer(KEY), Opener(KEY)
        stream, step = damaged(rng, b"".join(f for m in messages for f in sealer.frames(*m))), rng.randint(1, 99)
        got = []
        try:
            for start in range(0, len(stream), step):
                got += opener.feed(stream[start : start + step])
                assert len(opener._buffer) <= MAX_FRAME_BYTES + 64, case
        except AuthenticationError:
            pass
        assert got == messages[: len(got)], case


def test_genuine_frames_with_hostile_contents(cases):
    """A member holds the keys: its frames are genuine, but their contents may be anything."""
    text = '{"_n":3,"op":"set","key":"k","id":7}'
    for case, rng in cases:
        sealer, opener = Sealer(KEY), Opener(KEY, max_payload_bytes=1 << 20)
        odd = json.dumps({"_n": rng.choice((0, 3, 5)), "op": value(rng), "x": value(rng)})
        bodies = (damaged(rng, body(text, b"abc")), body(odd, rng.randbytes(3)), rng.randbytes(rng.randrange(20)))
        try:
            for one in rng.sample(bodies, 3):
                for header, payload in opener.feed(sealer.frame(one)):
                    assert isinstance(header, dict), case
                    assert len(payload) <= 1 << 20, case
        except AuthenticationError:
            continue


OPERATIONS = [
    "hello",
    "bye",
    "pong",
    "set",
    "get",
    "add",
    "delete",
    "check",
    "gather",
    "keys",
    "telemetry",
    "returned",
    "raised",
    "log_line",
    "next_world",
]
FIELDS = [
    "id",
    "key",
    "keys",
    "amount",
    "rank",
    "size",
    "timeout_s",
    "name",
    "worker",
    "generation",
    "epoch",
    "kind",
    "type",
    "message",
    "traceback",
    "consequence",
]


def operation(rng: random.Random) -> dict[str, object]:
    """Return an operation with a few wrong or missing fields."""
    right = {"id": rng.randrange(100), "key": rng.choice("ab"), "keys": ["a"], "amount": 1, "timeout_s": 0.0}
    right |= {"rank": rng.randrange(3), "size": 3, "name": "n", "worker": rng.randrange(-1, 3), "generation": -1}
    right |= {"epoch": "0", "kind": "k"}
    right |= {"type": "E", "message": "m", "traceback": "t", "consequence": False, "op": rng.choice(OPERATIONS)}
    for _ in range(rng.randrange(3)):
        field = rng.choice(FIELDS)
        if rng.random() < 0.3:
            right.pop(field, None)
        else:
            right[field] = value(rng)
    return right


def test_operations_of_hostile_members(cases):
    """Members are disconnected again and again, reconnect, and find the same server."""
    with a_rendezvous() as server:
        member = a_member(server)
        for case, rng in cases:
            try:
                member.send(operation(rng), rng.randbytes(rng.randrange(9)))
                member.send({"op": "check", "id": 10**9, "keys": []})
                while member.receive(limit_s=LIMIT_S)[0].get("re") != 10**9:
                    pass
            except (EOFError, ConnectionError):
                member.close()
                member = a_member(server)
            assert server._server._thread.is_alive(), case
        member.close()
        assert still_answers(server)


def test_a_timed_out_gather_of_many_ranks_gets_a_short_answer():
    with a_rendezvous() as server, a_member(server) as member:
        request = {"op": "gather", "id": 1, "key": "k", "rank": 0, "size": 20_000_000, "timeout_s": 0.01}
        member.send(request)
        header, _ = member.receive(limit_s=LIMIT_S)
        assert header["error"] == "timeout"
        assert "and 19999983 others" in header["message"]
        assert still_answers(server)


sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
import parsers  # noqa: E402


@pytest.mark.parametrize("name", parsers.TARGETS)
def test_every_fuzzed_parser_takes_its_own_seeds(name: str):
    """Without atheris: the targets follow what they fuzz."""
    fuzz, seeds = parsers.TARGETS[name]()
    rng = random.Random(name)
    for seed in seeds:
        fuzz(seed)
        for _ in range(3):
            fuzz(damaged(rng, seed))
