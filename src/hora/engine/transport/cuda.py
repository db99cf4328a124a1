"""The transport for CUDA tensors: NCCL, or through host memory when members share a GPU.

Which of the two is known with the first tensor, since it says which GPU this member uses; the members
compare their GPUs through the store then. Calls return when the operation is complete, and look at the
guard while they wait: a collective that waits for a dead peer on the GPU itself would never end. The engine
makes it and orders the streams.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from hora.engine.request import Reduce
from hora.engine.transport.base import Guard, Tensors, Transport
from hora.engine.transport.distributed import DistributedTransport
from hora.engine.transport.group import connect
from hora.engine.transport.nccl import NcclGroup, share_a_gpu
from hora.engine.transport.packing import Buffers, portions
from hora.errors import HorovodInternalError

__all__ = ["CudaTransport", "HostMemoryTransport"]

_SPIN_S = 0.0005
_PAUSE_S = 0.0001
_GUARD_EVERY_S = 0.05
_PORTION_BYTES = 4 * 2**20
_KEEP_BYTES = 64 * 2**20


class CudaTransport:
    """See `Transport`. `make_cpu` gives the same members' transport for CPU tensors, which its giver closes."""

    def __init__(
        self,
        store: Store,
        member: int,
        num_members: int,
        guard: Guard,
        limit_s: float,
        make_cpu: Callable[[], Transport],
    ) -> None:
        self._store, self._member, self._num_members = store, member, num_members
        self._guard, self._limit_s = guard, limit_s
        self._make_cpu = make_cpu
        self._chosen: DistributedTransport | HostMemoryTransport | None = None
        self.name = "cuda"

    def allreduce(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        self._choose(inputs[0].device).allreduce(inputs, outputs, reduce)
        self._complete("allreduce")

    def adasum(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        self._choose(inputs[0].device).adasum(inputs, outputs, reduce)
        self._complete("Adasum")

    def allgather(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]]) -> None:
        self._choose(inputs[0].device).allgather(inputs, outputs, counts)
        self._complete("allgather")

    def broadcast(self, tensors: Tensors, root: int) -> None:
        self._choose(tensors[0].device).broadcast(tensors, root)
        self._complete("broadcast")

    def alltoall(
        self,
        input: torch.Tensor,
        output: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        self._choose(input.device).alltoall(input, output, send_counts, receive_counts)
        self._complete("alltoall")

    def reducescatter(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]], reduce: Reduce) -> None:
        self._choose(inputs[0].device).reducescatter(inputs, outputs, counts, reduce)
        self._complete("reducescatter")

    def barrier(self) -> None:
        self._choose(torch.device("cuda", torch.cuda.current_device())).barrier()
        self._complete("barrier")

    def close(self) -> None:
        if self._chosen is not None:
            self._chosen.close()

    def _choose(self, device: torch.device) -> DistributedTransport | HostMemoryTransport:
        if self._chosen is None:
            shared = connect(
                lambda: share_a_gpu(self._store, self._member, self._num_members, device),
                what=f"{self._num_members} members to say which GPU they use",
                guard=self._guard,
                limit_s=self._limit_s,
            )
            if shared:
                self._chosen = HostMemoryTransport(self._make_cpu())
            else:
                group = NcclGroup(
                    PrefixStore("nccl", self._store),
                    self._member,
                    self._num_members,
                    device=device,
                    guard=self._guard,
                    limit_s=self._limit_s,
                )
                self._chosen = DistributedTransport(group, self._member, self._num_members, device)
            self.name = self._chosen.name
        return self._chosen

    def _complete(self, what: str) -> None:
        """Wait until the current stream has done what was queued, under the guard."""
        if not isinstance(self._chosen, DistributedTransport):
            return  # through host memory: the peers' part is done, and what is left only copies
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream())
        start = ask_at = time.monotonic()
        pause = threading.Event()
        while not event.query():
            now = time.monotonic()
            if now - start > _SPIN_S:
                pause.wait(_PAUSE_S)
            if now >= ask_at:
                ask_at = now + _GUARD_EVERY_S
                self._ask_guard(what, now - start)

    def _ask_guard(self, what: str, waited_s: float) -> None:
        assert isinstance(self._chosen, DistributedTransport)
        try:
            self._guard()
            if waited_s > self._limit_s:
                raise HorovodInternalError(f"waited {self._limit_s:g} s for the peers in {what} over NCCL")
        except HorovodInternalError:
            self._chosen.abort()
            raise


class HostMemoryTransport:
    """CUDA tensors through host memory, over the transport `cpu` of the same members, which its giver closes.

    Everything is ordered on the current stream: a copy to pinned memory, the host waits for it, the CPU transport does its
    work, and the results are copied back without waiting. Element-wise reductions and broadcasts go in portions with two
    buffers, so that one is copied while the other is reduced.
    """

    def __init__(self, cpu: Transport) -> None:
        self._cpu = cpu
        self._buffers = Buffers(torch.device("cpu"), _KEEP_BYTES, pinned=torch.cuda.is_available())
        # What was last copied out of each buffer; until then it may not be overwritten.
        self._emptied: dict[str, torch.cuda.Event] = {}
        self.name = f"staged-{cpu.name}"

    def allreduce(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        self._in_portions(inputs, outputs, lambda portion: self._cpu.allreduce([portion], [portion], reduce))

    def adasum(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        staged = self._stage("in", inputs)
        _record().synchronize()
        self._cpu.adasum(staged, staged, reduce)
        self._return("in", staged, outputs)

    def allgather(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]]) -> None:
        staged, results = self._stage("in", inputs), self._room("out", outputs)
        _record().synchronize()
        self._cpu.allgather(staged, results, counts)
        self._return("out", results, outputs)

    def broadcast(self, tensors: Tensors, root: int) -> None:
        self._in_portions(tensors, tensors, lambda portion: self._cpu.broadcast([portion], root))

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

    def reducescatter(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]], reduce: Reduce) -> None:
        staged, results = self._stage("in", inputs), self._room("out", outputs)
        _record().synchronize()
        self._cpu.reducescatter(staged, results, counts, reduce)
        self._return("out", results, outputs)

    def barrier(self) -> None:
        self._cpu.barrier()

    def close(self) -> None:
        for event in self._emptied.values():
            event.synchronize()
        self._emptied.clear()
        self._buffers.clear()

    def _in_portions(self, inputs: Tensors, outputs: Tensors, work: Callable[[torch.Tensor], None]) -> None:
        """Copy the next portion in while `work` is done on this one."""
        limit = _PORTION_BYTES // inputs[0].dtype.itemsize
        todo = [each for each in portions(inputs, outputs, limit) if any(t.numel() for t in each[0])]
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
