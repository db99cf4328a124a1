"""The transport interface: executes one agreed batch among the members of one process set.

The engine makes sure that every member calls the same method with matching arguments. A transport only moves and
reduces bytes; the engine handles names, readiness, errors between ranks, and handles.

All tensors are flat (1-D), contiguous and of one dtype per call. "Member" is the index within the process set, not the
global rank. Reductions combine members in the order 0, 1, 2, … for every element, on any member, so that results are
bit-identical on all ranks and do not depend on fusion or on how work is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from hora.engine.request import Reduce, ReduceOp
from hora.engine.transport.arithmetic import arithmetic_of

# Raises HorovodInternalError if waiting has become pointless: a peer is dead, or the runtime was shut down.
AliveCheck = Callable[[], None]
Tensors = Sequence[torch.Tensor]


class Transport(Protocol):
    """One per process set and device type. Called from one thread at a time, in the same order on all members."""

    name: str

    def allreduce(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        """Reduce several tensors as one, not by Adasum. `outputs[i]` may be `inputs[i]`.

        Average divides by the number of members. `arithmetic.py` defines the computation.
        """

    def adasum(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        """Compute Adasum, each tensor separately, with the factors of `reduce`."""

    def allgather(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]]) -> None:
        """Gather all members' `inputs[i]` into `outputs[i]` in member order, `counts[i][m]` elements of member m."""

    def broadcast(self, tensors: Tensors, root: int) -> None:
        """Copy the tensors of member `root` to those of all members, in place."""

    def alltoall(
        self, input: torch.Tensor, output: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        """Send `send_counts[m]` elements to member m; receive `receive_counts[m]` from member m, in member order."""

    def reducescatter(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]], reduce: Reduce) -> None:
        """Reduce, and keep this member's part: member m gets `counts[i][m]` elements of tensor i, in member order."""

    def close(self) -> None:
        """Release all resources. Called once; other members may be gone already."""


class LocalTransport:
    """The transport of a set with one member: only scales, on any device."""

    name = "local"

    def allreduce(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        for source, out in zip(inputs, outputs, strict=True):
            if source.data_ptr() != out.data_ptr():
                out.copy_(source)
            if reduce.prescale != 1.0 or reduce.postscale != 1.0:
                arithmetic = arithmetic_of(reduce, out.dtype, 1)
                arithmetic.prepare(out, out)
                arithmetic.reduce([out], out, out)

    def adasum(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        self.allreduce(inputs, outputs, reduce._replace(op=ReduceOp.SUM))

    def allgather(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]]) -> None:
        for source, out in zip(inputs, outputs, strict=True):
            out.copy_(source)

    def broadcast(self, tensors: Tensors, root: int) -> None:
        """Do nothing: the only member is the root."""

    def alltoall(
        self, input: torch.Tensor, output: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        output.copy_(input[: send_counts[0]])

    def reducescatter(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]], reduce: Reduce) -> None:
        self.allreduce(inputs, outputs, reduce)

    def barrier(self) -> None:
        """Do nothing: the only member is here."""

    def exchange(self, targets: Tensors, sources: Tensors) -> None:
        """Run an alltoall of separate tensors, by member."""
        targets[0].copy_(sources[0])

    def close(self) -> None:
        """Do nothing: no resources are held."""
