"""Every collective of a process group in one table: how it is called, what it writes, and what it should write.

A builder takes the group, its global ranks in member order, this rank's place among them and a number of elements, and
returns a `Call`. Ranks that build a call with different numbers of elements disagree about it.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

warnings.filterwarnings("ignore", category=FutureWarning)  # names that later versions of torch replace


class Call(NamedTuple):
    """`start(async_op)` returns the work, or None if it blocks. `outputs` should become `expected`."""

    start: Callable[[bool], Any]
    outputs: list[Tensor]
    expected: list[Tensor]


Builder = Callable[[Any, list[int], int, int], Call]


def data(rank: int, count: int) -> Tensor:
    """Return what a rank contributes, which every other rank can compute."""
    return (torch.arange(count) % 7 + 10 * (rank + 1)).float()


def total(ranks: list[int], count: int) -> Tensor:
    return sum(data(rank, count) for rank in ranks)


def all_reduce(group, ranks, me, n):
    out = data(ranks[me], n)
    return Call(lambda later: dist.all_reduce(out, group=group, async_op=later), [out], [total(ranks, n)])


def all_reduce_of_bits(group, ranks, me, n):
    out, all_bits = torch.full((n,), 1 << me), (1 << len(ranks)) - 1
    return Call(
        lambda later: dist.all_reduce(out, dist.ReduceOp.BOR, group=group, async_op=later),
        [out],
        [torch.full((n,), all_bits)],
    )


def all_reduce_strided(group, ranks, me, n):
    out = torch.zeros(n, 2)[:, 0].copy_(data(ranks[me], n))
    return Call(lambda later: dist.all_reduce(out, group=group, async_op=later), [out], [total(ranks, n)])


def all_reduce_sparse(group, ranks, me, n):
    out = torch.sparse_coo_tensor(torch.tensor([[me, n]]), torch.ones(2), (n + 1,), check_invariants=True)
    expected = torch.zeros(n + 1)
    expected[: len(ranks)], expected[n] = 1.0, len(ranks)
    return Call(lambda later: dist.all_reduce(out, group=group, async_op=later), [out], [expected])


def all_reduce_coalesced(group, ranks, me, n):
    out = [data(ranks[me], n), data(ranks[me], 2 * n).view(2, n), data(ranks[me], 3).double()]
    return Call(
        lambda later: group_work(group.allreduce_coalesced(out), later),
        out,
        [total(ranks, n), total(ranks, 2 * n).view(2, n), total(ranks, 3).double()],
    )


def broadcast(group, ranks, me, n):
    out = data(ranks[me], n)
    return Call(lambda later: dist.broadcast(out, ranks[-1], group=group, async_op=later), [out], [data(ranks[-1], n)])


def reduce(group, ranks, me, n):
    out = data(ranks[me], n)
    expected = total(ranks, n) if me == 0 else out.clone()
    return Call(lambda later: dist.reduce(out, ranks[0], group=group, async_op=later), [out], [expected])


def all_gather(group, ranks, me, n):
    out = [torch.zeros(n) for _ in ranks]
    return Call(
        lambda later: dist.all_gather(out, data(ranks[me], n), group=group, async_op=later),
        out,
        [data(rank, n) for rank in ranks],
    )


def all_gather_uneven(group, ranks, me, n):
    out = [torch.zeros(n + member) for member in range(len(ranks))]
    return Call(
        lambda later: dist.all_gather(out, data(ranks[me], n + me), group=group, async_op=later),
        out,
        [data(rank, n + member) for member, rank in enumerate(ranks)],
    )


def all_gather_coalesced(group, ranks, me, n):
    out = [[torch.zeros(n), torch.zeros(2 * n)] for _ in ranks]
    mine = [data(ranks[me], n), data(ranks[me], 2 * n)]
    return Call(
        lambda later: group_work(group.allgather_coalesced(out, mine), later),
        [*itertools.chain(*out)],
        [data(rank, count) for rank in ranks for count in (n, 2 * n)],
    )


def all_gather_into_tensor(group, ranks, me, n):
    out = torch.zeros(len(ranks) * n)
    return Call(
        lambda later: dist.all_gather_into_tensor(out, data(ranks[me], n), group=group, async_op=later),
        [out],
        [torch.cat([data(rank, n) for rank in ranks])],
    )


def all_gather_into_tensors(group, ranks, me, n):
    out = [torch.zeros(len(ranks) * n), torch.zeros(len(ranks), 2 * n)]
    mine = [data(ranks[me], n), data(ranks[me], 2 * n)]
    expected = [torch.cat([data(rank, n) for rank in ranks]), torch.stack([data(rank, 2 * n) for rank in ranks])]
    return Call(lambda later: group_work(group.allgather_into_tensor_coalesced(out, mine), later), out, expected)


def gather(group, ranks, me, n):
    out = [torch.zeros(n) for _ in ranks] if me == 0 else []
    return Call(
        lambda later: dist.gather(data(ranks[me], n), out or None, ranks[0], group=group, async_op=later),
        out,
        [data(rank, n) for rank in ranks] if me == 0 else [],
    )


def scatter(group, ranks, me, n):
    out, root = torch.zeros(n), len(ranks) - 1
    parts = [data(rank, n) for rank in ranks] if me == root else None
    return Call(
        lambda later: dist.scatter(out, parts, ranks[root], group=group, async_op=later), [out], [data(ranks[me], n)]
    )


def _rows(rank: int, ranks: list[int], n: int) -> Tensor:
    return data(rank, len(ranks) * n).view(len(ranks), n)


def reduce_scatter(group, ranks, me, n):
    out, mine = torch.zeros(n), list(_rows(ranks[me], ranks, n))
    return Call(
        lambda later: dist.reduce_scatter(out, mine, group=group, async_op=later),
        [out],
        [sum(_rows(rank, ranks, n) for rank in ranks)[me]],
    )


def reduce_scatter_uneven(group, ranks, me, n):
    out, mine = torch.zeros(n + me), [data(ranks[me], n + member) for member in range(len(ranks))]
    return Call(
        lambda later: dist.reduce_scatter(out, mine, group=group, async_op=later), [out], [total(ranks, n + me)]
    )


def reduce_scatter_tensor(group, ranks, me, n):
    out = torch.zeros(n)
    return Call(
        lambda later: dist.reduce_scatter_tensor(out, _rows(ranks[me], ranks, n), group=group, async_op=later),
        [out],
        [sum(_rows(rank, ranks, n) for rank in ranks)[me]],
    )


def reduce_scatter_in_place(group, ranks, me, n):
    mine = _rows(ranks[me], ranks, n).clone()
    return Call(
        lambda later: dist.reduce_scatter_tensor(mine[me], mine, group=group, async_op=later),
        [mine[me]],
        [sum(_rows(rank, ranks, n) for rank in ranks)[me]],
    )


def reduce_scatter_of_largest(group, ranks, me, n):
    out, op = torch.zeros(n), dist.ReduceOp.MAX
    return Call(
        lambda later: dist.reduce_scatter_tensor(out, _rows(ranks[me], ranks, n), op, group, later),
        [out],
        [_rows(max(ranks), ranks, n)[me]],
    )


def reduce_scatter_tensors(group, ranks, me, n):
    out = [torch.zeros(n), torch.zeros(2 * n)]
    mine = [_rows(ranks[me], ranks, n), _rows(ranks[me], ranks, 2 * n)]
    return Call(
        lambda later: group_work(group.reduce_scatter_tensor_coalesced(out, mine), later),
        out,
        [sum(_rows(rank, ranks, count) for rank in ranks)[me] for count in (n, 2 * n)],
    )


def all_to_all_single(group, ranks, me, n):
    out, mine = torch.zeros(len(ranks), n), _rows(ranks[me], ranks, n)
    return Call(
        lambda later: dist.all_to_all_single(out, mine, group=group, async_op=later),
        [out],
        [torch.stack([_rows(rank, ranks, n)[me] for rank in ranks])],
    )


def all_to_all_single_with_splits(group, ranks, me, n):
    sent, received = [n + member for member in range(len(ranks))], [n + me] * len(ranks)
    out, mine = torch.zeros(sum(received)), data(ranks[me], sum(sent))
    return Call(
        lambda later: dist.all_to_all_single(out, mine, received, sent, group=group, async_op=later),
        [out],
        [torch.cat([data(rank, sum(sent)).split(sent)[me] for rank in ranks])],
    )


def all_to_all(group, ranks, me, n):
    out, mine = [torch.zeros(n) for _ in ranks], list(_rows(ranks[me], ranks, n))
    return Call(
        lambda later: dist.all_to_all(out, mine, group=group, async_op=later),
        out,
        [_rows(rank, ranks, n)[me] for rank in ranks],
    )


def barrier(group, ranks, me, n):
    return Call(lambda later: dist.barrier(group=group, async_op=later), [], [])


def _message(out: Tensor, group: Any, ranks: list[int], me: int, n: int) -> Call:
    """A message from the member before this one, to which each sends its own."""
    before, after = ranks[me - 1], ranks[(me + 1) % len(ranks)]
    sent = []

    def start(later):
        sent.append(dist.isend(data(ranks[me], n), after, group=group))
        work = dist.irecv(out, before, group=group)
        return group_work(work, later)

    return Call(start, [out], [data(before, n)])


def message(group, ranks, me, n):
    return _message(torch.zeros(n), group, ranks, me, n)


def message_strided(group, ranks, me, n):
    return _message(torch.zeros(n, 2)[:, 1], group, ranks, me, n)


def group_work(work: Any, later: bool) -> Any:
    """Return a work that torch's function would wait for unless `later`."""
    return work if later else work.wait() and None


CALLS: dict[str, Builder] = {
    build.__name__: build
    for build in (
        *(
            all_reduce,
            all_reduce_of_bits,
            all_reduce_strided,
            all_reduce_sparse,
            all_reduce_coalesced,
            broadcast,
            reduce,
        ),
        *(all_gather, all_gather_uneven, all_gather_coalesced, all_gather_into_tensor, all_gather_into_tensors),
        *(gather, scatter, reduce_scatter, reduce_scatter_uneven, reduce_scatter_tensor, reduce_scatter_in_place),
        *(reduce_scatter_of_largest, reduce_scatter_tensors, all_to_all_single, all_to_all_single_with_splits),
        *(all_to_all, barrier, message, message_strided),
    )
}


# Called by torch's C++: each takes the group, its ranks, this rank's place and a number of elements, and returns the
# unfinished tensors and what they should become.
def _functional_all_reduce(group, ranks, me, n):
    return [functional.all_reduce(data(ranks[me], n), "sum", group)], [total(ranks, n)]


def _functional_all_reduce_coalesced(group, ranks, me, n):
    mine = [data(ranks[me], n), data(ranks[me], 2 * n)]
    return functional.all_reduce_coalesced(mine, "sum", group), [total(ranks, n), total(ranks, 2 * n)]


def _functional_all_gather(group, ranks, me, n):
    mine = data(ranks[me], n)
    return [functional.all_gather_tensor(mine, 0, group)], [torch.cat([data(rank, n) for rank in ranks])]


def _functional_all_gather_coalesced(group, ranks, me, n):
    mine = [data(ranks[me], n), data(ranks[me], 2 * n)]
    expected = [torch.cat([data(rank, count) for rank in ranks]) for count in (n, 2 * n)]
    return functional.all_gather_into_tensor_coalesced(mine, group), expected


def _functional_reduce_scatter(group, ranks, me, n):
    found = functional.reduce_scatter_tensor(_rows(ranks[me], ranks, n), "sum", 0, group)
    return [found], [sum(_rows(rank, ranks, n) for rank in ranks)[me : me + 1]]


def _functional_reduce_scatter_coalesced(group, ranks, me, n):
    mine = [_rows(ranks[me], ranks, n), _rows(ranks[me], ranks, 2 * n)]
    found = functional.reduce_scatter_tensor_coalesced(mine, "sum", [0, 0], group)
    return found, [sum(_rows(rank, ranks, count) for rank in ranks)[me : me + 1] for count in (n, 2 * n)]


def _functional_all_to_all(group, ranks, me, n):
    found = functional.all_to_all_single(_rows(ranks[me], ranks, n), None, None, group)
    return [found], [torch.stack([_rows(rank, ranks, n)[me] for rank in ranks])]


def _functional_broadcast(group, ranks, me, n):
    return [functional.broadcast(data(ranks[me], n), 1, group)], [data(ranks[1], n)]


FUNCTIONAL = {
    call.__name__.removeprefix("_functional_"): call
    for call in (
        *(_functional_all_reduce, _functional_all_reduce_coalesced, _functional_all_gather),
        *(_functional_all_gather_coalesced, _functional_reduce_scatter, _functional_reduce_scatter_coalesced),
        *(_functional_all_to_all, _functional_broadcast),
    )
}


def assert_written(name: str, outputs: list[Tensor], expected: list[Tensor]) -> None:
    assert written(outputs, expected), (name, outputs, expected)


def written(outputs: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(outputs, expected, strict=True)
    return all(torch.equal(found.to_dense() if found.is_sparse else found, wanted) for found, wanted in pairs)
