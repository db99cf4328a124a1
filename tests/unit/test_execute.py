"""Executing a batch, on the transport of a set with one member."""

from __future__ import annotations

import pytest
import torch

from hora.engine.execute import execute
from hora.engine.plan import Batch, Part
from hora.engine.request import Kind, ReduceOp, Request, Signature
from hora.engine.transport.base import LocalTransport


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT], ids=lambda op: op.name)
def test_only_what_this_rank_has_is_scaled_where_it_has_joined_half_way(op):
    """Of a fused batch this rank knows x, submitted before it joined, and not y, which the others submitted later."""
    signature = Signature(Kind.ALLREDUCE, "allreduce", "x", ("float32",), ((2,),), op=op, prescale=0.5)
    x = torch.tensor([8.0, -2.0])
    parts = [Part(("allreduce", name), 0, [signature]) for name in ("y", "x")]
    request = Request(signature, [x], [x])
    execute(Batch(Kind.ALLREDUCE, signature, parts), {("allreduce", "x"): request}, LocalTransport(), 0, [0])
    assert x.tolist() == [4.0, -1.0]
