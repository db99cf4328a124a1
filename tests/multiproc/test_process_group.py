"""`torch.distributed` on Hora: collectives of a process group, compared with results computed on each rank."""

from __future__ import annotations

import functools
import gc
import mmap
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hvd_session import needs_torch_2_7

from hora import torch_backend
from hora.errors import HorovodInternalError

pytestmark = [pytest.mark.ranks(2, 3), needs_torch_2_7]
ALL_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
BITWISE = ("BAND", "BOR", "BXOR")
REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
SHAPES = [(), (0,), (1,), (17,), (5, 3)]


def in_group(body):
    """Run the body between `init_process_group` and `destroy_process_group`."""

    @functools.wraps(body)
    def test(place, **arguments):
        torch_backend.register()
        dist.init_process_group(
            "hora", store=place.store, rank=place.rank, world_size=place.size, timeout=timedelta(seconds=60)
        )
        try:
            body(place.rank, place.size, **arguments)
            dist.barrier()
        finally:
            dist.destroy_process_group()

    del test.__wrapped__
    return test


def value(rank, shape, dtype):
    numbers = torch.arange(max(torch.Size(shape).numel(), 1))[: torch.Size(shape).numel()]
    return ((numbers * 3 + rank + 1) % 5 + 1).reshape(shape).to(dtype)


def reduced(parts, op):
    many = torch.stack([part.double() if part.dtype.is_floating_point else part for part in parts])
    if op in ("SUM", "AVG"):
        return (many.sum(0) / (len(parts) if op == "AVG" else 1)).to(parts[0].dtype)
    if op in ("MIN", "MAX"):
        return (many.amin(0) if op == "MIN" else many.amax(0)).to(parts[0].dtype)
    if op == "PRODUCT":
        return many.prod(0).to(parts[0].dtype)
    fold = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}[op]
    return functools.reduce(fold, parts)


@in_group
def test_all_reduce_reduces_every_dtype_and_shape(rank, size):
    for dtype in (*REAL, *WHOLE):
        ops = [op for op in ALL_OPS if dtype.is_floating_point or op != "AVG"]
        for op in ops:
            for shape in SHAPES:
                tensor = value(rank, shape, dtype)
                assert dist.all_reduce(tensor, getattr(dist.ReduceOp, op)) is None
                torch.testing.assert_close(tensor, reduced([value(r, shape, dtype) for r in range(size)], op))


@in_group
def test_all_reduce_of_bools_bits_and_complex_numbers(rank, size):
    for op in BITWISE:
        for dtype in (torch.uint8, torch.int32, torch.int64):
            tensor = value(rank, (7,), dtype)
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
            assert tensor.equal(reduced([value(r, (7,), dtype) for r in range(size)], op))
    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    assert flags.tolist() == [True, True, False]
    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags, dist.ReduceOp.BXOR)
    assert flags.tolist() == [True, size % 2 == 1, False]
    numbers = torch.full((3,), complex(rank, 1))
    dist.all_reduce(numbers)
    assert numbers.tolist() == [complex(sum(range(size)), size)] * 3
    scaled = torch.full((4,), float(rank + 1))
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    assert scaled.tolist() == [sum(range(1, size + 1)) / 2] * 4


@in_group
def test_non_contiguous_tensors_are_reduced_in_place(rank, size):
    whole = torch.zeros(4, 6)
    part = whole[:, ::2]
    part.fill_(float(rank))
    dist.all_reduce(part)
    assert whole[:, ::2].eq(sum(range(size))).all()
    assert whole[:, 1::2].eq(0).all()
    column = torch.full((3, 2), float(rank))[:, 1]
    dist.broadcast(column, size - 1)
    assert column.tolist() == [size - 1.0] * 3


@in_group
def test_lazily_negated_and_empty_tensors_have_their_visible_values(rank, size):
    for _ in range(3):  # negotiated, then repeated
        negated = torch.complex(torch.ones(1), torch.full((1,), 2.0)).conj().imag
        assert negated.is_neg()
        gathered = torch.zeros(size)
        dist.all_gather_into_tensor(gathered, negated)
        assert gathered.tolist() == [-2.0] * size
        sending, received = dist.isend(negated, (rank + 1) % size), torch.zeros(1)
        dist.recv(received, (rank - 1) % size)
        sending.wait()
        assert received.item() == -2.0
        dist.all_reduce(negated)
        assert negated.item() == -2.0 * size
        dist.all_reduce(torch.zeros(6, 0)[1:])  # its offset lies behind the end of its storage


@in_group
def test_coalesced_reductions_take_tensors_of_several_dtypes(rank, size):
    tensors = [torch.full((3,), float(rank)), torch.full((2,), rank), torch.full((), rank, dtype=torch.float64)]
    dist.group.WORLD.allreduce_coalesced(tensors).wait()
    assert [tensor.sum().item() for tensor in tensors] == [sum(range(size)) * n for n in (3, 2, 1)]


@in_group
def test_gathers_and_scatters_with_lists(rank, size):
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.uint8, torch.uint16, torch.int64):
        mine = torch.arange(4).add(rank).to(dtype)
        everything = [torch.zeros(4, dtype=dtype) for _ in range(size)]
        dist.all_gather(everything, mine)
        expected = [torch.arange(4).add(r).to(dtype) for r in range(size)]
        assert all(found.equal(wanted) for found, wanted in zip(everything, expected, strict=True))
        whole = torch.zeros(4 * size, dtype=dtype)
        dist.all_gather_into_tensor(whole, mine)
        assert whole.equal(torch.cat(expected))
        targets = [torch.zeros(4, dtype=dtype) for _ in range(size)] if rank == size - 1 else None
        dist.gather(mine, targets, dst=size - 1)
        assert targets is None or all(found.equal(wanted) for found, wanted in zip(targets, expected, strict=True))
        part = torch.zeros(4, dtype=dtype)
        dist.scatter(part, expected if rank == 0 else None, src=0)
        assert part.equal(expected[rank])


@in_group
def test_all_gather_takes_tensors_of_different_lengths(rank, size):
    targets = [torch.zeros(r + 1) for r in range(size)]
    dist.all_gather(targets, torch.full((rank + 1,), float(rank)))
    assert [target.tolist() for target in targets] == [[float(r)] * (r + 1) for r in range(size)]


@in_group
def test_reduce_scatter_by_every_operator(rank, size):
    for op in (*ALL_OPS, "BAND"):
        dtype = torch.int64 if op == "BAND" else torch.float32
        expected = reduced([value(r, (size * 3,), dtype) for r in range(size)], op).view(size, 3)[rank]
        output = torch.zeros(3, dtype=dtype)
        dist.reduce_scatter_tensor(output, value(rank, (size * 3,), dtype), getattr(dist.ReduceOp, op))
        torch.testing.assert_close(output, expected)
        output = torch.zeros(3, dtype=dtype)
        dist.reduce_scatter(output, list(value(rank, (size, 3), dtype)), getattr(dist.ReduceOp, op))
        torch.testing.assert_close(output, reduced([value(r, (size, 3), dtype) for r in range(size)], op)[rank])


@in_group
def test_reduce_scatter_may_write_into_its_input(rank, size):
    whole = torch.arange(size * 5000.0) + rank
    dist.reduce_scatter_tensor(whole.view(size, -1)[rank], whole)
    wanted = sum(torch.arange(size * 5000.0) + r for r in range(size))
    assert whole.view(size, -1)[rank].equal(wanted.view(size, -1)[rank])


@in_group
def test_reduce_leaves_the_sum_at_its_root(rank, size):
    for root in range(size):
        tensor = torch.full((2, 2), float(rank + 1))
        dist.reduce(tensor, root)
        assert tensor.eq(sum(range(1, size + 1)) if rank == root else rank + 1).all()


@in_group
def test_all_to_all_with_and_without_splits(rank, size):
    received = torch.zeros(size, 2)
    dist.all_to_all_single(received, torch.arange(size * 2.0).view(size, 2) + 100 * rank)
    assert received.equal(torch.stack([torch.tensor([2.0 * rank, 2.0 * rank + 1]) + 100 * r for r in range(size)]))
    send, receive = [r + 1 for r in range(size)], [rank + 1] * size
    output = torch.zeros(sum(receive), 3)
    dist.all_to_all_single(output, torch.full((sum(send), 3), float(rank)), receive, send)
    assert output.equal(torch.cat([torch.full((rank + 1, 3), float(r)) for r in range(size)]))
    outputs = [torch.zeros(rank + 1) for _ in range(size)]
    dist.all_to_all(outputs, [torch.full((r + 1,), float(rank)) for r in range(size)])
    assert [one.tolist() for one in outputs] == [[float(r)] * (rank + 1) for r in range(size)]


@in_group
def test_object_collectives(rank, size):
    everything = [None] * size
    dist.all_gather_object(everything, {"rank": rank, "text": "x" * rank})
    assert everything == [{"rank": r, "text": "x" * r} for r in range(size)]
    objects = [rank, "text", {"a": rank}]
    dist.broadcast_object_list(objects, src=1)
    assert objects == [1, "text", {"a": 1}]
    gathered = [None] * size if rank == 0 else None
    dist.gather_object(rank * 2, gathered, dst=0)
    assert gathered in (None, [2 * r for r in range(size)])
    found = [None]
    dist.scatter_object_list(found, [f"for {r}" for r in range(size)] if rank == 0 else [None] * size, src=0)
    assert found == [f"for {rank}"]


@in_group
def test_work_and_its_future(rank, size):
    tensor = torch.full((1000,), float(rank))
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait(timedelta(seconds=20))
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is tensor
    future = dist.all_reduce(torch.full((5,), 1.0), async_op=True).get_future()
    twice = future.then(lambda done: done.value()[0] * 2)
    assert twice.wait().tolist() == [2.0 * size] * 5

    def another(done):
        return dist.all_reduce(done.value()[0], async_op=True).get_future().wait()[0]

    for _ in range(6):
        chained = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(another)
        assert chained.wait().tolist() == [float(size * size)] * 3


@in_group
def test_groups_overlap_and_are_independent(rank, size):
    pairs = [dist.new_group([0, 1]), dist.new_group([1, size - 1]) if size > 2 else None]
    world = dist.new_group(list(range(size)))
    alone = [dist.new_group([r]) for r in range(size)]
    if rank < 2:
        tensor = torch.ones(3) * rank
        dist.all_reduce(tensor, group=pairs[0])
        assert tensor.tolist() == [1.0] * 3
        dist.broadcast(tensor, 1, group=pairs[0])
    if size > 2 and rank in (1, size - 1):
        found = [torch.zeros(1) for _ in range(2)]
        dist.all_gather(found, torch.ones(1) * rank, group=pairs[1])
        assert [one.item() for one in found] == [1.0, size - 1.0]
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=world)
    assert tensor.tolist() == [float(size)] * 2
    dist.all_reduce(tensor, group=alone[rank])
    assert tensor.tolist() == [float(size)] * 2
    dist.destroy_process_group(world)


@in_group
def test_a_group_can_be_split(rank, size):
    world = dist.group.WORLD
    for ranks in ([0, 1], [size - 1], list(range(size))[::-1]):
        part = world.split_group(ranks, group_name=f"part of {ranks}", group_desc="a part")
        if rank not in ranks:
            assert part is None
            continue
        assert (part.rank(), part.size(), part.group_name) == (ranks.index(rank), len(ranks), f"part of {ranks}")
        tensor = torch.tensor([rank + 1.0])
        part.allreduce([tensor]).wait()
        assert tensor.item() == sum(member + 1 for member in ranks)
        if len(ranks) > 1:
            pair = part.split_group([1], timeout=timedelta(seconds=9))  # by rank within the part
            assert (pair is None) == (rank != ranks[1])
            assert pair is None or (pair._timeout, pair.size()) == (timedelta(seconds=9), 1)
    with pytest.raises(ValueError, match=rf"on rank {rank}: .* 0 to {size - 1}, but they are \[0, {size}\]"):
        world.split_group([0, size])


@in_group
def test_threads_may_use_their_own_groups(rank, size):
    groups = [dist.new_group(list(range(size))) for _ in range(3)]
    sums = {}

    def work(index):
        for step in range(30):
            tensor = torch.full((64,), float(rank + step))
            dist.all_reduce(tensor, group=groups[index])
            sums[index] = tensor[0].item()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == dict.fromkeys(range(3), float(sum(range(size)) + 29 * size))


@in_group
def test_repeated_collectives_give_the_results_of_the_first_ones(rank, size):
    """The first call is negotiated, the others take the path of repeated calls; some are in place."""
    for count in (5, 30_001, 300_001):  # one slot, several slots, and large tensors
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            check_repeated_collectives(rank, size, count, dtype)


def check_repeated_collectives(rank, size, count, dtype):
    parts = [(value(peer, (count,), torch.int64) % 2).to(dtype) for peer in range(size)]
    rows = [torch.stack([parts[(peer + other) % size] for other in range(size)]) for peer in range(size)]
    name = "MAX" if dtype is torch.bool else "SUM"
    op = getattr(dist.ReduceOp, name)
    for step in range(4):
        gathered, mine = torch.zeros(size * count, dtype=dtype), parts[rank].clone()
        if step == 3:
            mine = gathered[rank * count : (rank + 1) * count].copy_(mine)
        dist.all_gather_into_tensor(gathered, mine)
        assert torch.equal(gathered, torch.cat(parts))
        tensor = parts[rank].clone()
        dist.broadcast(tensor, size - 1)
        assert torch.equal(tensor, parts[size - 1])
        whole, part = rows[rank].clone(), torch.zeros(count, dtype=dtype)
        dist.all_to_all_single(gathered, whole.view(-1))
        assert torch.equal(gathered.view(size, count), torch.stack([rows[peer][rank] for peer in range(size)]))
        if step == 3:
            part = whole[rank]
        dist.reduce_scatter_tensor(part, whole, op)
        assert torch.equal(part, reduced([rows[peer][rank] for peer in range(size)], name))
        dist.all_reduce(tensor, op)
        assert torch.equal(tensor, reduced([parts[size - 1]] * size, name))


@in_group
def test_repeated_calls_of_lists_give_the_results_of_the_first_ones(rank, size):
    """Of tensors of several shapes, strided and with gradients, waited for at once or later."""
    for step in range(4):
        later = step % 2 == 1
        mine, lists = torch.full((3, 2), float(rank + step)), torch.zeros(size, 2, 3)
        targets = [one.t() if step == 2 else torch.zeros(3, 2, requires_grad=step == 3) for one in lists]
        expected = [torch.full((3, 2), float(member + step)) for member in range(size)]
        call = dist.all_gather(targets, mine, async_op=later)
        several = [torch.full((2, 2), float(rank)), torch.full((3,), 1.0), torch.full((), float(step))]
        if step == 2:
            several[0] = torch.full((2, 4), float(rank))[:, ::2]
        work = dist.group.WORLD.allreduce_coalesced(several)
        root = dist.gather(mine, [torch.zeros(3, 2) for _ in range(size)] if rank == 1 else None, 1, async_op=later)
        part = torch.zeros(3, 2)
        back = dist.scatter(part, expected if rank == 0 else None, 0, async_op=later)
        for waited in (back, work, root, call):
            if waited is not None:
                waited.wait()
        assert all(torch.equal(one, other) for one, other in zip(targets, expected, strict=True))
        assert torch.equal(part, expected[rank])
        sums = [float(sum(range(size))), float(size), float(step * size)]
        assert all(torch.equal(one, torch.full_like(one, sums[index])) for index, one in enumerate(several))
    dist.all_reduce_coalesced([torch.ones(3), torch.ones(2)])
    dist.all_reduce_coalesced([torch.ones(2), torch.ones(3)])
    with pytest.raises(HorovodInternalError, match=r"Mismatched .*rank 0 has .*rank 1 has"):  # both know theirs
        dist.all_reduce_coalesced([torch.ones(2 + (rank == 1)), torch.ones(2 + (rank != 1))])


@in_group
def test_threads_exchange_messages_of_all_lengths(rank, size):
    """Each thread has its own tag; messages fit into a ring or are longer, and arrive before or after their receive."""
    after, before, wrong = (rank + 1) % size, (rank - 1) % size, []

    def work(tag):
        for step in range(12):
            count = (1, 900, 100_000, 700_000)[(step + tag) % 4]
            sent = dist.isend(torch.full((count,), float(100 * tag + step)), after, tag=tag)
            found = torch.zeros(count)
            dist.recv(found, before, tag=tag)
            sent.wait()
            if not torch.equal(found, torch.full((count,), float(100 * tag + step))):
                wrong.append((tag, step))

    threads = [threading.Thread(target=work, args=(tag,)) for tag in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@in_group
def test_repeated_calls_in_flight_complete_in_order(rank, size):
    for step in range(5):
        tensors = [torch.full((count,), float(rank + step)) for count in (3, 70_000, 5, 400_000)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        gathered = torch.zeros(size * 7)
        works.append(dist.all_gather_into_tensor(gathered, torch.full((7,), float(rank)), async_op=True))
        if step % 2:
            behind = torch.ones(3)
            dist.all_reduce(behind)
            assert behind.tolist() == [float(size)] * 3
        while step == 4 and not all(work.is_completed() for work in works):
            time.sleep(0.001)
        for work in works[:: -1 if step % 2 else 1]:
            work.wait()
        for tensor in tensors:
            assert torch.equal(tensor, torch.full_like(tensor, sum(range(size)) + step * size))
        assert torch.equal(gathered, torch.arange(size).repeat_interleave(7).float())
    with pytest.raises(HorovodInternalError, match=r"Mismatched .*rank 0 has .*rank 1 has"):
        dist.all_reduce(torch.ones(5 if rank == 1 else 3), async_op=True).wait()
    future = dist.all_reduce(tensors[0].fill_(1.0), async_op=True).get_future()
    assert torch.equal(future.wait()[0], torch.full((3,), float(size)))


@in_group
def test_mismatched_repeated_collectives_are_errors_on_all_ranks(rank, size):
    for _ in range(3):
        dist.all_gather_into_tensor(torch.zeros(size * 2), torch.ones(2))
        dist.all_gather_into_tensor(torch.zeros(size * 3), torch.ones(3))
        dist.broadcast(torch.ones(2), 0)
        dist.broadcast(torch.ones(2), 1)
    count = 2 + (rank == 1)
    with pytest.raises(HorovodInternalError, match="ALLGATHER tensor shapes"):
        dist.all_gather_into_tensor(torch.zeros(size * count), torch.ones(count))
    with pytest.raises(HorovodInternalError, match=r"Mismatched .*root"):
        dist.broadcast(torch.ones(2), int(rank == 1))
    gathered = torch.zeros(size * 2)
    dist.all_gather_into_tensor(gathered, torch.ones(2))
    assert gathered.tolist() == [1.0] * (2 * size)


@in_group
def test_mismatches_are_errors_on_every_rank(rank, size):
    with pytest.raises(HorovodInternalError, match=r"Mismatched .*rank 0 has .*rank 1 has"):
        dist.all_reduce(torch.ones(2 + (rank == 1)))
    with pytest.raises(HorovodInternalError, match="Mismatched data types"):
        dist.all_reduce(torch.ones(2, dtype=torch.float64 if rank == 1 else torch.float32))
    with pytest.raises(HorovodInternalError, match="ALLGATHER tensor shapes"):
        dist.all_gather_into_tensor(torch.zeros(size * (2 + (rank == 1))), torch.ones(2 + (rank == 1)))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)  # the group is still usable
    assert tensor.tolist() == [float(size)] * 2


@in_group
def test_invalid_arguments_raise_errors_with_the_rank_and_the_remedy(rank, size):
    with pytest.raises(ValueError, match=r"cannot reduce torch.float32 by ReduceOp.BAND: convert the tensor"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
    with pytest.raises(ValueError, match=rf"rank {rank}: the output must have {size} times the input's elements"):
        dist.group.WORLD.all_gather_single(torch.zeros(3), torch.zeros(7))
    for dtype in (torch.uint16, torch.float8_e5m2):
        with pytest.raises(ValueError, match=rf"cannot reduce {dtype} by ReduceOp.SUM: convert the tensor"):
            dist.all_reduce(torch.ones(2).to(dtype))
    mine, wrong = torch.ones(1 + rank), [torch.zeros(1 + (member == 0)) for member in range(size)]
    with pytest.raises(ValueError, match=rf"all_gather on rank {rank}: the members sent \[1, 2.* but .* have \[2, 1"):
        dist.all_gather(wrong, mine)
    with pytest.raises(ValueError, match=rf"all_to_all on rank {rank}: the members sent .* but .* have \[2, 1"):
        dist.all_to_all(wrong, [mine] * size)
    if rank:
        dist.gather(mine)
    else:
        with pytest.raises(ValueError, match=r"gather on rank 0: the members sent \[1, 2.* but .* have \[2, 1"):
            dist.gather(mine, wrong)
    with pytest.raises(ValueError, match=r"on rank \d: input_split_sizes must be \d numbers whose sum is"):
        dist.all_to_all_single(torch.zeros(size), torch.zeros(size), [1] * size, [2] * size)
    with pytest.raises((ValueError, RuntimeError), match=r"rank"):
        dist.new_group([0, size + 3])


def test_groups_can_be_created_again(place):
    torch_backend.register()
    for number in range(3):
        dist.init_process_group("hora", store=place.store, rank=place.rank, world_size=place.size)
        tensor = torch.full((4,), float(number))
        dist.all_reduce(tensor)
        assert tensor.tolist() == [float(number * place.size)] * 4
        assert dist.get_backend() == "hora"
        dist.destroy_process_group()
        assert not dist.is_initialized()
    for _ in range(5):  # a rank that leaves at once does not disturb the others' init
        dist.init_process_group("hora", store=place.store, rank=place.rank, world_size=place.size)
        dist.destroy_process_group()


def reduce_ones(group, in_flight):
    work = dist.all_reduce(torch.ones(3), group=group, async_op=in_flight)
    if in_flight:
        work.wait()


# On the queue, on the path of repeated calls, and on that path when the late rank calls another collective first.
@pytest.mark.parametrize(
    ("repeats", "in_flight", "differs"), [(0, False, False), (3, False, False), (3, True, False), (3, False, True)]
)
def test_a_missing_rank_is_named_with_its_line(place, repeats, in_flight, differs):
    torch_backend.register()
    dist.init_process_group("hora", store=place.store, rank=place.rank, world_size=place.size)
    group = dist.new_group(list(range(place.size)), timeout=timedelta(seconds=1))
    for _ in range(repeats):
        dist.all_reduce(torch.ones(3), group=group)
    if place.rank == place.size - 1:
        gathered = torch.ones(place.size)
        work = dist.all_gather_into_tensor(gathered, torch.ones(1), group=group, async_op=True) if differs else None
        place.gather(None)
        if work is not None:
            with pytest.raises(HorovodInternalError, match="until the timeout"):
                work.wait()
    else:
        try:
            with pytest.raises(HorovodInternalError, match=rf"for rank\(s\) \[{place.size - 1}\].*rank_pool.py:\d+"):
                reduce_ones(group, in_flight)
            with pytest.raises(HorovodInternalError, match="cannot be used any more"):
                dist.all_reduce(torch.ones(3), group=group)
        finally:
            place.gather(None)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # the default group is still usable
    assert tensor.item() == place.size
    dist.barrier()
    dist.destroy_process_group()


@in_group
def test_a_repeated_barrier_waits_for_every_member(rank, size):
    """Later barriers need no negotiation; some are in flight together, or between other calls."""
    store = dist.distributed_c10d._get_default_store()
    for turn in range(20):
        if turn % 3 == 0:
            dist.all_reduce(torch.ones(3))
        store.add(f"arrived/{turn}", 1)
        if turn % 2:
            dist.barrier()
        else:
            for work in [dist.barrier(async_op=True) for _ in range(3)]:
                work.wait()
        assert store.add(f"arrived/{turn}", 0) == size


def test_a_forked_child_does_not_disturb_the_group(place):
    torch_backend.register()
    dist.init_process_group("hora", store=place.store, rank=place.rank, world_size=place.size)
    dist.barrier()
    child = os.fork()
    if not child:
        try:
            dist.all_reduce(torch.ones(1))
        except HorovodInternalError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == place.size
    dist.destroy_process_group()


@pytest.mark.ranks(1)
def test_a_group_of_one(place):
    torch_backend.register()
    dist.init_process_group("hora", store=place.store, rank=0, world_size=1)
    tensor = torch.arange(4.0)
    dist.all_reduce(tensor)
    output = torch.zeros(4)
    dist.reduce_scatter_tensor(output, tensor)
    dist.all_gather_into_tensor(output, tensor)
    assert output.tolist() == [0.0, 1.0, 2.0, 3.0]
    dist.barrier()
    dist.destroy_process_group()


@in_group
def test_messages_of_every_size_and_dtype(rank, size):
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in (0, 1, 1000, 3_000_001):
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64):
            data = torch.arange(count).remainder(7).add(rank).to(dtype)
            found = torch.zeros(count, dtype=dtype)
            works = [dist.isend(data, after), dist.irecv(found, before)]
            for work in works:  # all ranks wait for the send first, during which the receive makes progress
                work.wait()
            assert found.equal(torch.arange(count).remainder(7).add(before).to(dtype))
    strided = torch.zeros(6, 4)[:, ::2]
    if rank == 0:
        dist.send(torch.full((6, 2), 3.0), 1)
    if rank == 1:
        assert dist.recv(strided, 0) == 0
        assert strided.eq(3.0).all()


@in_group
def test_a_message_arrives_while_its_receiver_is_in_a_collective(rank, size):
    count = 3_000_000  # larger than the ring between two ranks
    for _ in range(3):
        found = torch.zeros(count)
        if rank == 0:
            work = dist.irecv(found, 1)
        if rank == 1:
            dist.send(torch.full((count,), 1.0), 0)
        dist.all_reduce(torch.ones(1))  # before the message on rank 0, after it on rank 1
        if rank == 0:
            work.wait()
            assert found.eq(1.0).all()


def send_in_vain(count, tag):
    data = torch.frombuffer(mmap.mmap(-1, 4 * count), dtype=torch.float32)  # reading it after it was freed crashes
    data.fill_(float(tag))
    with pytest.raises(HorovodInternalError, match=rf"rank\(s\) \[1\] to receive a message with tag {tag}"):
        dist.isend(data, 1, tag=tag).wait(timedelta(seconds=0.5))


@in_group
def test_a_message_that_timed_out_halfway_keeps_its_memory(rank, size):
    count = 3_000_000
    if rank == 0:
        send_in_vain(count, tag=5)
        send_in_vain(count, tag=6)
        gc.collect()
    dist.barrier()
    if rank == 1:
        found = torch.zeros(count)
        dist.recv(found, 0, tag=5)  # it was partly sent
        assert found.eq(5.0).all()
        dist.recv(found, 0, tag=7)  # the previous message was never begun
        assert found.eq(7.0).all()
    elif rank == 0:
        dist.send(torch.full((count,), 7.0), 1, tag=7)


@in_group
def test_tags_and_groups_keep_messages_apart(rank, size):
    group = dist.new_group([0, 1])
    if rank == 0:
        dist.send(torch.full((2,), 1.0), 1, tag=1)
        dist.send(torch.full((2,), 2.0), 1, tag=2)
        dist.send(torch.full((2,), 3.0), 1, group=group, tag=1)
        dist.send(torch.full((2,), 4.0), 1, tag=1)
    if rank == 1:
        found = torch.zeros(2)
        for expected, tag, of_group in ((3.0, 1, group), (2.0, 2, None), (1.0, 1, None), (4.0, 1, None)):
            dist.recv(found, 0, group=of_group, tag=tag)
            assert found.tolist() == [expected] * 2


@in_group
def test_messages_from_any_source(rank, size):
    if rank == 0:
        sources = set()
        for _ in range(size - 1):
            found = torch.zeros(3)
            source = dist.recv(found)
            assert found.tolist() == [float(source)] * 3
            sources.add(source)
        assert sources == set(range(1, size))
    else:
        dist.send(torch.full((3,), float(rank)), 0)


@in_group
def test_batches_of_messages(rank, size):
    found = [torch.zeros(200_000) for _ in range(size)]
    others = [r for r in range(size) if r != rank]
    operations = [dist.P2POp(dist.isend, torch.full((200_000,), float(rank)), r) for r in others]
    operations += [dist.P2POp(dist.irecv, found[r], r) for r in others]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert all(found[r].eq(r).all() for r in others)


@in_group
def test_a_message_of_another_size_is_an_error_with_both_sizes(rank, size):
    if rank == 0:
        dist.send(torch.ones(3), 1)
        dist.send(torch.ones(3), 1)
    if rank == 1:
        with pytest.raises(
            HorovodInternalError, match=r"rank 0 sent 12 bytes with tag 0, but rank 1 receives 20 bytes"
        ):
            dist.recv(torch.ones(5), 0)
        dist.recv(torch.ones(3), 0)
    with pytest.raises(ValueError, match="must be another member of the group"):
        dist.group.WORLD.send([torch.ones(1)], rank)


@in_group
def test_a_missing_message_names_its_sender(rank, size):
    group = dist.new_group(list(range(size)), timeout=timedelta(seconds=0.5))
    if rank == 0:
        with pytest.raises(HorovodInternalError, match=r"waited 0.5 s .* for rank\(s\) \[1\] to send .*rank 1 is at "):
            dist.recv(torch.ones(5), 1, group=group)
    dist.barrier()


@in_group
def test_a_monitored_barrier_names_the_missing_ranks(rank, size):
    group = dist.group.WORLD
    group.monitored_barrier(timedelta(seconds=30))
    if rank == size - 1:
        dist.barrier()
        return
    names = f"Rank {rank} successfully reached" if rank else f"Rank {size - 1} failed to pass"
    with pytest.raises(HorovodInternalError, match=names) as error:
        group.monitored_barrier(timedelta(seconds=1), wait_all_ranks=True)
    assert rank or "rank_pool.py" in str(error.value) or "test_process_group.py" in str(error.value)
    dist.barrier()


def test_gloo_is_replaced_on_request(place):
    torch_backend.register()
    torch_backend.replace_gloo()
    try:
        dist.init_process_group("gloo", store=place.store, rank=place.rank, world_size=place.size)
        assert type(dist.group.WORLD).__name__ == "HoraProcessGroup"
        assert dist.get_backend() == "gloo"
        dist.monitored_barrier(timeout=timedelta(seconds=30))
        dist.destroy_process_group()
    finally:
        c10d = dist.distributed_c10d
        c10d._new_process_group_helper = c10d._new_process_group_helper.of_torch
