"""The transport over plain and encrypted streams: results, lost peers, no leftovers."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
import torch
import torch.distributed as dist
from groups import KINDS, make_group
from transport_checks import PORTION_BYTES, check_everything

from hora.engine.request import Reduce
from hora.engine.shm import counters
from hora.engine.transport import distributed, stream
from hora.engine.transport.distributed import DistributedTransport
from hora.errors import HorovodInternalError
from waiting import wait_until

LIMIT_S = 600.0  # longer than any test, so that no test passes because a wait timed out


@contextlib.contextmanager
def made(place, kind, check_alive=lambda: None, limit_s=LIMIT_S, store=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counters, "COLLECTIVE_LIMIT_S", limit_s)
        patch.setattr(distributed, "_PORTION_BYTES", PORTION_BYTES)
        patch.setattr(stream, "_DIRECT_BYTES", PORTION_BYTES // 4)
        group = make_group(kind, store or place.store, place.rank, place.size, check_alive)
        transport = DistributedTransport(group)
        try:
            yield transport
        finally:
            transport.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.both_ways
@pytest.mark.ranks(2, 3, 4)
def test_every_operation_is_correct_and_bit_identical_on_all_members(place, kind):
    with made(place, kind) as transport:
        assert transport.name == "tcp"
        results = check_everything(transport, place.rank, place.size)
    assert len(results) > 100
    assert place.gather(results) == [results] * place.size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ranks(3)
def test_creating_and_closing_leaves_nothing_behind(place, kind):
    for number in range(20):
        with made(place, kind, store=dist.PrefixStore(str(number), place.store)) as transport:
            tensor = torch.ones(3)
            transport.allreduce([tensor], [tensor], Reduce())
        if number == 1:
            used = in_use()
    wait_until("no more is in use than after the second one", lambda: in_use() <= used)


def in_use():
    return sum(len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))


def twice(act):
    act()
    act()


def reduce_for_ever(transport):
    tensor = torch.ones(400_000)
    while True:
        transport.allreduce([tensor], [tensor], Reduce(postscale=0.5))


def _die_in_the_middle(place, kind, victim):
    with made(place, kind) as transport:
        transport.barrier()
        if place.rank == victim:  # at a random moment of a reduction
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(HorovodInternalError, match=r"over tcp failed"):
            reduce_for_ever(transport)
        with pytest.raises(HorovodInternalError):  # the transport stays unusable and fails at once
            transport.barrier()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ranks(2, lost=(1,))
def test_a_killed_peer_is_an_error_on_the_other_member(place, kind):
    _die_in_the_middle(place, kind, victim=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ranks(4, lost=(0,))
def test_a_killed_peer_is_an_error_on_every_other_member(place, kind):
    _die_in_the_middle(place, kind, victim=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ranks(2, lost=(1,))
def test_a_child_of_the_killed_peer_does_not_keep_its_connections_open(place, kind):
    """Such a child may be a data loader's worker that outlives its parent and has inherited its descriptors."""
    with made(place, kind) as transport:
        transport.barrier()
        if place.rank == 1:
            child = os.fork()
            if child == 0:
                signal.pause()
            place.store.set("child", str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        child = int(place.store.get("child"))
        try:
            with pytest.raises(HorovodInternalError):
                reduce_for_ever(transport)
            os.kill(child, 0)  # it still exists
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ranks(2)
def test_the_liveness_check_ends_a_wait_and_the_peer_gets_an_error(place, kind):
    """Member 0 waits for member 1 until its check_alive raises; member 1 arrives later and finds it gone."""
    waiting = False

    def check_alive():
        if waiting:
            raise HorovodInternalError("rank 1 is dead")

    with made(place, kind, check_alive) as transport:
        if place.rank == 0:
            waiting = True
        else:
            place.store.get("given up")
        with pytest.raises(HorovodInternalError, match="rank 1 is dead" if place.rank == 0 else r"over tcp failed"):
            twice(transport.barrier)  # the first barrier may have received member 0's message
        if place.rank == 0:
            place.store.set("given up", "1")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ranks(2)
def test_connecting_to_a_missing_peer_ends_by_the_liveness_check_or_the_limit(place, kind):
    def check_alive():
        raise HorovodInternalError("rank 1 is dead")

    if place.rank == 1:
        return
    with pytest.raises(HorovodInternalError, match=r"^rank 1 is dead$"), made(place, kind, check_alive):
        pass
    again = dist.PrefixStore("again", place.store)
    with pytest.raises(HorovodInternalError, match=r"waited 0\.3 s for 2 members to connect over "):
        with made(place, kind, limit_s=0.3, store=again):
            pass
