"""Every collective of a process group, with members in any order, whoever asks for its end and whatever that is."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from group_calls import CALLS, FUNCTIONAL, assert_written, data, total, written
from hvd_session import needs_torch_2_7
from test_process_group import in_group
from test_process_group_faults import start
from torch.nn.parallel import DistributedDataParallel

from hora.errors import HorovodInternalError
from waiting import wait_until

pytestmark = [pytest.mark.ranks(2, 3), needs_torch_2_7]
_TIMES = 3  # the first call is negotiated, later ones may be repeated


def orders(size):
    """Return the members of groups in several orders."""
    return [list(range(size)), list(range(size))[::-1], [*range(1, size), 0]]


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="this torch sorts a group's ranks"
)
@pytest.mark.over_network
@pytest.mark.both_ways
@in_group
def test_members_may_have_any_order(rank, size):
    for ranks in orders(size):
        group, me = dist.new_group(ranks, sort_ranks=False), ranks.index(rank)
        assert (dist.get_process_group_ranks(group), dist.get_rank(group)) == (ranks, me)
        for name, build in CALLS.items():
            for _ in range(_TIMES):
                call = build(group, ranks, me, 5)
                call.start(False)
                assert_written(name, call.outputs, call.expected)
        for name, build in FUNCTIONAL.items():
            for _ in range(_TIMES):
                found, expected = build(group, ranks, me, 5)
                assert_written(name, [tensor + 0 for tensor in found], expected)


def wait(name, call):
    assert call.start(True).wait()


def poll(name, call):
    work = call.start(True)
    wait_until(f"{name} is completed", work.is_completed)
    assert work.is_success()
    assert work.exception() is None


def future(name, call):
    call.start(True).get_future().wait()


def callback(name, call):
    """The callback sees the results, and its own result is that of the chained future."""
    chained = call.start(True).get_future().then(lambda done: written(call.outputs, call.expected))
    assert chained.wait(), name


def drop(name, call):
    call.start(True)
    wait_until(f"the results of a dropped {name}", lambda: written(call.outputs, call.expected))


@pytest.mark.over_network
@pytest.mark.both_ways
@pytest.mark.parametrize("end", [wait, poll, future, callback, drop])
def test_results_are_written_whoever_asks_for_them(place, end):
    start(place)
    group, ranks = dist.group.WORLD, list(range(place.size))
    for count in (5, 30_001):
        for name, build in CALLS.items():
            for _ in range(_TIMES):
                call = build(group, ranks, place.rank, count)
                end(name, call)
                assert_written(name, call.outputs, call.expected)
    dist.barrier()
    dist.destroy_process_group()


def assert_failed(name, work, kinds, words):
    """Check that a work that has failed says so every time, to everyone who asks."""
    for _ in range(2):
        with pytest.raises(kinds, match=words):
            work.wait()
        assert work.is_completed(), name
        assert not work.is_success(), name
        assert isinstance(work.exception(), kinds), name
    with pytest.raises(kinds, match=words):
        work.get_future().wait()
    with pytest.raises(RuntimeError, match=words):
        work.get_future().then(lambda done: done.value()).wait()


# Ranks that do not see that another rank's tensor has another size.
_UNAWARE = {
    "gather": lambda rank, size: rank != 0,
    "message": lambda rank, size: rank != 1 % size and rank != 0,
    "message_strided": lambda rank, size: rank != 1 % size and rank != 0,
}


@in_group
def test_a_failed_call_stays_failed(rank, size):
    group, ranks = dist.group.WORLD, list(range(size))
    for name, build in CALLS.items():
        if name in ("barrier", "all_reduce_sparse"):
            continue  # no sizes to disagree about
        for ask in (None, "poll", "future"):
            call = build(group, ranks, rank, 6 if rank == 0 else 5)
            work = call.start(True)
            if _UNAWARE.get(name, lambda rank, size: False)(rank, size):
                work.wait()
                continue
            if ask == "poll":
                wait_until(f"{name} is completed", work.is_completed)
            elif ask == "future":
                wait_until(f"the future of {name}", work.get_future().done)
            assert_failed(
                name, work, (HorovodInternalError, ValueError), r"Mismatched|members sent|others sent|sent \d+"
            )
    tensor = torch.ones(3)
    dist.all_reduce(tensor)  # the group is still usable
    assert tensor.tolist() == [size] * 3


def expect_timeout(named_work, way, missing):
    name, work = named_work
    if way == "poll":
        wait_until(f"{name} is completed", work.is_completed)
    elif way == "future":
        wait_until(f"the future of {name}", work.get_future().done)
    words = rf"(?s)until the timeout.* for rank\(s\) \[{missing}\].*rank_pool.py:\d+"
    assert_failed(name, work, HorovodInternalError, words)


@pytest.mark.parametrize("repeats", [0, 2])
def test_a_timeout_ends_every_wait_and_names_the_missing_rank_and_its_line(place, repeats):
    """Each call has a group of its own. All of them are waited for at once, in every way."""
    start(place)
    ranks = list(range(place.size))
    limit = timedelta(seconds=2)
    calls = []
    for name, build in CALLS.items():
        group = dist.new_group(ranks, timeout=limit)
        for _ in range(repeats):
            build(group, ranks, place.rank, 5).start(False)
        calls.append((name, build(group, ranks, place.rank, 5)))
    missing = place.size - 1
    if place.rank == missing:
        place.gather("the others have waited")
    else:
        try:
            works = [(name, call.start(True)) for name, call in calls if name[:7] != "message" or place.rank == 0]
            with ThreadPoolExecutor(len(works)) as threads:
                list(
                    threads.map(
                        expect_timeout, works, itertools.cycle(["wait", "poll", "future"]), [missing] * len(works)
                    )
                )
        finally:
            place.gather("the others have waited")
    dist.barrier()  # the default group is still usable
    dist.destroy_process_group()


@pytest.mark.ranks(3, lost=(1,))
@pytest.mark.parametrize("repeats", [0, 2])
def test_a_death_ends_every_wait_and_names_the_rank(place, repeats):
    start(place)
    ranks = list(range(place.size))
    calls = []
    for name, build in CALLS.items():
        group = dist.new_group(ranks)
        for _ in range(repeats):
            build(group, ranks, place.rank, 5).start(False)
        calls.append((name, build(group, ranks, place.rank, 5)))
    works = []
    if place.rank != 1:
        # Rank 2 receives from the dead rank, rank 0 from rank 2.
        wanted = [(name, call) for name, call in calls if name[:7] != "message" or place.rank == 2]
        works = [(name, call.start(True)) for name, call in wanted]
    futures = [work.get_future() for _, work in works[::2]]
    place.gather("the others wait for rank 1")
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for one in futures:
        with pytest.raises(HorovodInternalError, match="rank 1"):
            one.wait()
    for name, work in works:
        wait_until(f"{name} is completed", work.is_completed)
        assert_failed(name, work, HorovodInternalError, "rank 1")
    dist.destroy_process_group()


def forms(group, rank, size):
    """Yield calls of the group's methods with each of torch's signatures, their outputs and what they should become."""
    limit, largest, members = timedelta(seconds=30), dist.ReduceOp.MAX, list(range(size))
    everything, top = [data(member, 3) for member in members], data(size - 1, 3)

    def parts():
        return [torch.zeros(3) for _ in members]

    def mine():
        return data(rank, 3)

    for arguments, named in [
        ((largest,), {}),
        ((), {"op": largest}),
        ((largest, limit), {}),
        ((largest,), {"timeout": limit}),
    ]:
        for listed in (False, True):
            out = mine()
            yield group.allreduce([out] if listed else out, *arguments, **named), [out], [top]
    out = mine()
    yield group.allreduce(tensor=out), [out], [total(members, 3)]
    for arguments, named in [((size - 1,), {}), ((), {"root": size - 1}), ((size - 1, limit), {})]:
        out = mine()
        yield group.broadcast(out, *arguments, **named), [out], [top]
    out = mine()
    yield group.broadcast([out]), [out], [data(0, 3)]
    for named in ({}, {"timeout": limit}):
        out = parts()
        yield group.allgather(out, mine(), **named), out, everything
        out = mine()
        yield group.reduce(out, 0, largest, **named), [out], [top if rank == 0 else mine()]
        out = parts() if rank == 0 else []
        yield group.gather(out, mine(), 0, **named), out, everything if rank == 0 else []
        out = torch.zeros(3)
        yield group.scatter(out, everything if rank == 0 else [], root=0, **named), [out], [mine()]
        out = torch.zeros(3)
        yield group.reduce_scatter(out, [mine() + member for member in members], largest, **named), [out], [top + rank]
        out = parts()
        yield group.alltoall(out, [mine()] * size, **named), out, everything
        out = torch.zeros(size * 3)
        yield group.all_to_all_single(out, mine().repeat(size), [], [], **named), [out], [torch.cat(everything)]
        yield group.barrier(**named), [], []
    yield group.barrier(limit), [], []
    out = torch.zeros(3)
    yield group.reduce_scatter_single(outputTensor=out, inputTensor=mine().repeat(size)), [out], [total(members, 3)]
    out = torch.zeros(size * 3)
    yield group.all_gather_single(output=out, input=mine()), [out], [torch.cat(everything)]


@in_group
def test_methods_have_the_signatures_of_torch(rank, size):
    group = dist.group.WORLD
    for number, (work, outputs, expected) in enumerate(forms(group, rank, size)):
        assert work.wait(), number
        assert_written(f"form {number}", outputs, expected)
    tensor = torch.ones(2)
    for wrong in ((), ("text",), (tensor, 1.5), ([tensor], limit := timedelta(seconds=1), limit, limit)):
        with pytest.raises(TypeError, match=r"allreduce takes \(tensors, opts\) or .*, but it was called with \("):
            group.allreduce(*wrong)
    with pytest.raises(TypeError, match=r"broadcast takes .* \(tensor, root, timeout\), but .* \(Tensor, where=int\)"):
        group.broadcast(tensor, where=1)


@in_group
def test_properties_that_torch_reads_of_a_backend(rank, size):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert (backend.options.backend, backend.options._timeout) == ("hora", timedelta(seconds=60))
    assert copy.deepcopy(backend.options).global_ranks_in_group == list(range(size))
    assert not backend.supports_tensor_alloc(torch.device("cpu"))
    assert backend.get_error().name == "SUCCESS"


# DistributedDataParallel waits in C++ for the futures of its buckets.


def model(hook=None):
    made = DistributedDataParallel(torch.nn.Linear(8, 8))
    if hook is not None:
        made.register_comm_hook(dist.group.WORLD, hook)
    return made


def through_callback(group, bucket):
    works = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return works.get_future().then(lambda done: done.value()[0])


def backward(trained, times=1):
    for _ in range(times):
        trained(torch.ones(2, 8)).sum().backward()


_HOOKS = [None, through_callback]


@pytest.mark.ranks(3, lost=(1,))
@pytest.mark.parametrize("hook", _HOOKS)
def test_ddp_raises_when_a_rank_dies(place, hook):
    start(place)
    trained = model(hook)
    backward(trained, 3)
    place.gather("trained")
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1"):
        backward(trained)
    with pytest.raises(RuntimeError, match="rank 1"):
        dist.all_reduce(torch.ones(1))
    # Within a second, but for a busy machine: before any keepalive, heartbeat or timeout could end them.
    assert time.monotonic() - began < 7
    assert dist.group.WORLD.get_error().name == "COMM_ERROR"
    dist.destroy_process_group()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hook", _HOOKS)
def test_ddp_raises_when_ranks_call_different_collectives(place, hook):
    start(place)
    trained = model(hook)
    backward(trained, 3)
    extra = dist.all_reduce(torch.ones(3), async_op=True) if place.rank == 1 else None
    if place.rank == 0:
        with pytest.raises(RuntimeError, match=r"Mismatched .*rank 0 has .*rank 1 has"):
            backward(trained)
        dist.all_reduce(torch.zeros(72))  # the partner of rank 1's bucket
    else:
        backward(trained)
        assert_failed("all_reduce", extra, HorovodInternalError, "Mismatched")
    dist.destroy_process_group()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hook", _HOOKS)
def test_ddp_raises_at_the_timeout_and_names_the_missing_rank_and_its_line(place, hook):
    start(place, limit=timedelta(seconds=2))
    trained = model(hook)
    backward(trained, 3)
    if place.rank == 0:
        with pytest.raises(RuntimeError, match=r"(?s)until the timeout.* for rank\(s\) \[1\].*rank_pool.py:\d+"):
            backward(trained)
        assert dist.group.WORLD.get_error().name == "TIMEOUT"
    place.gather("rank 0 has waited")
    with contextlib.suppress(HorovodInternalError):
        dist.destroy_process_group()
