"""The transport interface: carry out one agreed batch among the members of one process set.

The engine has already made sure that every member calls the same method with matching arguments. A transport moves and
reduces bytes, nothing else: names, readiness, errors between ranks and handles are the engine's business.

All tensors are flat (1-D), contiguous and of one dtype per call. "Member" means index within the process set, which is
not the global rank. Reductions combine members in the order 0, 1, 2, … for every element, whichever member computes it,
so that results are bit-identical on all ranks and do not depend on fusion or on how work is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from hora.engine.request import Reduce, ReduceOp
from hora.engine.transport.arithmetic import arithmetic_of

__all__ = ["AliveCheck", "LocalTransport", "Transport"]

# Raises HorovodInternalError when waiting has become pointless: a peer is dead, or the runtime was shut down.
AliveCheck = Callable[[], None]
Tensors = Sequence[torch.Tensor]


class Transport(Protocol):
    """One per process set and device type. Calls come from one thread at a time, in the same order on all members."""

    name: str

    def allreduce(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        """Reduce several tensors as one, not by Adasum. `outputs[i]` may be `inputs[i]`.

        Average divides by the number of members. What happens to the numbers is said in `arithmetic.py`.
        """

    def adasum(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        """Adasum, each tensor by itself, with the factors of `reduce`."""

    def allgather(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]]) -> None:
        """`outputs[i]` receives all members' `inputs[i]` in member order; `counts[i][m]` elements come from member
        m.
        """

    def broadcast(self, tensors: Tensors, root: int) -> None:
        """Copy the tensors of member `root` into those of all members, in place."""

    def alltoall(
        self, input: torch.Tensor, output: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        """Send `send_counts[m]` elements to member m; receive `receive_counts[m]` from member m, in member order."""

    def reducescatter(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]], reduce: Reduce) -> None:
        """Reduce, and keep the own part: member m gets `counts[i][m]` elements of tensor i, in member order."""

    def barrier(self) -> None:
        """Wait until every member has called."""

    def close(self) -> None:
        """Release what the transport holds. Called once; other members may be gone already."""


class LocalTransport:
    """The transport of a set with one member: nothing to move, only scaling. Works on any device."""

    name = "local"

    def allreduce(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        for source, out in zip(inputs, outputs, strict=True):
            if source.data_ptr() != out.data_ptr():
                out.copy_(source)
            if reduce.prescale != 1.0 or reduce.postscale != 1.0:
                arithmetic = arithmetic_of(reduce, out.dtype, 1)
                arithmetic.prepare_(out)
                arithmetic.reduce([out], out, out)

    def adasum(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        self.allreduce(inputs, outputs, reduce._replace(op=ReduceOp.SUM))

    def allgather(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]]) -> None:
        for source, out in zip(inputs, outputs, strict=True):
            out.copy_(source)

    def broadcast(self, tensors: Tensors, root: int) -> None:
        """The only member is the root."""

    def alltoall(
        self, input: torch.Tensor, output: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        output.copy_(input[: send_counts[0]])

    def reducescatter(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]], reduce: Reduce) -> None:
        self.allreduce(inputs, outputs, reduce)

    def barrier(self) -> None:
        """The only member is here."""

    def close(self) -> None:
        """Nothing is held."""
