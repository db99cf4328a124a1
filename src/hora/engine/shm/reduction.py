"""Reduction in shared memory: every member has a flat view of every member's data, which lies there already.

Member m reduces its `shared_slice` of all data in pieces that fit the cache. No copies in or out and no
synchronisation: the caller (`PersistentReduction`) makes sure that the data is there before and may be used
afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from hora.engine.shm.futex import LINE_BYTES
from hora.engine.shm.segment import aligned
from hora.engine.transport.arithmetic import Arithmetic
from hora.engine.transport.packing import copy

__all__ = ["Cut", "cut_slice", "reduce_everywhere", "reduce_slice", "shared_slice"]

# All members' pieces and the scratch stay in the second-level cache together.
_PIECE_BYTES = 262144

Tensors = Sequence[torch.Tensor]


def shared_slice(count: int, num_members: int, member: int) -> tuple[int, int]:
    """The part of `count` elements that `member` reduces: begin and end.

    Rounded to as many elements as a cache line has bytes, so that two members never write to one line.
    """
    share = aligned(-(-count // num_members), LINE_BYTES)
    return min(count, member * share), min(count, (member + 1) * share)


class Cut(NamedTuple):
    """All members' views of one piece of a slice, and which elements of the slice they are."""

    operands: list[torch.Tensor]
    begin: int
    end: int


def cut_slice(views: Tensors, member: int) -> list[Cut]:
    """The slice of `member` in pieces. Good for as long as the views are."""
    first = views[0]
    begin, end = shared_slice(first.numel(), len(views), member)
    most = _PIECE_BYTES // first.element_size()
    edges = [(low, min(end, low + most)) for low in range(begin, end, most)]
    return [Cut([view[low:high] for view in views], low - begin, high - begin) for low, high in edges]


def reduce_everywhere(cuts: Sequence[Cut], arithmetic: Arithmetic) -> None:
    """Reduce the own slice of all members' data and write the result into all of it."""
    for operands, scratch, _ in _prescaled(cuts, arithmetic):
        first = operands[0]
        arithmetic.reduce(operands, first, scratch)
        for other in operands[1:]:
            copy(first, other)


def reduce_slice(cuts: Sequence[Cut], arithmetic: Arithmetic, out: torch.Tensor) -> None:
    """Reduce the own slice of all members' data into `out`; the data keeps its prescaled values."""
    size = cuts[-1].end if cuts else 0
    assert out.numel() == size, f"a slice of {size} elements does not fit into {out.numel()}"
    for operands, scratch, cut in _prescaled(cuts, arithmetic):
        result = out if len(cuts) == 1 else out[cut.begin : cut.end]
        arithmetic.reduce(operands, result, scratch)


def _prescaled(cuts: Sequence[Cut], arithmetic: Arithmetic) -> Iterator[tuple[list[torch.Tensor], torch.Tensor, Cut]]:
    """All members' next piece, prescaled; scratch of its size; and the cut itself."""
    if not cuts:
        return
    whole = torch.empty_like(cuts[0].operands[0])  # no other is larger
    for cut in cuts:
        if arithmetic.prescales:
            for operand in cut.operands:
                arithmetic.prepare_(operand)
        count = cut.end - cut.begin
        yield cut.operands, whole if whole.numel() == count else whole[:count], cut
