"""The transport of a set with one member: nothing to move, only scaling. Works on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hora.engine.request import Reduce, ReduceOp
from hora.engine.transport.arithmetic import arithmetic_of
from hora.engine.transport.base import Tensors

__all__ = ["LocalTransport"]


class LocalTransport:
    """Implements `Transport` for a world of one."""

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
