"""CUDA tensors through host memory, over a transport for CPU tensors.

For members that share a GPU, which NCCL refuses. Everything is ordered on the current stream: a copy to
pinned memory, the host waits for it, the CPU transport does its work, and the results are copied back
without waiting. Element-wise reductions and broadcasts go in pieces with two buffers, so that one piece is
copied while the other is reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hora.engine.transport.base import Tensors, Transport
from hora.engine.transport.packing import Buffers, pieces

__all__ = ["StagedTransport"]

_PIECE_BYTES = 4 * 2**20
_KEEP_BYTES = 64 * 2**20


class StagedTransport:
    """See `Transport`. The transport `cpu` stays its giver's, who closes it."""

    def __init__(self, cpu: Transport) -> None:
        self._cpu = cpu
        self._buffers = Buffers(torch.device("cpu"), _KEEP_BYTES, pinned=torch.cuda.is_available())
        # What was last copied out of each buffer; until then it may not be overwritten.
        self._emptied: dict[str, torch.cuda.Event] = {}
        self.name = f"staged-{cpu.name}"

    def allreduce(self, inputs: Tensors, outputs: Tensors, *, op: int, prescale: float, postscale: float) -> None:
        def reduce(piece: torch.Tensor) -> None:
            self._cpu.allreduce([piece], [piece], op=op, prescale=prescale, postscale=postscale)

        self._in_pieces(inputs, outputs, reduce)

    def adasum(self, inputs: Tensors, outputs: Tensors, *, prescale: float, postscale: float) -> None:
        staged = self._stage("in", inputs)
        _record().synchronize()
        self._cpu.adasum(staged, staged, prescale=prescale, postscale=postscale)
        self._return("in", staged, outputs)

    def allgather(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]]) -> None:
        staged, results = self._stage("in", inputs), self._room("out", outputs)
        _record().synchronize()
        self._cpu.allgather(staged, results, counts)
        self._return("out", results, outputs)

    def broadcast(self, tensors: Tensors, root: int) -> None:
        self._in_pieces(tensors, tensors, lambda piece: self._cpu.broadcast([piece], root))

    def alltoall(
        self,
        input: torch.Tensor,
        output: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        staged, results = self._stage("in", [input]), self._room("out", [output])
        _record().synchronize()
        self._cpu.alltoall(staged[0], results[0], send_counts, receive_counts)
        self._return("out", results, [output])

    def reducescatter(
        self,
        inputs: Tensors,
        outputs: Tensors,
        counts: Sequence[Sequence[int]],
        *,
        op: int,
        prescale: float,
        postscale: float,
    ) -> None:
        staged, results = self._stage("in", inputs), self._room("out", outputs)
        _record().synchronize()
        self._cpu.reducescatter(staged, results, counts, op=op, prescale=prescale, postscale=postscale)
        self._return("out", results, outputs)

    def barrier(self) -> None:
        self._cpu.barrier()

    def close(self) -> None:
        for event in self._emptied.values():
            event.synchronize()
        self._emptied.clear()
        self._buffers.clear()

    def _in_pieces(self, inputs: Tensors, outputs: Tensors, work: Callable[[torch.Tensor], None]) -> None:
        """Copy the next piece in while `work` is done on this one."""
        limit = _PIECE_BYTES // inputs[0].dtype.itemsize
        todo = [piece for piece in pieces(inputs, outputs, limit) if any(t.numel() for t in piece[0])]
        purposes = ("in", "out")
        if not todo:
            return
        staged = self._stage_as_one(purposes[0], todo[0][0])
        landed = _record()
        for number, (_, results) in enumerate(todo):
            current, purpose, ready = staged, purposes[number % 2], landed
            if number + 1 < len(todo):
                staged = self._stage_as_one(purposes[(number + 1) % 2], todo[number + 1][0])
                landed = _record()
            ready.synchronize()
            work(current)
            self._return(purpose, list(current.split([result.numel() for result in results])), results)

    def _pinned(self, purpose: str, like: Sequence[torch.Tensor]) -> torch.Tensor:
        """Room for all of `like`."""
        emptied = self._emptied.pop(purpose, None)
        if emptied is not None:
            emptied.synchronize()
        return self._buffers.take(purpose, sum(tensor.numel() for tensor in like), like[0].dtype)

    def _room(self, purpose: str, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(self._pinned(purpose, like).split([tensor.numel() for tensor in like]))

    def _stage(self, purpose: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(self._stage_as_one(purpose, tensors).split([tensor.numel() for tensor in tensors]))

    def _stage_as_one(self, purpose: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        staged = self._pinned(purpose, tensors)
        for tensor, host in zip(tensors, staged.split([t.numel() for t in tensors]), strict=True):
            host.copy_(tensor, non_blocking=True)
        return staged

    def _return(self, purpose: str, results: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        for host, output in zip(results, outputs, strict=True):
            output.copy_(host, non_blocking=True)
        self._emptied[purpose] = _record()


def _record() -> torch.cuda.Event:
    """A mark on the current stream: behind it, everything queued so far is done."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream())
    return event
