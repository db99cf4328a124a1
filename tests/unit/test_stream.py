"""Streams between two members in one process: changed, cut or repeated data is an error, never a wrong number."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from hora.engine.transport.base import Membership
from hora.engine.transport.stream import StreamGroup, Streams
from hora.errors import AuthenticationError, HorovodInternalError
from hora.net import noise
from hora.net.noise import Records
from hora.net.wire import Stream

KEY = bytes(range(32))
NUM_BYTES = 700_000  # three records


class Wire(threading.Thread):
    """Forwards bytes from one socket to another, and manipulates byte number `at`."""

    def __init__(self, source: socket.socket, target: socket.socket, at: int, how: str) -> None:
        super().__init__(daemon=True)
        self._source, self._target, self._at, self._how = source, target, at, how

    def run(self) -> None:
        passed = 0
        with self._source, self._target, contextlib.suppress(OSError):
            while data := bytearray(self._source.recv(65536)):
                where = self._at - passed
                if 0 <= where < len(data):
                    if self._how == "cut":
                        self._target.sendall(data[:where])
                        return
                    if self._how == "flip":
                        data[where] ^= 0x10
                    if self._how == "repeat":
                        data = data * 2
                self._target.sendall(data)
                passed += len(data)


def pair(encrypted: bool) -> tuple[Records | None, Records | None]:
    return (Records(KEY), Records(KEY)) if encrypted else (None, None)


@contextlib.contextmanager
def two_members(*, encrypted: bool, at: int = -1, how: str = "") -> Iterator[tuple[StreamGroup, StreamGroup]]:
    """Connect two members; the wire from member 0 to member 1 may manipulate data."""
    out, wire_in = socket.socketpair()
    wire_out, into = socket.socketpair()
    back_out, back_in = socket.socketpair()
    Wire(wire_in, wire_out, at, how).start()
    there, back = pair(encrypted), pair(encrypted)
    first = StreamGroup(
        Streams({1: Stream(out, there[0])}, {1: Stream(back_in, back[1])}), Membership(0, 2, lambda: None)
    )
    second = StreamGroup(
        Streams({0: Stream(back_out, back[0])}, {0: Stream(into, there[1])}), Membership(1, 2, lambda: None)
    )
    try:
        yield first, second
    finally:
        first.close()
        second.close()


def swapped(first: StreamGroup, second: StreamGroup) -> list[torch.Tensor]:
    """Exchange random data and return what each receives; raise the second member's error."""
    mine = [torch.randint(0, 256, (NUM_BYTES,), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    sent = [tensor.to(torch.uint8) for tensor in mine]
    got = [torch.zeros(NUM_BYTES, dtype=torch.uint8) for _ in sent]
    errors: dict[int, Exception] = {}

    def swap(group: StreamGroup, member: int) -> None:
        counts = [0, NUM_BYTES] if member == 0 else [NUM_BYTES, 0]
        try:
            group.finish(group.start_alltoall(got[member], sent[member], counts, counts))
        except HorovodInternalError as error:
            errors[member] = error

    other = threading.Thread(target=swap, args=(first, 0))
    other.start()
    swap(second, 1)
    if errors:
        second.close()
    other.join(60)
    if 1 in errors:
        raise errors[1]
    assert torch.equal(got[0], sent[1])
    assert torch.equal(got[1], sent[0])
    return got


@pytest.mark.parametrize("encrypted", [False, True])
def test_two_members_exchange_data(encrypted):
    with two_members(encrypted=encrypted) as groups:
        swapped(*groups)
        swapped(*groups)


@pytest.mark.parametrize("at", [0, 100_000, 262_144 + 3, 600_000])
@pytest.mark.parametrize("how", ["flip", "repeat"])
def test_modified_data_is_an_error(at, how, monkeypatch):
    monkeypatch.setattr("hora.engine.transport.group._GRACE_S", 0.0)
    with (
        two_members(encrypted=True, at=at, how=how) as groups,
        pytest.raises(HorovodInternalError, match="modified in transit"),
    ):
        swapped(*groups)


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_cut_wire_is_an_error(encrypted, monkeypatch):
    monkeypatch.setattr("hora.engine.transport.group._GRACE_S", 0.0)
    with (
        two_members(encrypted=encrypted, at=300_000, how="cut") as groups,
        pytest.raises(HorovodInternalError, match="a peer is lost"),
    ):
        swapped(*groups)


def test_no_two_records_use_the_same_key_and_number(monkeypatch):
    """Otherwise equal plaintexts would have equal ciphertexts."""
    monkeypatch.setattr(noise, "_RECORDS_OF_A_KEY", 3)
    sealer, sealed = Records(KEY), set()
    for _ in range(10):
        record = bytearray(100 + Records.tag_bytes)
        sealer.seal(memoryview(bytes(100)), memoryview(record))
        sealed.add(bytes(record))
    assert len(sealed) == 10


@pytest.mark.parametrize("in_place", [True, False])
def test_records_are_opened_in_their_order_and_only_once(monkeypatch, in_place):
    monkeypatch.setattr(noise, "_RECORDS_OF_A_KEY", 3)  # to reach a key change
    sealer, opener = Records(KEY), Records(KEY)
    for records in (sealer, opener):
        records._in_place &= in_place
    texts, sealed = [bytes([number]) * (number + 1) for number in range(10)], []
    for text in texts:
        record = bytearray(len(text) + Records.tag_bytes)
        sealer.seal(memoryview(text), memoryview(record))
        sealed.append(record)
    for text, record in zip(texts, sealed, strict=True):
        room = bytearray(len(text))
        opener.open(memoryview(record), memoryview(room))
        assert room == text
    for record in sealed:
        with pytest.raises(AuthenticationError):
            opener.open(memoryview(record), memoryview(bytearray(len(record) - Records.tag_bytes)))
