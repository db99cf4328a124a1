"""Ranks that leave, or die, end the groups that they are members of, and no others."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hvd_session import needs_torch_2_7
from test_process_group_faults import start

import horovod.torch as hvd
from hora.errors import HorovodInternalError

pytestmark = needs_torch_2_7


def total(group):
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    return tensor.tolist()


def uses_everything(group, members):
    """Use collectives, repeated ones, messages and objects of a group."""
    size, rank = len(members), dist.get_rank()
    for _ in range(3):
        assert total(group) == [size] * 3
    assert total(group) == [size] * 3
    objects = [None] * size
    dist.all_gather_object(objects, rank, group=group)
    assert objects == members
    at = members.index(rank)
    arrived = torch.zeros(70_000)  # longer than what fits in a ring
    work = dist.irecv(arrived, members[at - 1], group=group)
    dist.isend(torch.full((70_000,), float(rank)), members[(at + 1) % size], group=group).wait()
    work.wait()
    assert arrived.eq(members[at - 1]).all()
    dist.barrier(group=group)


def meanwhile(place, name, members):
    """Wait for these ranks, in the test's own store."""
    place.store.set(f"{name}/{place.rank}", "here")
    place.store.wait([f"{name}/{rank}" for rank in members])


@pytest.mark.ranks(2)
def test_a_group_of_one_after_the_other_rank_has_left(place):
    start(place)
    dist.barrier()
    if place.rank == 1:
        dist.destroy_process_group()
    meanwhile(place, "rank 1 has left", [0, 1])
    if place.rank == 0:
        assert total(dist.new_group([0])) == [1.0] * 3
        with pytest.raises(HorovodInternalError, match="rank 1"):
            total(None)
        with pytest.raises(HorovodInternalError, match="rank 1"):
            dist.new_group([0, 1])
        dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_a_wait_that_has_expired_may_be_repeated(place):
    start(place)
    tensor = torch.ones(3)
    if place.rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        for _ in range(2):
            with pytest.raises(HorovodInternalError, match=r"rank\(s\) \[1\]: .*You may wait for it again"):
                work.wait(timedelta(seconds=0.2))
    meanwhile(place, "rank 0 has waited", [0, 1])
    if place.rank == 0:
        assert work.wait(timedelta(seconds=60))
        assert work.is_success()
    else:
        dist.all_reduce(tensor)
    assert tensor.tolist() == total(None) == [2.0] * 3
    dist.destroy_process_group()


def _outlive(place, *, dies):
    start(place)
    three, two = dist.new_group([0, 1, 2]), dist.new_group([0, 1])
    if place.rank < 3:
        assert total(three) == [3.0] * 3
    dist.barrier()
    if place.rank == 3:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.destroy_process_group()
        return
    with pytest.raises(HorovodInternalError, match="rank 3"):
        total(None)
    uses_everything(three, [0, 1, 2])
    later = dist.new_group([2, 0])
    if place.rank != 1:
        uses_everything(later, [0, 2])
    dist.barrier(group=three)
    if place.rank == 2:
        dist.destroy_process_group()
        return
    with pytest.raises(HorovodInternalError, match="rank 2"):  # nobody spreads the news of the second one
        dist.recv(torch.ones(3), 2, group=three)
    with pytest.raises(HorovodInternalError, match="rank 2"):
        total(three)
    uses_everything(two, [0, 1])
    dist.destroy_process_group()


@pytest.mark.ranks(4, lost=(3,))
@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
@pytest.mark.parametrize("how", ["leaves", "dies"])
def test_groups_without_a_rank_outlive_it(place, how, transport):
    if transport == "sockets":
        os.environ["HORA_TRANSPORT"] = "tcp"
    _outlive(place, dies=how == "dies")


@pytest.mark.ranks(2)
def test_hvd_outlives_the_group_that_started_the_engine(place):
    start(place)
    hvd.init()
    for _ in range(2):
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
    dist.destroy_process_group()
    assert hvd.is_initialized()
    for _ in range(2):
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
    start(place, prefix="second")
    assert total(None) == [2.0] * 3
    dist.destroy_process_group()
    hvd.shutdown()
    assert not hvd.is_initialized()
    start(place, prefix="third")  # now hvd is out, and the group ends what it starts
    assert total(None) == [2.0] * 3
    dist.destroy_process_group()
    assert not hvd.is_initialized()
