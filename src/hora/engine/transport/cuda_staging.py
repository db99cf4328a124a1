"""CUDA tensors through host memory, over the CPU transport of the same members.

It is for members that share a GPU, which NCCL does not support, and for operations that `DeviceMemoryTransport` lacks.
`CudaTransport` chooses it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from hora.engine.request import Reduce, ReduceOp
from hora.engine.transport.base import AliveCheck, Tensors, Transport
from hora.engine.transport.cuda_ipc import copy_by_engine, copy_to_host
from hora.engine.transport.packing import Buffers, InTwoHalves, overlap, portions

_PORTION_BYTES = 4 * 2**20
_KEEP_BYTES = 64 * 2**20
# A plain copy of fewer bytes to the GPU does not use the copy engine: see `copy_by_engine`.
_ENGINE_BYTES = 32 * 2**10
_SPIN_S = 0.0005
_PAUSE_S = 0.0001
_GUARD_EVERY_S = 0.05


class CudaStagingTransport:
    """CUDA tensors through host memory, over the transport `cpu` of the same members, which its owner closes.

    Everything is ordered on the current stream: a copy to pinned memory, for which the host waits, then the CPU
    transport, then a copy back without waiting. Element-wise reductions and broadcasts run in portions with two
    buffers, so that one is copied while the other is reduced.
    """

    def __init__(self, cpu: Transport) -> None:
        self._cpu = cpu
        self._buffers = Buffers(torch.device("cpu"), _KEEP_BYTES, pinned=torch.cuda.is_available())
        # The last copy out of each buffer; until it is done the buffer must not be overwritten.
        self._emptied: dict[str, torch.cuda.Event] = {}
        self.name = f"staged-{cpu.name}"

    def stages(self, num_bytes: int) -> bool:
        """Return whether this much data goes through host memory."""
        return True

    def allreduce(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        if reduce.op == ReduceOp.ADASUM:
            self._at_once(inputs, outputs, lambda staged, results: self._cpu.allreduce(staged, results, reduce))
        else:
            self._in_portions(inputs, outputs, lambda portion: self._cpu.allreduce([portion], [portion], reduce))

    def allgather(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]]) -> None:
        self._at_once(inputs, outputs, lambda staged, results: self._cpu.allgather(staged, results, counts))

    def broadcast(self, tensors: Tensors, root: int) -> None:
        self._in_portions(tensors, tensors, lambda portion: self._cpu.broadcast([portion], root))

    def alltoall(
        self, input: torch.Tensor, output: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        self._at_once(
            [input],
            [output],
            lambda staged, results: self._cpu.alltoall(staged[0], results[0], send_counts, receive_counts),
        )

    def reducescatter(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]], reduce: Reduce) -> None:
        self._at_once(inputs, outputs, lambda staged, results: self._cpu.reducescatter(staged, results, counts, reduce))

    def _at_once(self, inputs: Tensors, outputs: Tensors, work: Callable[[Tensors, Tensors], None]) -> None:
        """Copy everything in, let `work` process it, and copy its results out."""
        sizes, room = [tensor.numel() for tensor in inputs], self._pinned("out", outputs)
        staged, results = self._stage("in", inputs).split(sizes), room.split([tensor.numel() for tensor in outputs])
        mark().synchronize()
        work(staged, results)
        self._return("out", results, outputs)

    def close(self) -> None:
        for event in self._emptied.values():
            event.synchronize()
        self._emptied.clear()
        self._buffers.clear()

    def _in_portions(self, inputs: Tensors, outputs: Tensors, work: Callable[[torch.Tensor], None]) -> None:
        """Copy the next portion in while `work` processes this one."""
        cut = portions(inputs, outputs, _PORTION_BYTES // inputs[0].dtype.itemsize)
        overlap(
            self._through_host(("in", "out")[number % 2], sources, results, work)
            for number, (sources, results) in enumerate(cut)
        )

    def _through_host(
        self, purpose: str, sources: Tensors, results: Tensors, work: Callable[[torch.Tensor], None]
    ) -> InTwoHalves:
        staged = self._stage(purpose, sources)
        landed = mark()
        yield
        landed.synchronize()
        work(staged)
        self._return(purpose, staged.split([result.numel() for result in results]), results)

    def _pinned(self, purpose: str, like: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a pinned buffer for all of `like`."""
        emptied = self._emptied.pop(purpose, None)
        if emptied is not None:
            emptied.synchronize()
        return self._buffers.get(purpose, sum(tensor.numel() for tensor in like), like[0].dtype)

    def _stage(self, purpose: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        staged = self._pinned(purpose, tensors)
        for tensor, host in zip(tensors, staged.split([t.numel() for t in tensors]), strict=True):
            host.copy_(tensor, non_blocking=True)
        return staged

    def _return(self, purpose: str, results: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        for host, output in zip(results, outputs, strict=True):
            copy_to_gpu(host, output)
        self._emptied[purpose] = mark()


class PinnedStage:
    """Pinned memory for tensors of one size, one piece per stream.

    Copies on a stream are ordered, so data queued from a piece is copied before new data overwrites it.
    """

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self._count, self._dtype = count, dtype
        self._pieces: dict[int, torch.Tensor] = {}

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor's values, once the earlier work on the current stream is done."""
        stream = torch.cuda.current_stream(tensor.device)
        piece = self._pieces.get(stream.cuda_stream)
        if piece is None:
            piece = torch.empty(self._count, dtype=self._dtype, device="cpu", pin_memory=True)
            self._pieces[stream.cuda_stream] = piece
        copy_to_host(tensor, piece, stream)
        return piece


def copy_to_gpu(host: torch.Tensor, output: torch.Tensor) -> None:
    """Queue a copy of pinned memory to a contiguous tensor of the same type, on the current stream."""
    num_bytes = host.nbytes
    if output.is_cuda and 0 < num_bytes < _ENGINE_BYTES and num_bytes % 2 == 0:
        copy_by_engine(host, output)
    else:
        output.view(-1).copy_(host, non_blocking=True)


def mark() -> torch.cuda.Event:
    """Record an event on the current stream."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream())
    return event


def wait_for(event: torch.cuda.Event, check_alive: AliveCheck) -> None:
    """Wait for the event. Spins only for a moment: it may be behind a long computation."""
    start = ask_at = time.monotonic()
    pause = threading.Event()
    while not event.query():
        now = time.monotonic()
        if now - start > _SPIN_S:
            pause.wait(_PAUSE_S)
        if now >= ask_at:
            ask_at = now + _GUARD_EVERY_S
            check_alive()
