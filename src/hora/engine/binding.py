"""A binding: a reduction of the same shared memory, requested again and again under one name.

Every member's data lies in memory that all members have mapped, so it is reduced where it is (`reduce_shared`). What
never changes is put together once, by `Runtime.bind`; afterwards a request costs little more than its announcement. The
lane keeps the bindings of its set, because a rank that has joined takes part in reductions that it has not requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hora.engine.plan import Batch
from hora.engine.request import Kind, Request, Signature
from hora.engine.transport.base import Transport
from hora.engine.transport.shm import ShmTransport

__all__ = ["Binding", "reduce_bound"]


@dataclass(frozen=True, eq=False)
class Binding:
    """`views[m]` is member m's data. `out`: where this rank's slice of a reducescatter goes, None for an allreduce."""

    process_set_id: int
    signature: Signature
    views: Sequence[torch.Tensor]
    out: torch.Tensor | None


def reduce_bound(batch: Batch, request: Request | None, binding: Binding, transport: Transport, member: int) -> None:
    """Carry out a batch that consists of one bound request; None: this rank has joined and adds nothing."""
    assert isinstance(transport, ShmTransport), transport.name
    signature = batch.signature
    if request is None:
        binding.views[member].zero_()
    if batch.kind is Kind.REDUCESCATTER:
        assert binding.out is not None, signature.name
        transport.reduce_shared_slice(
            binding.views,
            binding.out,
            op=signature.op,
            prescale=signature.prescale,
            postscale=signature.postscale,
        )
    else:
        transport.reduce_shared(
            binding.views, op=signature.op, prescale=signature.prescale, postscale=signature.postscale
        )
