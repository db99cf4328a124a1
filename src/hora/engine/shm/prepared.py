"""Prepared reductions: what the optimizer reduces in every step, in memory that the members of a set share.

Memory is shared once, reductions are bound to it once (`binding.Binding`), and afterwards a request costs little more than
its announcement, or nothing but a meeting at a `Gate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hora.engine.request import Kind, ReduceOp, Request, Signature, dtype_name
from hora.engine.shm.barrier import Gate
from hora.engine.shm.bound import Binding, reduce_at_gate
from hora.engine.shm.segment import Segment

if TYPE_CHECKING:
    from hora.engine.runtime import Runtime

__all__ = ["Prepared"]


class Prepared:
    """The prepared reductions of one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def bind(
        self,
        kind: Kind,
        places: Sequence[Sequence[torch.Tensor]],
        *,
        name: str,
        out: torch.Tensor | None = None,
        op: int = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set_id: int = 0,
        gate: Gate | None = None,
        ends_together: bool = False,
    ) -> Binding:
        """Prepare a reduction of shared memory. All members must have bound it before one submits it."""
        example = places[0][0]
        signature = Signature(
            int(kind),
            kind.name.lower(),
            name,
            (dtype_name(example.dtype),),
            ((example.numel(),),),
            int(op),
            float(prescale),
            float(postscale),
            extra=(1,),
        )
        binding = Binding(process_set_id, signature, places, out, gate, ends_together=ends_together)
        self._runtime.process_sets.queue(process_set_id).bindings[name] = binding
        return binding

    def unbind(self, binding: Binding) -> None:
        """Forget a bound reduction; its memory goes with the last view of it."""
        queue = self._runtime.process_sets.queue_or_none(binding.process_set_id)
        if queue is not None and binding.signature.name is not None:
            queue.bindings.pop(binding.signature.name, None)
            if binding.gate is not None:
                self.drop_gate(binding.gate, binding.process_set_id)

    def submit(self, binding: Binding, *, background: bool = True) -> int:
        """Put a bound reduction in flight; returns its handle."""
        queue = self._runtime.process_sets.queue(binding.process_set_id)
        mine = binding.places[binding.turn][queue.member]
        request = Request(binding.signature, (mine,), (mine if binding.out is None else binding.out,))
        return self._runtime.put_in_flight(queue, request, background=background)

    def gate(self, segment: Segment, offset: int, *, name: str, process_set_id: int = 0) -> Gate:
        """A place to wait for the other members, on shared memory that all of them use for it (collective)."""
        queue, config = self._runtime.process_sets.queue(process_set_id), self._runtime.config
        gate = Gate(
            segment,
            offset,
            member=queue.member,
            ranks=queue.ranks,
            name=name,
            # Unlike an agreed operation, this one has not begun: after a goodbye the others will not come any more.
            guard=self._runtime.status.check_open,
            warning_s=0.0 if config.stall_check_disable else config.stall_warning_s,
            shutdown_s=config.stall_shutdown_s if config.stall_shutdown_s >= config.stall_warning_s else 0.0,
            stalled=self._runtime.stalled,
        )
        queue.gates.append(gate)
        return gate

    def drop_gate(self, gate: Gate, process_set_id: int) -> None:
        """Forget a gate."""
        queue = self._runtime.process_sets.queue_or_none(process_set_id)
        if queue is not None and gate in queue.gates:
            queue.gates.remove(gate)

    def reduce_at_gate(self, binding: Binding) -> torch.Tensor:
        """Carry out a bound reduction that is direct or scattered, in the calling thread, without agreement."""
        self._runtime.status.check_open()
        queue, timeline = self._runtime.process_sets.queue(binding.process_set_id), self._runtime.timeline
        if timeline is None:
            return reduce_at_gate(binding, queue.member, queue.ranks)
        operation = binding.kind.name
        names = [f"{operation.lower()}.{binding.signature.name}"]
        timeline.arrived(names, operation, queue.member)
        timeline.agreed(names)
        timeline.begin(names, operation)
        timeline.begin(names, f"SHM_{operation}")
        result = reduce_at_gate(binding, queue.member, queue.ranks)
        timeline.end(names)
        timeline.end(names, [{"dtype": binding.signature.dtypes[0], "shape": str(list(binding.signature.shapes[0]))}])
        return result
