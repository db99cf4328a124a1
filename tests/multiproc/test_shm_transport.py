"""The shared-memory transport by itself: results, bits, races, bounds, lost peers, no leftovers."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist
from transport_checks import check_everything, combined, data, fingerprint

from hora.engine.request import Reduce, ReduceOp
from hora.engine.shm import counters
from hora.engine.shm.native import absence, library
from hora.engine.shm.reduction import shared_slice
from hora.engine.shm.segment import Segment
from hora.engine.transport.arithmetic import arithmetic_of
from hora.engine.transport.base import Membership
from hora.engine.transport.shm import ShmTransport
from hora.errors import HorovodInternalError

pytestmark = pytest.mark.skipif(library() is None, reason=f"no native part: {absence()}")

LIMIT_S = 600.0  # longer than any test, so that no test passes because a wait timed out


class SharedSegments:
    """Provides all ranks with the same memory: rank 0 creates it, the others open its descriptor."""

    def __init__(self, place, store):
        self.rank, self.size, self.store = place.rank, place.size, store
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


@contextlib.contextmanager
def made(place, check_alive=lambda: None, limit_s=LIMIT_S, store=None):
    segments = SharedSegments(place, store or place.store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counters, "COLLECTIVE_LIMIT_S", limit_s)
        transport = ShmTransport(segments, Membership(place.rank, place.size, check_alive))
        try:
            yield transport
        finally:
            transport.close()


@pytest.mark.ranks(1, 2, 3, 4)
def test_every_operation_is_correct_and_bit_identical_on_all_members(place):
    with made(place) as transport:
        results = check_everything(transport, place.rank, place.size)
    assert len(results) > 100
    assert place.gather(results) == [results] * place.size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.ranks(2, 3)
def test_bits_do_not_depend_on_fusion_or_on_the_member_that_reduces(place, dtype):
    """Reduce the same numbers as one large tensor, as small ones, as many fused ones, and scattered."""
    rank, size, count = place.rank, place.size, 300_000
    values = torch.randn(count, generator=torch.Generator().manual_seed(rank)) * 10.0 ** torch.randint(
        -3, 4, (count,), generator=torch.Generator().manual_seed(rank)
    )
    values[17], values[99_999], values[123_456] = float("nan"), float("inf"), -0.0
    values = values.to(dtype)
    scales = Reduce(ReduceOp.AVERAGE, prescale=0.3)

    with made(place) as transport:
        whole = torch.empty_like(values)
        transport.allreduce([values], [whole], scales)
        single = values.clone()
        for part in single.split(7001):
            transport.allreduce([part], [part], scales)
        fused = [part.clone() for part in values.split(997)]
        transport.allreduce(fused, fused, scales)
        counts = [shared_slice(count, size, member) for member in range(size)]
        scattered = torch.empty(counts[rank][1] - counts[rank][0], dtype=dtype)
        transport.reducescatter([values], [scattered], [[end - begin for begin, end in counts]], scales)
        gathered = torch.empty_like(values)
        transport.allgather([scattered], [gathered], [[end - begin for begin, end in counts]])
    ways = [fingerprint(tensor) for tensor in (whole, single, torch.cat(fused), gathered)]
    assert {way for ways in place.gather(ways) for way in ways} == {ways[0]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.ranks(2, 4)
def test_an_average_over_a_power_of_two_is_a_sum_of_shares(place, dtype):
    """This holds even where the sum would overflow, or a share loses bits, for all sizes, fused and scattered."""
    rank, size, count, average = place.rank, place.size, 300_000, Reduce(ReduceOp.AVERAGE)
    rows = [(torch.randn(count, generator=torch.Generator().manual_seed(peer)) * 8).to(dtype) for peer in range(size)]
    for peer, row in enumerate(rows):
        row[5], row[6], row[7] = torch.finfo(dtype).max, -torch.finfo(dtype).max, torch.finfo(dtype).tiny * (peer + 1.5)
    total = torch.stack(rows).div(size).to(torch.promote_types(dtype, torch.float32))
    expected = total[0]
    for row in total[1:]:
        expected = expected + row
    expected = expected.to(dtype)
    with made(place) as transport:
        whole, few = torch.empty_like(rows[rank]), torch.empty_like(rows[rank][:1000])
        transport.allreduce([rows[rank]], [whole], average)
        transport.allreduce([rows[rank][:1000]], [few], average)
        fused = [part.clone() for part in rows[rank].split(997)]
        transport.allreduce(fused, fused, average)
        counts = [end - begin for begin, end in (shared_slice(count, size, member) for member in range(size))]
        scattered = torch.empty(counts[rank], dtype=dtype)
        transport.reducescatter([rows[rank]], [scattered], [counts], average)
    assert expected[5] == torch.finfo(dtype).max
    assert torch.equal(whole, expected)
    assert torch.equal(few, expected[:1000])
    assert torch.equal(torch.cat(fused), expected)
    assert torch.equal(scattered, expected.split(counts)[rank])


@pytest.mark.ranks(2, 3, 4, slow=(2, 4))
def test_late_and_early_members_never_see_each_others_old_or_new_data(place):
    """Run random operations in sequence, with members that are late at random."""
    rank, size = place.rank, place.size
    plan, own = random.Random(size), random.Random(size * 100 + rank)
    with made(place) as transport:
        for number in range(100):
            kind = plan.choice(("allreduce", "fused", "gather", "broadcast", "barrier", "alltoall", "scatter"))
            count = plan.choice((1, 50, 9000, 16384, 40_000, 131_073, 400_000))
            if own.random() < 0.2:
                late = time.perf_counter() + own.random() * 0.002
                while time.perf_counter() < late:
                    pass
            inputs = [data(number, member, count, torch.float32) for member in range(size)]
            part = (
                plan.choice((3000, 70_000)) if kind == "fused" else plan.randrange(size) if kind == "broadcast" else 0
            )
            _check_one(transport, kind, inputs, rank, part)
        assert len(transport.slots._segment_provider.asked) == 2


def _check_one(transport, kind, inputs, rank, part):
    """Run an operation and check its result. `part`: the size of fused tensors, or the root."""
    mine, size, count = inputs[rank].clone(), len(inputs), len(inputs[0])
    if kind == "allreduce":
        transport.allreduce([mine], [mine], Reduce(ReduceOp.SUM))
        assert torch.equal(mine, combined(inputs, ReduceOp.SUM))
    elif kind == "fused":
        parts = list(mine.clone().split(part))
        transport.allreduce(parts, parts, Reduce(ReduceOp.MAX))
        assert torch.equal(torch.cat(parts), combined(inputs, ReduceOp.MAX))
    elif kind == "gather":
        out = torch.empty(size * count)
        transport.allgather([mine], [out], [[count] * size])
        assert torch.equal(out, torch.cat(inputs))
    elif kind == "broadcast":
        transport.broadcast([mine], part)
        assert torch.equal(mine, inputs[part])
    elif kind == "scatter":
        counts = [count // size] * (size - 1) + [count - count // size * (size - 1)]
        out = torch.empty(counts[rank])
        transport.reducescatter([mine], [out], [counts], Reduce(ReduceOp.SUM))
        assert torch.equal(out, combined(inputs, ReduceOp.SUM).split(counts)[rank])
    elif kind == "alltoall":
        each = count // size
        out = torch.empty(each * size)
        transport.alltoall(mine, out, [each] * size, [each] * size)
        assert torch.equal(out, torch.cat([part[rank * each : (rank + 1) * each] for part in inputs]))
    else:
        transport.barrier()


@pytest.mark.ranks(2)
def test_staging_memory_is_bounded_for_any_size(place):
    with made(place) as transport:
        tensor = torch.full((24 << 20,), float(place.rank + 1))
        transport.allreduce([tensor], [tensor], Reduce(ReduceOp.SUM))
        assert tensor.eq(3).all()
        transport.broadcast([tensor], 0)
        asked = transport.slots._segment_provider.asked
    assert len(asked) == 2
    assert asked[0] < 1 << 20
    assert sum(asked) / 2 <= 32 << 20


@pytest.mark.ranks(2, 3)
def test_a_thousand_fused_tensors(place):
    tensors = [torch.full((256,), float(place.rank + number)) for number in range(1000)]
    with made(place) as transport:
        transport.allreduce(tensors, tensors, Reduce(ReduceOp.SUM))
    offset = place.size * (place.size - 1) / 2
    assert all(bool(tensor.eq(offset + place.size * number).all()) for number, tensor in enumerate(tensors))


@pytest.mark.ranks(2)
def test_integers_wrap_nan_propagates_and_averages_truncate(place):
    most = torch.full((5,), torch.iinfo(torch.int32).max, dtype=torch.int32)
    lows = torch.tensor([1.0, float("nan") if place.rank == 1 else 2.0, -float("inf")])
    odd = torch.tensor([-7, 7, 5], dtype=torch.int64) if place.rank == 0 else torch.zeros(3, dtype=torch.int64)
    with made(place) as transport:
        transport.allreduce([most], [most], Reduce(ReduceOp.SUM))
        transport.allreduce([lows], [lows], Reduce(ReduceOp.MIN))
        transport.allreduce([odd], [odd], Reduce(ReduceOp.AVERAGE))
    assert most.tolist() == [-2] * 5
    assert (lows[0], lows[2]) == (1.0, -float("inf"))
    assert lows[1].isnan()
    assert odd.tolist() == [-3, 3, 2]


@pytest.mark.ranks(1, 2, 3, 4)
def test_reduction_in_shared_memory(place):
    rank, size, count = place.rank, place.size, 700_001
    segment = SharedSegments(place, dist.PrefixStore("memory", place.store))(size * 4 * (count + 63))
    views = [segment.tensor(member * 4 * (count + 63), count, torch.float32) for member in range(size)]
    begin, end = shared_slice(count, size, rank)
    inputs = [data(3, member, count, torch.float32) for member in range(size)]
    expected = combined(inputs, ReduceOp.SUM) / size
    what, native = arithmetic_of(Reduce(ReduceOp.AVERAGE), torch.float32, size).sum, library()
    with made(place) as transport:
        for _ in range(3):
            views[rank].copy_(inputs[rank])
            own = torch.empty(end - begin)
            transport.barrier()
            native.reduction(what, [view[begin:end] for view in views], own)()
            transport.barrier()
            assert torch.equal(own, expected[begin:end])
            views[rank].copy_(inputs[rank])
            transport.barrier()
            native.reduction_everywhere(what, views, begin, end)()
            transport.barrier()
            assert torch.equal(views[rank], expected)
    assert sum(place.gather(end - begin)) == count


@pytest.mark.ranks(2)
def test_the_users_number_of_threads_is_kept(place):
    torch.set_num_threads(2)
    try:
        with made(place) as transport:
            tensor = torch.full((1 << 20,), float(place.rank + 1))
            transport.allreduce([tensor], [tensor], Reduce(ReduceOp.SUM))
        assert torch.get_num_threads() == 2
        assert tensor.eq(3).all()
    finally:
        torch.set_num_threads(1)


@pytest.mark.ranks(2)
def test_nothing_is_held_after_close(place):
    def held():
        with open("/proc/self/maps") as maps:
            num_mappings = sum("memfd:" in line for line in maps)
        return num_mappings, len(os.listdir("/proc/self/fd"))

    before = held()
    for number in range(20):
        with made(place, store=dist.PrefixStore(str(number), place.store)) as transport:
            tensor = torch.ones(100_000)
            transport.allreduce([tensor], [tensor], Reduce(ReduceOp.SUM))
    assert held() == before


def is_alive(process_id):
    try:
        with open(f"/proc/{process_id}/stat") as stat:  # a killed process is a zombie until its parent reaps it
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it exited before the file was opened or read
        return False


def _die_in_the_middle(place, victim):
    victim_pid = place.gather(os.getpid())[victim]

    def check_alive():
        if not is_alive(victim_pid):
            raise HorovodInternalError(f"rank {victim} died")

    tensor = torch.ones(1 << 20)

    def train(transport):
        for step in range(10_000):
            if place.rank == victim and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            transport.allreduce([tensor], [tensor], Reduce(ReduceOp.AVERAGE))

    with made(place, check_alive) as transport, pytest.raises(HorovodInternalError, match=f"^rank {victim} died$"):
        train(transport)


@pytest.mark.ranks(3, lost=(0,))
def test_survivors_notice_a_killed_first_member(place):
    _die_in_the_middle(place, victim=0)


@pytest.mark.ranks(3, lost=(2,))
def test_survivors_notice_a_killed_last_member(place):
    _die_in_the_middle(place, victim=2)


@pytest.mark.ranks(2)
def test_a_missing_member_is_named(place):
    with made(place, limit_s=0.2) as transport:
        if place.rank == 0:
            with pytest.raises(TimeoutError, match=r"0\.2 s for member 1"):
                transport.barrier()


def test_a_transport_without_memory_for_large_slots_can_still_be_closed():
    def segments(num_bytes):
        if num_bytes > 1 << 20:
            raise MemoryError("no more")
        return Segment.create(num_bytes)

    transport = ShmTransport(segments, Membership(0, 1, lambda: None))
    tensor = torch.ones(1 << 20)
    with pytest.raises(MemoryError, match="no more"):
        transport.allreduce([tensor], [tensor], Reduce(ReduceOp.SUM))
    transport.close()
