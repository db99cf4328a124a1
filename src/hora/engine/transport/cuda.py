"""The transport for CUDA tensors: NCCL, or for members that share a GPU, that GPU's memory or the host's.

It is chosen with the first tensor, which shows the GPU of this member; the members compare their GPUs through the
store. Calls return once everything is queued on the current stream, where batches follow one another. An NCCL
collective that waits for a dead peer would never end, so it is aborted when the world breaks (`give_up`). The engine
creates the transport and orders the streams.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from hora.engine.request import Reduce
from hora.engine.shm.segment import Segment
from hora.engine.transport.base import AliveCheck, Membership, Tensors, Transport
from hora.engine.transport.cuda_ipc import DriverError
from hora.engine.transport.cuda_staging import CudaStagingTransport, wait_for
from hora.engine.transport.device_memory import DeviceMemoryTransport
from hora.engine.transport.distributed import DistributedTransport
from hora.engine.transport.group import connect
from hora.engine.transport.nccl import NcclGroup, gpu_identity
from hora.errors import HorovodInternalError

log = logging.getLogger("hora")

Chosen = DistributedTransport | CudaStagingTransport


@dataclass(eq=False)
class CudaTransport:
    """See `Transport`."""

    store: Store
    membership: Membership
    make_cpu: Callable[[], Transport]  # returns the members' transport for CPU tensors, which its owner closes
    # Returns host memory that all members see (collective); None if they are on several hosts
    share: Callable[[int], Segment] | None = None
    name: str = "cuda"
    _chosen: Chosen | None = None
    _num_exchanges: int = 0
    _queued_on: torch.cuda.Stream | None = None  # where work was queued last

    def stages(self, num_bytes: int) -> bool:
        """Return whether this much data goes through host memory, as far as known."""
        return isinstance(self._chosen, CudaStagingTransport) and self._chosen.stages(num_bytes)

    def allreduce(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        self._choose(inputs[0].device).allreduce(inputs, outputs, reduce)

    def allgather(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]]) -> None:
        self._choose(inputs[0].device).allgather(inputs, outputs, counts)

    def broadcast(self, tensors: Tensors, root: int) -> None:
        self._choose(tensors[0].device).broadcast(tensors, root)

    def alltoall(
        self, input: torch.Tensor, output: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        self._choose(input.device).alltoall(input, output, send_counts, receive_counts)

    def reducescatter(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]], reduce: Reduce) -> None:
        self._choose(inputs[0].device).reducescatter(inputs, outputs, counts, reduce)

    def wait_for_gpu(self, check_alive: AliveCheck) -> None:
        """Wait until the GPU has finished queued work, unless the liveness check raises."""
        if self._queued_on is not None:
            wait_for(self._queued_on.record_event(), check_alive)

    def abort(self) -> None:
        """End GPU work that waits for a lost peer: the world is broken. Thread-safe; may be called repeatedly."""
        chosen = self._chosen
        if isinstance(chosen, DistributedTransport):
            # Not on the caller's thread, which must notify others: NCCL takes its time.
            threading.Thread(target=chosen.abort, name="hora-nccl-abort", daemon=True).start()

    def close(self) -> None:
        if self._chosen is None:
            return
        try:
            self.wait_for_gpu(self.membership.check_alive)
        except HorovodInternalError:
            if isinstance(self._chosen, DistributedTransport):
                self._chosen.abort()
        self._chosen.close()

    def _choose(self, device: torch.device) -> Chosen:
        """Return the transport, which is about to queue work on the current stream."""
        self._queued_on = torch.cuda.current_stream()
        if self._chosen is None:
            gpus = self._exchange(gpu_identity(device))
            if len(set(gpus)) == self.membership.num_members:
                group = NcclGroup(PrefixStore("nccl", self.store), self.membership, device)
                self._chosen = DistributedTransport(group, device)
            else:
                self._chosen = self._on_shared_gpu(device, self.share if len(set(gpus)) == 1 else None)
            self.name = self._chosen.name
        return self._chosen

    def _on_shared_gpu(self, device: torch.device, share: Callable[[int], Segment] | None) -> CudaStagingTransport:
        cpu = self.make_cpu()
        if share is None:
            return CudaStagingTransport(cpu)
        segment = share(DeviceMemoryTransport.num_bytes(self.membership.num_members))
        try:
            return DeviceMemoryTransport(segment, self._exchange, self.membership, device, cpu)
        except DriverError as error:
            segment.close()
            log.info("the members cannot share the memory of %s, so tensors go through host memory: %s", device, error)
            return CudaStagingTransport(cpu)

    def _exchange(self, mine: str) -> list[str]:
        """Return every member's value (collective)."""
        self._num_exchanges += 1
        name, (member, num_members, check_alive) = f"exchange/{self._num_exchanges}", self.membership

        def exchange() -> list[str]:
            self.store.set(f"{name}/{member}", f"={mine}")
            return [bytes(self.store.get(f"{name}/{peer}")).decode()[1:] for peer in range(num_members)]

        return connect(exchange, f"{num_members} members to describe their GPUs", check_alive)
