"""Faults of a process group: a rank dies, aborts, mismatches or passes invalid arguments; errors name the rank."""

from __future__ import annotations

import os
import signal
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from test_process_group import in_group

from hora import torch_backend
from hora.errors import HorovodInternalError

_LIMIT = timedelta(minutes=10)  # longer than the test: only the notice of the death ends a wait in time


def start(place, *, prefix="first", ranks=None, limit=_LIMIT):
    torch_backend.register()
    ranks = list(range(place.size)) if ranks is None else ranks
    store = dist.PrefixStore(prefix, place.store)
    dist.init_process_group("hora", store=store, rank=ranks.index(place.rank), world_size=len(ranks), timeout=limit)


@pytest.mark.ranks(3, lost=(1,))
@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
def test_a_killed_rank_is_named_by_every_call_and_the_others_can_start_again(place, transport):
    if transport == "sockets":
        os.environ["HORA_TRANSPORT"] = "tcp"
    start(place)
    pair, others = dist.new_group([0, 1]), dist.new_group([0, 2])
    dist.barrier()
    waiting = []
    if place.rank != 1:
        waiting = [dist.all_reduce(torch.ones(1000), async_op=True), dist.irecv(torch.ones(5), 1)]
        if place.rank == 0:
            waiting.append(dist.all_gather_into_tensor(torch.ones(4), torch.ones(2), group=pair, async_op=True))
        future = dist.barrier(async_op=True).get_future()
    place.gather("the others wait for rank 1")
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for work in waiting:
        with pytest.raises(HorovodInternalError, match="rank 1"):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        assert "rank 1" in str(work.exception())
    with pytest.raises(RuntimeError, match="rank 1"):
        future.wait()
    with pytest.raises(HorovodInternalError, match="rank 1"):
        dist.send(torch.ones(2), 2 - place.rank)
    total = torch.ones(2)
    dist.all_reduce(total, group=others)  # whose members live
    assert total.tolist() == [2.0, 2.0]
    dist.destroy_process_group()
    start(place, prefix="second", ranks=[0, 2])
    total = torch.tensor([place.rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == 4.0
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_abort_ends_calls_in_flight_and_a_new_group_can_be_created(place):
    start(place)
    group = dist.new_group([0, 1])
    dist.barrier(group=group)
    if place.rank == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        dist.distributed_c10d._abort_process_group(group)
        with pytest.raises(HorovodInternalError, match="was aborted by rank 0"):
            work.wait()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # the default group is still usable
    assert tensor.item() == 2.0
    if place.rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        dist.distributed_c10d._abort_process_group()
        with pytest.raises(HorovodInternalError, match="rank 0"):
            work.wait()
    else:
        with pytest.raises(HorovodInternalError, match="rank 0"):
            dist.all_reduce(torch.ones(7))
        dist.destroy_process_group()
    assert not dist.is_initialized()
    place.gather("both have left")
    start(place, prefix="second")
    dist.all_reduce(tensor)
    assert tensor.item() == 4.0 or place.rank == 0
    dist.destroy_process_group()


class _Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((8,), float(index))


@pytest.mark.ranks(2)
@in_group
def test_forked_workers_of_a_data_loader_do_not_disturb_the_group(rank, size):
    sampler = torch.utils.data.DistributedSampler(_Numbers(), size, rank, shuffle=False)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1, bias=False))
    with torch.no_grad():
        model.module.weight.zero_()
    for _ in range(2):
        loader = torch.utils.data.DataLoader(
            _Numbers(), batch_size=4, sampler=sampler, num_workers=2, multiprocessing_context="fork"
        )
        for batch in loader:
            model(batch).sum().backward()
    assert model.module.weight.grad.tolist() == [[2.0 * sum(range(24)) / size] * 8]


@pytest.mark.ranks(2)
@in_group
def test_invalid_arguments_name_the_rank_and_the_remedy(rank, size):
    with pytest.raises(ValueError, match=r"this one is on meta; move it with .cpu\(\)"):
        dist.all_reduce(torch.ones(2, device="meta"))
    for dtype, op in ((torch.int16, "AVG"), (torch.bool, "AVG"), (torch.int32, "PREMUL_SUM")):
        wanted = dist._make_nccl_premul_sum(0.5) if op == "PREMUL_SUM" else getattr(dist.ReduceOp, op)
        with pytest.raises(ValueError, match=rf"cannot reduce {dtype} by ReduceOp.{op}.*convert the tensor"):
            dist.all_reduce(torch.ones(2).to(dtype), wanted)
    with pytest.raises((ValueError, RuntimeError), match="rank"):
        dist.new_group([0, 7])
    tensor = torch.ones(2)
    dist.all_reduce(tensor)  # the group is still usable
    assert tensor.tolist() == [2.0, 2.0]


@pytest.mark.ranks(2)
def test_invalid_backends(place):
    torch_backend.register()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns about backends with unknown devices
        assert dist.BackendConfig("hora").get_device_backend_map() == {"cpu": "hora", "cuda": "hora"}
    arguments = {"store": place.store, "rank": place.rank, "world_size": place.size}
    with pytest.raises((AssertionError, AttributeError, ValueError, RuntimeError), match=r"(?i)hroa"):
        dist.init_process_group("hroa", **arguments)
    assert not dist.is_initialized()
    start(place)
    other = dist.new_group([0, 1], backend="gloo")  # another backend beside Hora's
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=other)
    dist.all_reduce(tensor)
    assert tensor.item() == 4.0
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_a_process_group_and_hvd_must_agree_on_the_rank(place):
    import horovod.torch as hvd

    torch_backend.register()
    hvd.init()
    store = dist.PrefixStore("alone", place.store)
    with pytest.raises(ValueError, match=rf"rank 0 of 1, but hvd.init.* this process rank {place.rank} of 2"):
        dist.init_process_group("hora", store=store, rank=0, world_size=1)
    hvd.shutdown()
