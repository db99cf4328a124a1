"""A binding: a reduction of the same shared memory, requested again and again under one name.

Every member's data lies in memory that all members have mapped, so it is reduced where it is. What never changes is put
together once, by `Prepared.bind`; afterwards a request costs little more than its announcement. That all members have
announced a request also says that all data is there, so nobody waits before reading it.

Three ways. *Sliced* allreduce: member m reduces slice m into everybody's data, and all wait for one another at the end.
*Direct* allreduce of little data: everybody reduces all of it into a private result; nobody waits, because the data of
the next request goes to a second place and the one after that is agreed on by members that are done with this one.
*Scatter*: everybody reduces its slice; the caller sees to it that nobody writes new data before all have read, or has
the request end together.
The last two need no order among requests, so a caller that would wait anyway can meet the others at a `Gate` instead.

The queue keeps the bindings of its set, because a rank that has joined takes part in what it has not requested.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hora.engine.plan import Part
from hora.engine.request import Kind, Request, Signature
from hora.engine.shm.barrier import Gate
from hora.engine.shm.reduction import Cut, cut_slice, reduce_everywhere, reduce_slice
from hora.engine.transport.arithmetic import reduction
from hora.engine.transport.base import Transport
from hora.engine.transport.threads import single_threaded
from hora.errors import HorovodInternalError

__all__ = ["Binding", "reduce_at_gate", "reduce_bound"]


class Binding:
    """`places[t][m]` is where member m puts its data in turn t; `out` is private, None for a sliced allreduce.

    `ends_together`: when a request is done here, all members have read the data.
    """

    __slots__ = ("_cuts", "_turn", "ends_together", "gate", "out", "places", "process_set_id", "scratch", "signature")

    def __init__(
        self,
        process_set_id: int,
        signature: Signature,
        places: Sequence[Sequence[torch.Tensor]],
        out: torch.Tensor | None,
        gate: Gate | None = None,
        *,
        ends_together: bool = False,
    ) -> None:
        self.gate = gate
        self.ends_together = ends_together or out is None
        self.process_set_id = process_set_id
        self.signature = signature
        self.places = places
        self.out = out
        self.scratch = torch.empty_like(out) if out is not None and len(places) > 1 else None
        self._turn = 0
        self._cuts: list[Cut] | None = None

    @property
    def turn(self) -> int:
        """The place for the data of the next request. At a gate, the number of those that came before: a rank that had
        joined knows it, although it did not take part."""
        return self.gate.num_passed % len(self.places) if self.gate is not None else self._turn

    def next_turn(self) -> None:
        self._turn = (self._turn + 1) % len(self.places)

    def cuts(self, member: int) -> list[Cut]:
        """The pieces of the member's slice, the same in every step: only direct reductions have several places."""
        if self._cuts is None:
            self._cuts = cut_slice(self.places[0], member)
        return self._cuts

    @property
    def kind(self) -> Kind:
        return Kind(self.signature.kind)


def reduce_bound(part: Part, request: Request | None, binding: Binding, transport: Transport, member: int) -> None:
    """Carry out one bound request, agreed on by all; None: this rank has joined and adds nothing."""
    signature, views, out = binding.signature, binding.places[binding.turn], binding.out
    arithmetic = reduction(signature.op, views[0].dtype, signature.prescale, signature.postscale, len(views))
    if request is None:
        views[member].zero_()
    if any(announced is None for announced in part.signatures):
        transport.barrier()  # who has joined has cleared its data just now
    with single_threaded():
        if binding.kind is Kind.REDUCESCATTER:
            assert out is not None, signature.name
            reduce_slice(binding.cuts(member), arithmetic, out)
        elif out is not None and binding.scratch is not None:
            arithmetic.combine(views, out, binding.scratch)
            arithmetic.finish_(out)
        else:
            reduce_everywhere(binding.cuts(member), arithmetic)
    if binding.ends_together:
        transport.barrier()
    binding.next_turn()


def reduce_at_gate(binding: Binding, member: int, ranks: Sequence[int]) -> torch.Tensor:
    """Carry out a direct or scattered reduction when all members have come to its gate. Returns the result."""
    signature, views, out = binding.signature, binding.places[binding.turn], binding.out
    assert binding.gate is not None, signature.name
    assert out is not None, signature.name
    absent = binding.gate.pass_through()
    arithmetic = reduction(signature.op, views[0].dtype, signature.prescale, signature.postscale, len(views))
    with single_threaded():
        if binding.kind is Kind.REDUCESCATTER:
            if absent:
                joined = ", ".join(str(ranks[peer]) for peer in absent)
                raise HorovodInternalError(
                    f"REDUCESCATTER is not supported with Join: rank(s) {joined} have joined already ({signature.name})"
                )
            reduce_slice(binding.cuts(member), arithmetic, out)
        else:
            assert binding.scratch is not None, signature.name
            operands = [torch.zeros_like(view) if peer in absent else view for peer, view in enumerate(views)]
            arithmetic.combine(operands if absent else views, out, binding.scratch)
            arithmetic.finish_(out)
    return out
