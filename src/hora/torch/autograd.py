"""Autograd support for the blocking, out-of-place collectives of `ops`.

A collective becomes an autograd node only if an input requires a gradient. Forward requests do not depend on that,
because ranks may differ in it. Backward collectives are unnamed and differentiable themselves, so `create_graph=True`
works. Nodes save no tensors, so a graph can run backward repeatedly. Horovod's autograd classes are in
`hora.legacy.mpi_ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hora.engine.request import Kind, ReduceOp
from hora.torch.collective import Collective, Tensors, run


def differentiable(collective: Collective, tensors: Sequence[Tensor]) -> Tensors:
    """Run a collective out of place; gradients flow through it if an input requires them."""
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
        # Autograd requires integer outputs to be marked as having no gradient.
        ctx.mark_non_differentiable(*[t for t in outputs if not t.is_floating_point()])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *_GRADIENTS[ctx.collective.kind](ctx, grads)


def _of_allreduce(ctx: Any, grads: Tensors) -> Sequence[Tensor]:
    """Apply the same collective to the gradients."""
    return differentiable(ctx.collective._replace(name=None), grads)


def _of_allgather(ctx: Any, grads: Tensors) -> Sequence[Tensor]:
    """Average over all ranks and return this rank's rows."""
    gathered, process_set, num_rows = _average(ctx, grads), ctx.collective.process_set, [s[0] for s in ctx.shapes]
    mine = torch.tensor([num_rows], dtype=torch.int64, device="cpu")
    (counts,) = run(Collective(Kind.ALLGATHER, None, process_set), [mine])
    starts = counts[: process_set.rank()].sum(dim=0).tolist()
    return [t.narrow(0, first, n) for t, first, n in zip(gathered, starts, num_rows, strict=True)]


def _of_broadcast(ctx: Any, grads: Tensors) -> Sequence[Tensor]:
    """Average over all ranks; zero on every rank but the root."""
    (average,) = _average(ctx, grads)
    ranks, mine = ctx.collective.process_set.ranks, ctx.collective.process_set.rank()
    on_root = ranks is not None and ranks[mine] == ctx.collective.root_rank
    return [average if on_root else average * 0]


def _of_alltoall(ctx: Any, grads: Tensors) -> Sequence[Tensor]:
    """Send the rows back to the ranks that sent them."""
    back = ctx.collective._replace(name=None, splits=ctx.received.tolist())
    returned, _ = differentiable(back, grads[:1])
    # Rows beyond the sum of the splits were not sent; their gradient is zero.
    unsent = returned.new_zeros(ctx.shapes[0][0] - returned.shape[0], *returned.shape[1:])
    return [torch.cat([returned, unsent]) if len(unsent) else returned]


def _of_reducescatter(ctx: Any, grads: Tensors) -> Sequence[Tensor]:
    """Gather the gradients of all ranks and scale them."""
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
