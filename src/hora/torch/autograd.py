"""Gradients of the collectives: what the blocking, out-of-place fronts of `ops` run.

The plain collective is run when no gradient is wanted, and one autograd node otherwise. Both send the same requests
forward, because ranks may differ in whether their tensor requires a gradient. Backward collectives are unnamed. They
are differentiable again, so `create_graph=True` works, and nodes save no tensors, so one may be passed backward
repeatedly. Horovod's autograd classes are in `hora.legacy.mpi_ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hora.engine.request import Kind, ReduceOp
from hora.torch.collective import Collective, Tensors, run
from hora.torch.process_sets import ProcessSet

__all__ = ["differentiable"]


def differentiable(collective: Collective, tensors: Sequence[Tensor]) -> Tensors:
    """Run a collective out of place; gradients flow through it if a tensor requires them."""
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        outputs: Tensors = _DifferentiableCollective.apply(collective, *tensors)
        return outputs
    return run(collective, tensors)


class _DifferentiableCollective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collective: Collective, *tensors: Tensor) -> Tensors:
        outputs = run(collective, [tensor.detach() for tensor in tensors])
        ctx.collective, ctx.shapes = collective, [tensor.shape for tensor in tensors]
        if collective.kind is Kind.ALLTOALL:
            ctx.received = outputs[1]
        # Integer outputs have no gradient, and autograd wants to be told.
        ctx.mark_non_differentiable(*[t for t in outputs if not t.is_floating_point()])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *_GRADIENTS[ctx.collective.kind](ctx, grads)


def _of_allreduce(ctx: Any, grads: Tensors) -> Sequence[Tensor]:
    """The same collective."""
    return differentiable(ctx.collective._replace(name=None), grads)


def _of_allgather(ctx: Any, grads: Tensors) -> Sequence[Tensor]:
    """The average over all ranks, cut to the own rows."""
    return _my_rows(_average(ctx, grads), [shape[0] for shape in ctx.shapes], ctx.collective.process_set)


def _of_broadcast(ctx: Any, grads: Tensors) -> Sequence[Tensor]:
    """The average over all ranks, on the root only."""
    (average,) = _average(ctx, grads)
    ranks, mine = ctx.collective.process_set.ranks, ctx.collective.process_set.rank()
    on_root = ranks is not None and ranks[mine] == ctx.collective.root_rank
    return [average if on_root else average * 0]


def _of_alltoall(ctx: Any, grads: Tensors) -> Sequence[Tensor]:
    """The rows travel back the way they came."""
    back = ctx.collective._replace(name=None, splits=ctx.received.tolist())
    returned, _ = differentiable(back, grads[:1])
    # Rows beyond the sum of the splits were not sent, so nothing depends on them.
    unsent = returned.new_zeros(ctx.shapes[0][0] - returned.shape[0], *returned.shape[1:])
    return [torch.cat([returned, unsent]) if len(unsent) else returned]


def _of_reducescatter(ctx: Any, grads: Tensors) -> Sequence[Tensor]:
    """The gradients of all ranks, gathered and scaled."""
    collective: Collective = ctx.collective
    num_members = collective.process_set.size() or 1
    factor = collective.prescale * collective.postscale * (num_members if collective.op == ReduceOp.SUM else 1)
    gather = Collective(Kind.ALLGATHER, process_set=collective.process_set, grouped=collective.grouped)
    return differentiable(gather, [grad * factor for grad in grads])


_GRADIENTS: dict[Kind, Callable[[Any, Tensors], Sequence[Tensor]]] = {
    Kind.ALLREDUCE: _of_allreduce,
    Kind.ALLGATHER: _of_allgather,
    Kind.BROADCAST: _of_broadcast,
    Kind.ALLTOALL: _of_alltoall,
    Kind.REDUCESCATTER: _of_reducescatter,
}


def _average(ctx: Any, grads: Tensors) -> Tensors:
    of: Collective = ctx.collective
    return differentiable(Collective(Kind.ALLREDUCE, None, of.process_set, ReduceOp.AVERAGE, grouped=of.grouped), grads)


def _my_rows(gathered: Sequence[Tensor], num_rows: list[int], process_set: ProcessSet) -> list[Tensor]:
    """The rows of each gathered tensor that came from this rank. Collective: gathers the row counts."""
    mine = process_set.rank()
    assert mine is not None
    (counts,) = run(
        Collective(Kind.ALLGATHER, None, process_set), [torch.tensor([num_rows], dtype=torch.int64, device="cpu")]
    )
    starts = counts[:mine].sum(dim=0).tolist()
    return [t.narrow(0, first, n) for t, first, n in zip(gathered, starts, num_rows, strict=True)]
