"""Execution of a batch on the transport of a process set with one member."""

from __future__ import annotations

import pytest
import torch

from hora.engine.execute import execute
from hora.engine.plan import Batch, Part
from hora.engine.request import Kind, Reduce, ReduceOp, Request, Signature
from hora.engine.transport.base import LocalTransport


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT], ids=lambda op: op.name)
def test_a_joined_rank_scales_only_its_own_tensors(op):
    """Of a fused batch, this rank submitted x before it joined; the others submitted y after that."""
    signature = Signature(Kind.ALLREDUCE, "allreduce", "x", ("float32",), ((2,),), Reduce(op, 0.5))
    x = torch.tensor([8.0, -2.0])
    parts = [Part(("allreduce", name), 0, [signature]) for name in ("y", "x")]
    request = Request(signature, [x], [x])
    execute(Batch(Kind.ALLREDUCE, signature, parts), {("allreduce", "x"): request}, LocalTransport(), 0, [0])
    assert x.tolist() == [4.0, -1.0]
