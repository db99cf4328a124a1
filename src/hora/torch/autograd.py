"""The differentiable collectives: blocking, out of place, without compression. `ops` has the public forms.

Each function runs the plain collective when no gradient is wanted, and an autograd class otherwise. Both
send the same requests forward, because ranks may differ in whether their tensor requires a gradient.
Backward collectives are unnamed. They call the differentiable functions again, so `create_graph=True`
works, and keep no saved tensors, so a node may be passed backward repeatedly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hora.engine.request import Kind, ReduceOp
from hora.torch.process_sets import ProcessSet
from hora.torch.reduce_op import handle_average_backwards_compatibility
from hora.torch.submission import run

__all__ = [
    "HorovodAllgather",
    "HorovodAllreduce",
    "HorovodAlltoall",
    "HorovodBroadcast",
    "HorovodGroupedAllgather",
    "HorovodGroupedAllreduce",
    "HorovodGroupedReducescatter",
    "HorovodReducescatter",
]

Tensors = tuple[Tensor, ...]


def _wants_grad(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def _numbers_only(ctx: Any, outputs: Tensors) -> Tensors:
    """Integer outputs have no gradient, and autograd wants to be told."""
    ctx.mark_non_differentiable(*[t for t in outputs if not t.is_floating_point()])
    return outputs


class HorovodAllreduce(torch.autograd.Function):
    """`apply(tensor, average, name, op, prescale_factor, postscale_factor, process_set)`."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
    ) -> Tensor:
        op = handle_average_backwards_compatibility(op, average)
        ctx.settings = (op, prescale, postscale, process_set)
        return allreduce(tensor.detach(), name, op, prescale, postscale, process_set)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return allreduce(grads[0], None, *ctx.settings), None, None, None, None, None, None


def allreduce(
    tensor: Tensor, name: str | None, op: int, prescale: float, postscale: float, process_set: ProcessSet
) -> Tensor:
    """Reduce; the gradient is the same collective."""
    if _wants_grad([tensor]):
        return HorovodAllreduce.apply(tensor, None, name, op, prescale, postscale, process_set)
    return run(
        Kind.ALLREDUCE,
        [tensor],
        name=name,
        op=op,
        prescale=prescale,
        postscale=postscale,
        process_set=process_set,
    )


class HorovodGroupedAllreduce(torch.autograd.Function):
    """`apply(average, name, op, prescale_factor, postscale_factor, process_set, *tensors)`."""

    @staticmethod
    def forward(
        ctx: Any,
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> Tensors:
        op = handle_average_backwards_compatibility(op, average)
        ctx.settings = (op, prescale, postscale, process_set)
        detached = [t.detach() for t in tensors]
        return _numbers_only(ctx, grouped_allreduce(detached, name, op, prescale, postscale, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, None, None, None, *grouped_allreduce(grads, None, *ctx.settings)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Tensors:
    """Reduce several tensors together."""
    if _wants_grad(tensors):
        return HorovodGroupedAllreduce.apply(None, name, op, prescale, postscale, process_set, *tensors)
    return run(
        Kind.ALLREDUCE,
        tensors,
        grouped=True,
        name=name,
        op=op,
        prescale=prescale,
        postscale=postscale,
        process_set=process_set,
    )


class HorovodAllgather(torch.autograd.Function):
    """`apply(tensor, name, process_set)`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.num_rows, ctx.process_set = tensor.shape[:1], process_set
        return allgather(tensor.detach(), name, process_set)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        reduced = allreduce(grads[0], None, ReduceOp.AVERAGE, 1.0, 1.0, ctx.process_set)
        return _my_rows([reduced], list(ctx.num_rows), ctx.process_set)[0], None, None


def allgather(tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:
    """Concatenate; the gradient is the average of everybody's, cut to the own rows."""
    if _wants_grad([tensor]):
        return HorovodAllgather.apply(tensor, name, process_set)
    return run(Kind.ALLGATHER, [tensor], name=name, process_set=process_set)


class HorovodGroupedAllgather(torch.autograd.Function):
    """`apply(name, process_set, *tensors)`."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> Tensors:
        ctx.num_rows, ctx.process_set = [t.shape[0] for t in tensors if t.dim()], process_set
        return _numbers_only(ctx, grouped_allgather([t.detach() for t in tensors], name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        reduced = grouped_allreduce(grads, None, ReduceOp.AVERAGE, 1.0, 1.0, ctx.process_set)
        return None, None, *_my_rows(reduced, ctx.num_rows, ctx.process_set)


def grouped_allgather(tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet) -> Tensors:
    """Concatenate several tensors together."""
    if _wants_grad(tensors):
        return HorovodGroupedAllgather.apply(name, process_set, *tensors)
    return run(Kind.ALLGATHER, tensors, grouped=True, name=name, process_set=process_set)


def _my_rows(gathered: Sequence[Tensor], num_rows: list[int], process_set: ProcessSet) -> list[Tensor]:
    """The rows of each gathered tensor that came from this rank. Collective: gathers the row counts."""
    mine = process_set.rank()
    assert mine is not None
    counts = allgather(torch.tensor([num_rows], dtype=torch.int64), None, process_set)
    starts = counts[:mine].sum(dim=0).tolist()
    return [t.narrow(0, first, n) for t, first, n in zip(gathered, starts, num_rows, strict=True)]


class HorovodBroadcast(torch.autograd.Function):
    """`apply(tensor, root_rank, name, process_set)`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return broadcast(tensor.detach(), root_rank, name, process_set)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        reduced = allreduce(grads[0], None, ReduceOp.AVERAGE, 1.0, 1.0, ctx.process_set)
        ranks, mine = ctx.process_set.ranks, ctx.process_set.rank()
        on_root = ranks is not None and ranks[mine] == ctx.root_rank
        return reduced if on_root else reduced * 0, None, None, None


def broadcast(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
    """Root's tensor on all; the gradient is the average of everybody's, on root only."""
    if _wants_grad([tensor]):
        return HorovodBroadcast.apply(tensor, root_rank, name, process_set)
    return run(Kind.BROADCAST, [tensor], name=name, root_rank=root_rank, process_set=process_set)


class HorovodAlltoall(torch.autograd.Function):
    """`apply(tensor, splits, name, process_set)`; gives `(output, received_splits)`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Tensors:
        output, received = alltoall(tensor.detach(), splits, name, process_set)
        ctx.num_rows, ctx.received, ctx.process_set = tensor.shape[0], received, process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        returned, _ = alltoall(grads[0], ctx.received.tolist(), None, ctx.process_set)
        # Rows beyond the sum of the splits were not sent, so nothing depends on them.
        unsent = returned.new_zeros(ctx.num_rows - returned.shape[0], *returned.shape[1:])
        return torch.cat([returned, unsent]) if len(unsent) else returned, None, None, None


def alltoall(tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> tuple[Tensor, Tensor]:
    """Exchange rows; the gradient travels back the way the rows came. `splits` is a list of ints or None."""
    if _wants_grad([tensor]):
        return HorovodAlltoall.apply(tensor, splits, name, process_set)
    return run(Kind.ALLTOALL, [tensor], name=name, splits=splits, process_set=process_set)


class HorovodReducescatter(torch.autograd.Function):
    """`apply(tensor, name, op, process_set, prescale_factor, postscale_factor)`."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale: float,
        postscale: float,
    ) -> Tensor:
        ctx.process_set, ctx.factor = process_set, _scatter_factor(op, process_set, prescale, postscale)
        return reducescatter(tensor.detach(), name, op, process_set, prescale, postscale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return allgather(grads[0] * ctx.factor, None, ctx.process_set), None, None, None, None, None


def reducescatter(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet, prescale: float, postscale: float
) -> Tensor:
    """Reduce and keep the own rows; the gradient is everybody's, gathered and scaled."""
    if _wants_grad([tensor]):
        return HorovodReducescatter.apply(tensor, name, op, process_set, prescale, postscale)
    return run(
        Kind.REDUCESCATTER,
        [tensor],
        name=name,
        op=op,
        prescale=prescale,
        postscale=postscale,
        process_set=process_set,
    )


class HorovodGroupedReducescatter(torch.autograd.Function):
    """`apply(name, op, process_set, prescale_factor, postscale_factor, *tensors)`."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale: float,
        postscale: float,
        *tensors: Tensor,
    ) -> Tensors:
        ctx.process_set, ctx.factor = process_set, _scatter_factor(op, process_set, prescale, postscale)
        detached = [t.detach() for t in tensors]
        return _numbers_only(ctx, grouped_reducescatter(detached, name, op, process_set, prescale, postscale))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        scaled = [grad * ctx.factor for grad in grads]
        return None, None, None, None, None, *grouped_allgather(scaled, None, ctx.process_set)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
) -> Tensors:
    """Reduce several tensors together and keep the own rows of each."""
    if _wants_grad(tensors):
        return HorovodGroupedReducescatter.apply(name, op, process_set, prescale, postscale, *tensors)
    return run(
        Kind.REDUCESCATTER,
        tensors,
        grouped=True,
        name=name,
        op=op,
        prescale=prescale,
        postscale=postscale,
        process_set=process_set,
    )


def _scatter_factor(op: int, process_set: ProcessSet, prescale: float, postscale: float) -> float:
    num_members = process_set.size() or 1
    return prescale * postscale * (num_members if op == ReduceOp.SUM else 1)
