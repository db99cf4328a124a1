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

from hora.engine.transport.base import Guard, Tensors, Transport
from hora.engine.transport.gloo import DistributedTransport
from hora.engine.transport.group import connect
from hora.engine.transport.nccl import share_a_gpu
from hora.engine.transport.staged import StagedTransport
from hora.errors import HorovodInternalError

__all__ = ["CudaTransport"]

_SPIN_S = 0.0005
_PAUSE_S = 0.0001
_GUARD_EVERY_S = 0.05


class CudaTransport:
    """See `Transport`. `make_cpu` gives the same members' transport for CPU tensors; its giver closes it."""

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
        self._chosen: DistributedTransport | StagedTransport | None = None
        self.name = "cuda"

    def allreduce(self, inputs: Tensors, outputs: Tensors, *, op: int, prescale: float, postscale: float) -> None:
        chosen = self._choose(inputs[0].device)
        chosen.allreduce(inputs, outputs, op=op, prescale=prescale, postscale=postscale)
        self._complete("allreduce")

    def adasum(self, inputs: Tensors, outputs: Tensors, *, prescale: float, postscale: float) -> None:
        self._choose(inputs[0].device).adasum(inputs, outputs, prescale=prescale, postscale=postscale)
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
        chosen = self._choose(inputs[0].device)
        chosen.reducescatter(inputs, outputs, counts, op=op, prescale=prescale, postscale=postscale)
        self._complete("reducescatter")

    def barrier(self) -> None:
        self._choose(torch.device("cuda", torch.cuda.current_device())).barrier()
        self._complete("barrier")

    def close(self) -> None:
        if self._chosen is not None:
            self._chosen.close()

    def _choose(self, device: torch.device) -> DistributedTransport | StagedTransport:
        if self._chosen is None:
            shared = connect(
                lambda: share_a_gpu(self._store, self._member, self._num_members, device),
                what=f"{self._num_members} members to say which GPU they use",
                guard=self._guard,
                limit_s=self._limit_s,
            )
            if shared:
                self._chosen = StagedTransport(self._make_cpu())
            else:
                self._chosen = DistributedTransport(
                    PrefixStore("nccl", self._store),
                    self._member,
                    self._num_members,
                    self._guard,
                    self._limit_s,
                    device=device,
                )
            self.name = self._chosen.name
        return self._chosen

    def _complete(self, what: str) -> None:
        """Wait until the current stream has done what was queued, under the guard."""
        if not isinstance(self._chosen, DistributedTransport):
            return  # staged: the peers' part is done, and what is left only copies
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
