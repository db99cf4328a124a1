"""Reductions of data that lies in shared memory already: every member has a flat view of everybody's buffer.

Member m reduces its `shared_slice` of all buffers in pieces that fit the cache. No copies in or out and no
synchronisation: the caller (`ShmTransport`) makes sure that the data is there before and may be used
afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hora.engine.futex import LINE_BYTES
from hora.engine.segment import aligned
from hora.engine.transport.arithmetic import Reduction
from hora.engine.transport.stream import copy

__all__ = ["reduce_everywhere", "reduce_slice", "shared_slice"]

# All members' pieces and the scratch stay in the second-level cache together.
_PIECE_BYTES = 262144

Tensors = Sequence[torch.Tensor]


def shared_slice(count: int, num_members: int, member: int) -> tuple[int, int]:
    """The part of `count` elements that `member` reduces: begin and end.

    Rounded to as many elements as a cache line has bytes, so that two members never write to one line.
    """
    share = aligned(-(-count // num_members), LINE_BYTES)
    return min(count, member * share), min(count, (member + 1) * share)


def reduce_everywhere(views: Tensors, member: int, arithmetic: Reduction) -> None:
    """Reduce the own slice of `views[0]`, `views[1]`, … and write the result into all of them."""
    for operands, _, scratch in _pieces(views, member, arithmetic):
        first = operands[0]
        arithmetic.combine(operands, first, scratch)
        arithmetic.finish_(first)
        for other in operands[1:]:
            copy(first, other)


def reduce_slice(views: Tensors, member: int, arithmetic: Reduction, out: torch.Tensor) -> None:
    """Reduce the own slice of `views[0]`, `views[1]`, … into `out`; the views keep their prescaled values."""
    begin, end = shared_slice(views[0].numel(), len(views), member)
    assert out.numel() == end - begin, f"a slice of {end - begin} elements does not fit into {out.numel()}"
    for operands, low, scratch in _pieces(views, member, arithmetic):
        result = out[low - begin : low - begin + scratch.numel()]
        arithmetic.combine(operands, result, scratch)
        arithmetic.finish_(result)


def _pieces(
    views: Tensors, member: int, arithmetic: Reduction
) -> Iterator[tuple[list[torch.Tensor], int, torch.Tensor]]:
    """Everybody's next piece of the own slice, prescaled; where it begins; and scratch of its size."""
    begin, end = shared_slice(views[0].numel(), len(views), member)
    most = _PIECE_BYTES // arithmetic.dtype.itemsize
    scratch = torch.empty(min(most, end - begin), dtype=arithmetic.dtype)
    for low in range(begin, end, most):
        high = min(end, low + most)
        operands = [view[low:high] for view in views]
        for operand in operands:
            arithmetic.prepare_(operand)
        yield operands, low, scratch[: high - low]
