"""`init_process_group(enable_reconfigure=True)`: members change while the group, its name and DDP's reference stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hora.torch.distributed  # noqa: F401 - registers the backend

pytestmark = [
    pytest.mark.ranks(3),
    pytest.mark.skipif(
        tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 14), reason="torch has this from 2.14 on"
    ),
]


@contextmanager
def unconnected(place) -> Iterator[list[str]]:
    """Create the default group without members, and yield the handles of all ranks."""
    dist.init_process_group(
        "hora",
        store=dist.HashStore(),  # each rank's own: nothing may be exchanged through it
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=60),
        enable_reconfigure=True,
    )
    try:
        yield place.gather(dist.distributed_c10d._get_reconfigure_handle())
    finally:
        place.gather("all have finished")
        dist.destroy_process_group()


def reconfigure(uuid: int, handles: Sequence[str] | set[str], limit_s: float | None = None) -> None:
    timeout = None if limit_s is None else timedelta(seconds=limit_s)
    dist.distributed_c10d._reconfigure(uuid, handles, timeout=timeout).wait()


def assert_works(members: Sequence[int], rank: int) -> None:
    """Check an all_reduce and a ring of messages among these ranks of the pool, in this order."""
    size, me = len(members), members.index(rank)
    assert (dist.get_rank(), dist.get_world_size()) == (me, size)
    values = torch.full((3,), float(rank + 1))
    dist.all_reduce(values)
    assert values.tolist() == [float(sum(member + 1 for member in members))] * 3
    if size > 1:
        backend = dist.get_backend_impl(device=torch.device("cpu"))
        came = torch.zeros(1)
        works = [
            backend.send([torch.full((1,), float(me))], (me + 1) % size, 0),
            backend.recv([came], (me - 1) % size, 0),
        ]
        for work in works:
            work.wait()
        assert came.item() == (me - 1) % size


def test_members_come_and_go(place):
    with unconnected(place) as handles:
        group, name = dist.group.WORLD, dist.group.WORLD.group_name
        assert dist.distributed_c10d._supports_reconfigure()
        with pytest.raises(RuntimeError, match="call reconfigure first"):
            dist.all_reduce(torch.ones(1))
        reconfigure(0, handles)
        assert_works([0, 1, 2], place.rank)
        reconfigure(1, handles)  # the same members again
        assert_works([0, 1, 2], place.rank)
        if place.rank != 1:  # which still lives
            reconfigure(2, [handles[0], handles[2]])
            assert_works([0, 2], place.rank)
        place.gather("without 1")
        reconfigure(3, [handles[place.rank]])  # disjoint groups of one
        assert_works([place.rank], place.rank)
        reconfigure(4, handles[::-1])  # ranks by position
        assert_works([2, 1, 0], place.rank)
        reconfigure(5, set(handles))  # by age
        assert dist.get_world_size() == 3
        with pytest.raises(RuntimeError, match="already used"):
            reconfigure(5, handles)
        assert dist.group.WORLD is group
        assert group.group_name == name


def test_two_halves_merge_and_a_model_trains_on(place):
    with unconnected(place) as handles:
        reconfigure(0, handles[:2] if place.rank < 2 else handles[2:])
        assert_works([0, 1] if place.rank < 2 else [2], place.rank)
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        for uuid, members in ((0, None), (1, [0, 1, 2])):
            if members is not None:
                reconfigure(uuid, handles)
            model.zero_grad()
            model(torch.full((1, 2), float(place.rank))).sum().backward()
            present = members or ([0, 1] if place.rank < 2 else [2])
            (weight,) = model.parameters()
            assert weight.grad.tolist() == [[sum(present) / len(present)] * 2]


def test_an_aborted_group_is_revived(place):
    called = []
    with unconnected(place) as handles:
        reconfigure(0, handles)
        group = dist.group.WORLD
        group.register_abort_hook(1, lambda: called.append("hook"))
        assert group.get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS
        place.gather("all are in it")
        group.abort()
        assert called == ["hook"]
        with pytest.raises(RuntimeError, match="shut down"):
            dist.all_reduce(torch.ones(1))
        group.unregister_abort_hook(1)
        reconfigure(1, handles)
        assert_works([0, 1, 2], place.rank)


def test_an_attempt_that_fails_names_the_missing_and_may_be_repeated(place):
    with unconnected(place) as handles:
        if place.rank != 2:
            with pytest.raises(RuntimeError, match=r"reconfiguration 0 of 3 member\(s\) failed"):
                reconfigure(0, handles, 2)
        place.gather("rank 2 did not come")
        reconfigure(1, handles)
        assert_works([0, 1, 2], place.rank)


def test_what_cannot_be_reconfigured_says_so(place):
    with unconnected(place) as handles, pytest.raises(ValueError, match="must be one of the 1 handles"):
        reconfigure(0, [handles[place.rank - 1]])
    dist.init_process_group("hora", store=place.store, rank=place.rank, world_size=place.size)
    with pytest.raises(RuntimeError, match="has fixed members"):
        dist.distributed_c10d._get_reconfigure_handle()
    dist.destroy_process_group()
