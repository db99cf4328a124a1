"""The transport interface: executes one agreed batch among the members of one process set.

The engine makes sure that every member calls the same method with matching arguments. A transport only moves and
reduces bytes; the engine handles names, readiness, errors between ranks, and handles.

All tensors are flat (1-D), contiguous and of one dtype per call. "Member" is the index within the process set, not the
global rank. Reductions combine members in the order 0, 1, 2, … for every element, on any member, so that results are
bit-identical on all ranks and do not depend on fusion or on how work is divided.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from hora.engine.request import Reduce, ReduceOp
from hora.engine.transport.arithmetic import arithmetic_of
from hora.engine.transport.packing import Buffers, pack, runs, total, unpack

# Raises HorovodInternalError if waiting has become pointless: a peer is dead, or the runtime was shut down.
AliveCheck = Callable[[], None]
Tensors = Sequence[torch.Tensor]


class Membership(NamedTuple):
    """This process's place among some members that call the same operations, and a check of the others."""

    member: int
    num_members: int
    check_alive: AliveCheck


class Transport(Protocol):
    """One per process set and device type. Called from one thread at a time, in the same order on all members."""

    name: str

    def allreduce(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        """Reduce several tensors as one, Adasum each by itself. `outputs[i]` may be `inputs[i]`.

        Average divides by the number of members. `arithmetic.py` defines the computation.
        """

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


class FusingTransport(ABC):
    """Base class of transports that gather, broadcast and scatter one tensor at a time: small ones are packed as one.

    `fused_bytes` bounds a packed tensor. A transport may keep other memory in `_buffers`, too.
    """

    def __init__(self, member: int, device: torch.device, fused_bytes: int) -> None:
        self._member, self._fused_bytes = member, fused_bytes
        self._buffers = Buffers(device, 2 * fused_bytes)

    def allgather(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]]) -> None:
        for run, totals in self._runs(counts, inputs[0].itemsize):
            whole = self._room(outputs[run])
            self._gather(self._packed(inputs[run]), whole, totals)
            if whole is not outputs[run.start]:
                parts = whole.split([sizes[m] for m in range(len(totals)) for sizes in counts[run]])
                for k, output in enumerate(outputs[run]):
                    torch.cat(parts[k :: len(outputs[run])], out=output)

    def broadcast(self, tensors: Tensors, root: int) -> None:
        for run, _ in self._runs([[tensor.numel()] for tensor in tensors], tensors[0].itemsize):
            packed = self._packed(tensors[run])
            self._broadcast(packed, root)
            if packed is not tensors[run.start] and self._member != root:
                unpack(packed, tensors[run])

    def reducescatter(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]], reduce: Reduce) -> None:
        for run, totals in self._runs(counts, inputs[0].itemsize):
            packed, reduced = inputs[run.start], self._room(outputs[run])
            if reduced is not outputs[run.start]:
                parts = [source.split(list(sizes)) for source, sizes in zip(inputs[run], counts[run], strict=True)]
                packed = self._packed([part[m] for m in range(len(totals)) for part in parts])
            self._scatter(packed, reduced, totals, reduce)
            if reduced is not outputs[run.start]:
                unpack(reduced, outputs[run])

    def _runs(self, counts: Sequence[Sequence[int]], itemsize: int) -> Iterator[tuple[slice, list[int]]]:
        """Yield runs of tensors that are moved as one, with each member's elements of all of them."""
        for run in runs([sum(sizes) for sizes in counts], self._fused_bytes // itemsize):
            some = slice(run.start, run.stop)
            totals = [sum(sizes) for sizes in zip(*counts[some], strict=True)]
            if any(totals):
                yield some, totals

    def _packed(self, tensors: Tensors) -> torch.Tensor:
        if len(tensors) == 1:
            return tensors[0]
        packed = self._buffers.get("packed", total(tensors), tensors[0].dtype)
        pack(tensors, packed)
        return packed

    def _room(self, outputs: Tensors) -> torch.Tensor:
        """Return the only output, or room for all of them."""
        return outputs[0] if len(outputs) == 1 else self._buffers.get("unpacked", total(outputs), outputs[0].dtype)

    @abstractmethod
    def _gather(self, own: torch.Tensor, gathered: torch.Tensor, counts: Sequence[int]) -> None:
        """Gather `counts[m]` elements of each member m. Some member has elements; the same applies to the others."""

    @abstractmethod
    def _broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the root's tensor to those of all members."""

    @abstractmethod
    def _scatter(self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int], reduce: Reduce) -> None:
        """Reduce, and keep this member's part, `counts[m]` elements of member m."""


class LocalTransport:
    """The transport of a set with one member: only scales, on any device."""

    name = "local"

    def allreduce(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        if reduce.op == ReduceOp.ADASUM:
            reduce = reduce._replace(op=ReduceOp.SUM)
        for source, out in zip(inputs, outputs, strict=True):
            if source.data_ptr() != out.data_ptr():
                out.copy_(source)
            if reduce.prescale != 1.0 or reduce.postscale != 1.0:
                arithmetic = arithmetic_of(reduce, out.dtype, 1)
                arithmetic.prepare(out, out)
                arithmetic.reduce([out], out)

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
