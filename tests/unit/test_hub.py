"""The hub without ranks: two of them in one process."""

from __future__ import annotations

import contextlib

import pytest

from hora.engine.hub import Hub, HubEvents
from hora.errors import HorovodInternalError
from hora.net.connection import Connection, connect
from hora.net.wire import Credentials, new_secret
from waiting import wait_until

LIMIT_S = 60.0
SECRET = new_secret()


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
            hub = Hub(rank, 3, HubEvents(**told))
            hub.start(SECRET)
            stack.callback(hub.close)
            some.append(hub)
        yield some


def test_a_rank_fetches_what_another_one_offers(hubs):
    offered = hubs[0].offer("some", 100, 1)
    offered.memory[0] = 7
    assert hubs[1].fetch(hubs[0].name, "some", limit_s=LIMIT_S, guard=lambda: None).memory[0] == 7


def test_a_rank_does_not_wait_for_an_offer_when_the_world_has_ended(hubs):
    num_looks = 0

    def guard():
        nonlocal num_looks
        num_looks += 1
        if num_looks == 2:
            raise HorovodInternalError("rank 2 was lost")

    with pytest.raises(HorovodInternalError, match="rank 2 was lost"):
        hubs[1].fetch(hubs[0].name, "never", limit_s=LIMIT_S, guard=guard)
    with pytest.raises(TimeoutError, match=r"waited 0\.1 s for shared memory 'never'"):
        hubs[1].fetch(hubs[0].name, "never", limit_s=0.1, guard=lambda: None)


def a_member(hub: Hub, rank: int) -> Connection:
    connection = connect(hub.name, Credentials(SECRET, "hub"), timeout_s=LIMIT_S)
    connection.send({"want": "hub", "rank": rank})
    return connection


def test_a_member_speaks_for_its_own_rank_and_for_no_other(hubs, heard):
    with a_member(hubs[0], 2) as other:
        hubs[1].join(hubs[0].name, limit_s=LIMIT_S)
        hubs[0].wait_for_all(limit_s=LIMIT_S)
        for taken in (1, 2, 0, 3, -1):
            with a_member(hubs[0], taken) as second, pytest.raises(EOFError):
                second.receive(limit_s=LIMIT_S)
        other.send({"t": "lost", "rank": 1})
        other.send({"t": "leaving", "rank": 1, "why": "says rank 2"})
        other.send({"t": "round", "set": 0, "parts": [[1, 1]]}, b"x")
        other.send({"t": "leaving", "rank": 2, "why": "the end"})
        wait_until("rank 2 has left", lambda: heard)
    assert heard == [("leaving", 2, "the end")]
