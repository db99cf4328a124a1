"""The shared-memory transport, directly: results, bits, races, bounds, lost peers, what is left behind."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch
from rank_pool import ranks
from transport_checks import check_everything, combined, data

from hora.engine.request import ReduceOp
from hora.engine.shm.reduction import shared_slice
from hora.engine.shm.segment import Segment
from hora.engine.transport.shm import ShmTransport
from hora.errors import HorovodInternalError

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def pool():
    with ranks(4) as made:
        yield made


class Provider:
    """Gives all ranks the same memory: rank 0 makes it, the others open its descriptor."""

    def __init__(self, rank, size, store):
        self.rank, self.size, self.store = rank, size, store
        self.asked: list[int] = []

    def __call__(self, num_bytes):
        self.asked.append(num_bytes)
        key = f"segment{len(self.asked)}"
        if self.rank == 0:
            segment = Segment.create(num_bytes)
            self.store.set(key, f"/proc/{os.getpid()}/fd/{segment.descriptor}")
        else:
            segment = Segment.attach(os.open(self.store.get(key).decode(), os.O_RDWR))
        if self.store.add(f"{key}/attached", 1) == self.size:
            self.store.set(f"{key}/everywhere", "")
        self.store.wait([f"{key}/everywhere"])
        return segment


def make(rank, size, store, guard=lambda: None, limit_s=LIMIT_S):
    return ShmTransport(Provider(rank, size, store), rank, size, guard, limit_s)


def everything(rank, size, store):
    transport = make(rank, size, store)
    try:
        return check_everything(transport, rank, size)
    finally:
        transport.close()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_operation_is_right_and_has_the_same_bits_everywhere(pool, size):
    results = pool.run(everything, size)
    assert len(results[0]) > 100
    for rank in range(1, size):
        for index, (mine, first) in enumerate(zip(results[rank], results[0], strict=True)):
            assert mine == first, f"result {index} of rank {rank} differs from rank 0's"


def one_way_or_another(rank, size, store, dtype):
    """The same numbers as one large tensor, in small ones one by one, in many fused ones, scattered."""
    transport = make(rank, size, store)
    count = 300_000
    values = torch.randn(count, generator=torch.Generator().manual_seed(rank)) * 10.0 ** torch.randint(
        -3, 4, (count,), generator=torch.Generator().manual_seed(rank)
    )
    values[17], values[99_999], values[123_456] = float("nan"), float("inf"), -0.0
    values = values.to(dtype)
    scales = {"op": ReduceOp.AVERAGE, "prescale": 0.3, "postscale": 1.0}

    whole = torch.empty_like(values)
    transport.allreduce([values], [whole], **scales)
    single = values.clone()
    for part in single.split(7001):
        transport.allreduce([part], [part], **scales)
    fused = [part.clone() for part in values.split(997)]
    transport.allreduce(fused, fused, **scales)
    counts = [shared_slice(count, size, member) for member in range(size)]
    scattered = torch.empty(counts[rank][1] - counts[rank][0], dtype=dtype)
    transport.reducescatter([values], [scattered], [[end - begin for begin, end in counts]], **scales)
    gathered = torch.empty_like(values)
    transport.allgather([scattered], [gathered], [[end - begin for begin, end in counts]])
    transport.close()
    return [as_bytes(tensor) for tensor in (whole, single, torch.cat(fused), gathered)]


def as_bytes(tensor):
    return tensor.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [2, 3])
def test_bits_do_not_depend_on_fusion_or_on_who_reduces(pool, size, dtype):
    ways = [way for rank in pool.run(one_way_or_another, size, dtype) for way in rank]
    assert set(ways) == {ways[0]}


def in_a_hurry(rank, size, store, seed):
    """Random operations one after the other, with members that are late at random."""
    transport = make(rank, size, store)
    plan, own = random.Random(seed), random.Random(seed * 100 + rank)
    for number in range(100):
        kind = plan.choice(("allreduce", "fused", "gather", "broadcast", "barrier", "alltoall", "scatter"))
        count = plan.choice((1, 50, 9000, 16384, 40_000, 131_073, 400_000))
        if own.random() < 0.2:
            late = time.perf_counter() + own.random() * 0.002
            while time.perf_counter() < late:
                pass
        inputs = [data(number, member, count, torch.float32) for member in range(size)]
        mine = inputs[rank].clone()
        if kind == "allreduce":
            transport.allreduce([mine], [mine], op=ReduceOp.SUM, prescale=1.0, postscale=1.0)
            assert torch.equal(mine, combined(inputs, ReduceOp.SUM))
        elif kind == "fused":
            parts = list(mine.clone().split(plan.choice((3000, 70_000))))
            transport.allreduce(parts, parts, op=ReduceOp.MAX, prescale=1.0, postscale=1.0)
            assert torch.equal(torch.cat(parts), combined(inputs, ReduceOp.MAX))
        elif kind == "gather":
            out = torch.empty(size * count)
            transport.allgather([mine], [out], [[count] * size])
            assert torch.equal(out, torch.cat(inputs))
        elif kind == "broadcast":
            root = plan.randrange(size)
            transport.broadcast([mine], root)
            assert torch.equal(mine, inputs[root])
        elif kind == "scatter":
            counts = [count // size] * (size - 1) + [count - count // size * (size - 1)]
            out = torch.empty(counts[rank])
            transport.reducescatter([mine], [out], [counts], op=ReduceOp.SUM, prescale=1.0, postscale=1.0)
            assert torch.equal(out, combined(inputs, ReduceOp.SUM).split(counts)[rank])
        elif kind == "alltoall":
            each = count // size
            out = torch.empty(each * size)
            transport.alltoall(mine, out, [each] * size, [each] * size)
            assert torch.equal(out, torch.cat([part[rank * each : (rank + 1) * each] for part in inputs]))
        else:
            transport.barrier()
    transport.close()
    return transport._segment_provider.asked


@pytest.mark.parametrize("size", [2, 3, 4])
def test_members_that_are_late_or_early_never_see_each_others_old_or_new_data(pool, size):
    assert len(pool.run(in_a_hurry, size, size)[0]) == 2


def large_operations(rank, size, store):
    transport = make(rank, size, store)
    tensor = torch.full((24 << 20,), float(rank + 1))
    transport.allreduce([tensor], [tensor], op=ReduceOp.SUM, prescale=1.0, postscale=1.0)
    assert tensor.eq(size * (size + 1) / 2).all()
    transport.broadcast([tensor], 0)
    asked = transport._segment_provider.asked
    transport.close()
    return asked


def test_staging_is_bounded_whatever_the_size(pool):
    for asked in pool.run(large_operations, 2):
        assert len(asked) == 2
        assert asked[0] < 1 << 20
        assert sum(asked) / 2 <= 32 << 20


def thousand_small_tensors(rank, size, store):
    transport = make(rank, size, store)
    tensors = [torch.full((256,), float(rank + number)) for number in range(1000)]
    transport.allreduce(tensors, tensors, op=ReduceOp.SUM, prescale=1.0, postscale=1.0)
    offset = size * (size - 1) / 2
    transport.close()
    return all(bool(tensor.eq(offset + size * number).all()) for number, tensor in enumerate(tensors))


@pytest.mark.parametrize("size", [2, 3])
def test_thousand_tensors_at_once(pool, size):
    assert all(pool.run(thousand_small_tensors, size))


def wrap_and_propagate(rank, size, store):
    transport = make(rank, size, store)
    most = torch.full((5,), torch.iinfo(torch.int32).max, dtype=torch.int32)
    transport.allreduce([most], [most], op=ReduceOp.SUM, prescale=1.0, postscale=1.0)
    lows = torch.tensor([1.0, float("nan") if rank == size - 1 else 2.0, -float("inf")])
    transport.allreduce([lows], [lows], op=ReduceOp.MIN, prescale=1.0, postscale=1.0)
    odd = torch.tensor([-7, 7, 5], dtype=torch.int64) if rank == 0 else torch.zeros(3, dtype=torch.int64)
    transport.allreduce([odd], [odd], op=ReduceOp.AVERAGE, prescale=1.0, postscale=1.0)
    transport.close()
    return most.tolist(), lows.tolist(), odd.tolist()


def test_integers_wrap_nan_spreads_and_averages_truncate(pool):
    for most, lows, odd in pool.run(wrap_and_propagate, 2):
        assert most == [-2] * 5
        assert lows[0] == 1.0
        assert lows[1] != lows[1]
        assert lows[2] == -float("inf")
        assert odd == [-3, 3, 2]


def in_shared_memory(rank, size, store, prescale):
    transport = make(rank, size, store)
    count = 700_001
    segment = Provider(rank, size, store.__class__("regions", store))(size * 4 * (count + 63))
    views = [segment.tensor(member * 4 * (count + 63), count, torch.float32) for member in range(size)]
    begin, end = shared_slice(count, size, rank)
    inputs = [data(3, member, count, torch.float32) for member in range(size)]
    expected = combined([tensor * prescale for tensor in inputs], ReduceOp.SUM) / size
    arguments = {"op": ReduceOp.AVERAGE, "prescale": prescale, "postscale": 1.0}
    for _ in range(3):
        views[rank].copy_(inputs[rank])
        own = torch.empty(end - begin)
        transport.reduce_shared_slice(views, own, **arguments)
        assert torch.equal(own, expected[begin:end])
        views[rank].copy_(inputs[rank])
        transport.reduce_shared(views, **arguments)
        assert torch.equal(views[rank], expected)
    transport.close()
    return end - begin


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("prescale", [1.0, 0.7])
def test_reduction_in_shared_memory(pool, size, prescale):
    assert sum(pool.run(in_shared_memory, size, prescale)) == 700_001


def with_two_threads(rank, size, store):
    torch.set_num_threads(2)
    try:
        transport = make(rank, size, store)
        tensor = torch.full((1 << 20,), float(rank + 1))
        transport.allreduce([tensor], [tensor], op=ReduceOp.SUM, prescale=1.0, postscale=1.0)
        transport.close()
        return torch.get_num_threads(), bool(tensor.eq(size * (size + 1) / 2).all())
    finally:
        torch.set_num_threads(1)


def test_the_users_number_of_threads_stays(pool):
    assert pool.run(with_two_threads, 2) == [(2, True)] * 2


def leftovers(rank, size, store):
    def held():
        with open("/proc/self/maps") as maps:
            num_mappings = sum("memfd:" in line for line in maps)
        return num_mappings, len(os.listdir("/proc/self/fd"))

    before = held()
    for number in range(20):
        transport = make(rank, size, store.__class__(str(number), store))
        tensor = torch.ones(100_000)
        transport.allreduce([tensor], [tensor], op=ReduceOp.SUM, prescale=1.0, postscale=1.0)
        transport.close()
    return before, held()


def test_nothing_is_held_after_close(pool):
    for before, after in pool.run(leftovers, 2):
        assert after == before


def is_alive(process_id):
    try:
        with open(f"/proc/{process_id}/stat") as stat:  # a killed process is a zombie until its parent looks
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or before it was read
        return False


def dies_in_the_middle(rank, size, store, victim, victim_pid):
    def guard():
        if not is_alive(victim_pid):
            raise HorovodInternalError(f"rank {victim} died")

    transport = make(rank, size, store, guard)
    tensor = torch.ones(1 << 20)
    try:
        for step in range(10_000):
            if rank == victim and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            transport.allreduce([tensor], [tensor], op=ReduceOp.AVERAGE, prescale=1.0, postscale=1.0)
    except HorovodInternalError as error:
        return str(error)
    finally:
        transport.close()


def pid(rank, size, store):
    return os.getpid()


@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_hear_of_a_killed_member(victim):
    with ranks(3) as fragile:
        victim_pid = fragile.run(pid, 3)[victim]
        started = time.monotonic()
        results = fragile.run(dies_in_the_middle, 3, victim, victim_pid, lost=(victim,))
        assert time.monotonic() - started < 30
    assert [result for rank, result in enumerate(results) if rank != victim] == [f"rank {victim} died"] * 2


def nobody_comes(rank, size, store):
    transport = make(rank, size, store, limit_s=0.2)
    if rank == 0:
        with pytest.raises(TimeoutError, match=r"0\.2 s for member 1"):
            transport.barrier()
    transport.close()


def test_a_member_that_never_comes_is_named(pool):
    pool.run(nobody_comes, 2)


def test_without_memory_for_large_slots_the_transport_can_still_be_closed():
    def provider(num_bytes):
        if num_bytes > 1 << 20:
            raise MemoryError("no more")
        return Segment.create(num_bytes)

    transport = ShmTransport(provider, 0, 1, lambda: None, LIMIT_S)
    tensor = torch.ones(1 << 20)
    with pytest.raises(MemoryError, match="no more"):
        transport.allreduce([tensor], [tensor], op=ReduceOp.SUM, prescale=1.0, postscale=1.0)
    transport.close()


def three_for_adasum(rank, size, store):
    transport = make(rank, size, store)
    tensor = torch.ones(3)
    with pytest.raises(ValueError, match="power of 2 of ranks, not 3"):
        transport.adasum([tensor], [tensor], prescale=1.0, postscale=1.0)
    transport.close()


def test_adasum_refuses_three_members(pool):
    pool.run(three_for_adasum, 3)
