"""What the timeline says about a batch while it is carried out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hora.engine.plan import Batch
from hora.engine.request import Kind, ReduceOp, Signature, full_names
from hora.events import Timeline

__all__ = ["operation_name", "recorded"]


def operation_name(signature: Signature) -> str:
    """What the timeline calls an operation."""
    return "ADASUM" if signature.op == ReduceOp.ADASUM else Kind(signature.kind).name


@contextmanager
def recorded(timeline: Timeline, batch: Batch, transport_name: str) -> Iterator[None]:
    """Record the batch that the body carries out."""
    names, facts = [], []
    for part in batch.parts:
        signature = next(item for item in part.signatures if item is not None)
        every = full_names(*part.key, len(signature.dtypes))
        names.append(every[part.index] if every else part.key[0])
        dtype = signature.dtypes[part.index] if signature.dtypes else ""
        shape = str(list(signature.shapes[part.index])) if signature.shapes else "[]"
        facts.append({"dtype": dtype, "shape": shape})
    timeline.agreed(names)
    if batch.kind is Kind.BARRIER:
        yield
        return
    operation = operation_name(batch.signature)
    timeline.begin(names, operation)
    timeline.begin(names, f"{transport_name.upper()}_{'BCAST' if batch.kind is Kind.BROADCAST else operation}")
    yield
    timeline.end(names)
    timeline.end(names, facts)
