"""The hub without ranks: two of them in one process."""

from __future__ import annotations

import contextlib

import pytest

from hora.engine.hub import Hub, HubEvents
from hora.errors import HorovodInternalError
from hora.net.wire import new_secret

LIMIT_S = 60.0


@pytest.fixture
def hubs():
    secret, some = new_secret(), []
    with contextlib.ExitStack() as stack:
        for rank in range(2):
            nothing = {name: lambda *_: None for name in ("lost", "leaving", "fault", "announced", "tick")}
            hub = Hub(rank, 2, HubEvents(**nothing))
            hub.start(secret)
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
