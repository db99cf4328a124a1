"""Autograd support for the blocking, out-of-place collectives of `ops`.

A collective becomes an autograd node only if an input requires a gradient. Forward requests do not depend on that,
because ranks may differ in it. Backward collectives are unnamed and differentiable themselves, so `create_graph=True`
works. Nodes save no tensors, so a graph can run backward repeatedly. Horovod's autograd classes are in
`hora.legacy.mpi_ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import index
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
        # Numbers as they are now: backward runs later, and the user may change tensors in between.
        now: dict[str, Any] = {"op": index(collective.op)}
        now |= {name: float(getattr(collective, name)) for name in ("prescale", "postscale")}
        if collective.kind is Kind.ALLTOALL:
            now["splits"] = outputs[1].tolist()  # backward sends the rows back to the ranks that sent them
        ctx.collective, ctx.shapes = collective._replace(name=None, **now), [tensor.shape for tensor in tensors]
        # Autograd requires integer outputs to be marked as having no gradient.
        ctx.mark_non_differentiable(*[t for t in outputs if not t.is_floating_point()])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grads, shapes = grads[: len(ctx.shapes)], ctx.shapes
        # For the integers and masks of a group autograd passes zeros of their dtype: they have no gradient.
        real = [grad.is_floating_point() for grad in grads]
        found = iter(_gradients(ctx.collective, list(compress(grads, real)), list(compress(shapes, real))))
        return None, *(next(found) if is_real else None for is_real in real)


def _gradients(of: Collective, grads: Sequence[Tensor], shapes: Sequence[torch.Size]) -> Sequence[Tensor]:
    """Return the gradients of a collective's inputs of these shapes (collective)."""
    if of.kind is Kind.ALLREDUCE:
        return differentiable(of, grads)
    if of.kind is Kind.REDUCESCATTER:
        num_members = of.process_set.size() or 1
        factor = of.prescale * of.postscale * (num_members if of.op == ReduceOp.SUM else 1)
        gather = Collective(Kind.ALLGATHER, process_set=of.process_set, grouped=of.grouped)
        return differentiable(gather, [grad * factor for grad in grads])
    if of.kind is Kind.ALLTOALL:
        returned, _ = differentiable(of, grads)
        # Rows beyond the sum of the splits were not sent; their gradient is zero.
        unsent = returned.new_zeros(shapes[0][0] - returned.shape[0], *returned.shape[1:])
        return [torch.cat([returned, unsent]) if len(unsent) else returned]
    average = Collective(Kind.ALLREDUCE, None, of.process_set, ReduceOp.AVERAGE, grouped=of.grouped)
    averages, mine = differentiable(average, grads), of.process_set.rank()
    if of.kind is Kind.BROADCAST:  # zero on every rank but the root
        members = of.process_set.ranks
        on_root = members is not None and mine is not None and members[mine] == of.root_rank
        return [averages[0] if on_root else averages[0] * 0]
    # Of an allgather: this rank's rows.
    num_rows = [shape[0] for shape in shapes]
    rows = torch.tensor([num_rows], dtype=torch.int64, device="cpu")
    (counts,) = run(Collective(Kind.ALLGATHER, None, of.process_set), [rows])
    starts = counts[:mine].sum(dim=0).tolist()
    return [t.narrow(0, first, n) for t, first, n in zip(averages, starts, num_rows, strict=True)]
