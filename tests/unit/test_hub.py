"""The hub without ranks: two of them in one process."""

from __future__ import annotations

import contextlib
import socket

import pytest

from hora.engine.hub import Hub, HubEvents, _cut, _joined
from hora.errors import AuthenticationError, HorovodInternalError
from hora.net.connection import Connection, connect
from hora.net.keys import RankKeys, rank_keys
from hora.net.wire import Credentials, new_secret
from waiting import wait_until

LIMIT_S = 60.0
WORLD = new_secret()


def given(rank: int, world: bytes = WORLD) -> RankKeys:
    """What a launcher gives to a rank, which holds no more."""
    return RankKeys(rank, lambda ranks: rank_keys(world, rank, ranks))


@pytest.fixture
def heard():
    """What rank 0's hub has told its runtime."""
    return []


@pytest.fixture
def hubs(heard):
    some = []
    with contextlib.ExitStack() as stack:
        for rank in range(2):
            told = {name: lambda *_: None for name in ("lost", "leaving", "fault", "announced", "tick")}
            if rank == 0:
                told |= {"lost": lambda *what: heard.append(("lost", *what))}
                told |= {"leaving": lambda *what: heard.append(("leaving", *what))}
                told |= {"announced": lambda *what: heard.append(("announced", *what))}
            hub = Hub(rank, 3, HubEvents(**told))
            hub.start(given(rank))
            stack.callback(hub.close)
            some.append(hub)
        yield some


def test_a_rank_fetches_what_another_one_offers(hubs):
    offered = hubs[0].offer("some", 100, 1)
    offered.memory[0] = 7
    assert hubs[1].fetch(0, hubs[0].name, "some", limit_s=LIMIT_S, guard=lambda: None).memory[0] == 7


def test_a_rank_does_not_wait_for_an_offer_when_the_world_has_ended(hubs):
    num_looks = 0

    def guard():
        nonlocal num_looks
        num_looks += 1
        if num_looks == 2:
            raise HorovodInternalError("rank 2 was lost")

    with pytest.raises(HorovodInternalError, match="rank 2 was lost"):
        hubs[1].fetch(0, hubs[0].name, "never", limit_s=LIMIT_S, guard=guard)
    with pytest.raises(TimeoutError, match=r"waited 0\.1 s for shared memory 'never'"):
        hubs[1].fetch(0, hubs[0].name, "never", limit_s=0.1, guard=lambda: None)


def a_member(hub: Hub, rank: int) -> Connection:
    connection = connect(hub.name, given(rank).towards(hub.rank), timeout_s=LIMIT_S)
    connection.send({"want": "hub"})
    return connection


def test_a_member_speaks_for_its_own_rank_and_for_no_other(hubs, heard):
    with a_member(hubs[0], 2) as other:
        hubs[1].join(hubs[0].name, limit_s=LIMIT_S)
        hubs[0].wait_for_all(limit_s=LIMIT_S)
        for taken in (1, 2, 3, -1):
            with a_member(hubs[0], taken) as second, pytest.raises(EOFError):
                second.receive(limit_s=LIMIT_S)
        other.send({"t": "lost", "rank": 1})
        other.send({"t": "leaving", "rank": 1, "why": "says rank 2"})
        other.send({"t": "round", "set": 0, "parts": [[1, 1]]}, b"x")
        other.send({"t": "leaving", "rank": 2, "why": "the end"})
        wait_until("rank 2 has left", lambda: heard)
    assert heard == [("leaving", 2, "the end")]


def test_what_a_rank_announces_is_its_own_whatever_it_says(hubs, heard):
    with a_member(hubs[0], 2) as other:
        hubs[1].join(hubs[0].name, limit_s=LIMIT_S)
        hubs[0].wait_for_all(limit_s=LIMIT_S)
        other.send({"t": "announce", "set": 5, "member": 1, "rank": 1}, b"mine")
        wait_until("the round has come", lambda: heard)
    assert heard[0] == ("announced", 5, [(2, b"mine")])


def test_with_its_own_keys_a_rank_opens_nothing_in_the_name_of_another(hubs):
    """Rank 2's host has been taken over: it holds all that rank 2 was given."""
    place = "127.0.0.1", hubs[0].listen_tcp("127.0.0.1")
    mine = given(2)
    held = [mine.towards(0).secret, mine.towards(1).secret, mine.of(1).secret, mine.shared]
    for secret in held:
        for rank in (0, 1):
            for where in (place, hubs[0].name):
                with pytest.raises(AuthenticationError):
                    connect(where, Credentials(secret, "hub", rank), timeout_s=LIMIT_S)
    with connect(place, mine.towards(0), timeout_s=LIMIT_S) as stream:  # and as itself it is let in, as itself
        stream.send({"want": "stream", "key": "k", "rank": 1})
        stream.receive(limit_s=LIMIT_S)
        with pytest.raises(TimeoutError):
            hubs[0].take_stream("k", 1, limit_s=0.1)
        hubs[0].take_stream("k", 2, limit_s=LIMIT_S).sock.close()


def test_the_keys_of_an_earlier_generation_open_nothing(hubs):
    old = given(1, new_secret())
    with pytest.raises(AuthenticationError):
        connect(hubs[0].name, old.towards(0), timeout_s=LIMIT_S)


def test_keys_are_asked_for_once_and_together():
    asked = []

    def get(ranks):
        asked.append(list(ranks))
        return rank_keys(WORLD, 1, ranks)

    keys = RankKeys(1, get, at_once=[0])
    keys.fetch([0, 1, 2, 3])
    assert [keys.towards(rank) for rank in (0, 2, 3)] == [given(rank).of(1) for rank in (0, 2, 3)]
    assert asked == [[0], [2, 3]]
    assert keys.shared == given(3).shared


def test_a_stopped_rank_delays_nobodys_rounds(hubs, heard):
    """It reads nothing, far more is sent to it than its socket holds, and a set of which it is no member goes on."""
    with a_member(hubs[0], 2) as stopped:
        stopped.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        hubs[1].join(hubs[0].name, limit_s=LIMIT_S)
        hubs[0].wait_for_all(limit_s=LIMIT_S)
        piece, num_rounds = bytes(100_000), 50
        for number in range(num_rounds):
            hubs[1].announce(7, piece)
            wait_until("the round has come", lambda number=number: len(heard) > number)
        assert not hubs[0]._links[2].drained
        assert heard == [("announced", 7, [(1, piece)])] * num_rounds
        for _ in range(num_rounds):  # and when it goes on it has missed nothing
            header, payload = stopped.receive(limit_s=LIMIT_S)
            assert (header["t"], header["set"], payload[-len(piece) :]) == ("round", 7, piece)


def test_ten_thousand_ranks_fit_into_a_round():
    parts = [(rank, b"%d" % rank) for rank in range(10_000)]
    assert _cut(_joined(parts) + b"more", len(parts)) == parts
