"""The engine's timeline events (`hora.events`): when requests came, and when their batches ran."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hora.engine.plan import Batch
from hora.engine.request import Key, Kind, Signature, full_names
from hora.events import Timeline

__all__ = ["Recorder"]


class Recorder:
    """The timeline of a runtime, while one is written. Rank 0 writes it; on the others `timeline` stays None."""

    def __init__(self, rank: int) -> None:
        self.timeline: Timeline | None = None
        self._rank = rank

    def start(self, path: str, *, mark_cycles: bool = False) -> None:
        """Begin to write a trace; a trace to another file ends."""
        if self._rank != 0 or (self.timeline is not None and self.timeline.path == path):
            return
        self.stop()
        self.timeline = Timeline(path, mark_cycles=mark_cycles)

    def stop(self) -> None:
        """Finish the trace, if one is written."""
        timeline, self.timeline = self.timeline, None
        if timeline is not None:
            timeline.close()

    def arrived(self, member: int, key: Key, signature: Signature) -> None:
        """A member has announced a request."""
        if self.timeline is not None:
            names = full_names(*key, max(len(signature.dtypes), 1))
            self.timeline.arrived(names, signature.kind_name, member)

    @contextmanager
    def batch(self, batch: Batch, transport_name: str) -> Iterator[None]:
        """Record the batch that the body executes."""
        timeline = self.timeline
        if timeline is None:
            yield
            return
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
        operation = batch.signature.kind_name
        timeline.begin(names, operation)
        timeline.begin(names, f"{transport_name.upper()}_{'BCAST' if batch.kind is Kind.BROADCAST else operation}")
        yield
        timeline.end(names)
        timeline.end(names, facts)
