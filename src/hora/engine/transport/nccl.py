"""The NCCL group: CUDA tensors, one GPU per member, over torch.distributed's backend.

It is built directly on a store, without `init_process_group`, so the user's default group stays free. Calls queue work
on the current stream and return; `execute_on_device` orders that stream after the caller's. Members that share a GPU
cannot use NCCL: `CudaTransport` finds them by `gpu_identity` and uses another transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hora.config import changed_environment
from hora.engine.request import DTYPES, ReduceOp
from hora.engine.transport.base import Membership
from hora.engine.transport.group import PeerGroup, Work, connect
from hora.engine.transport.packing import as_bytes
from hora.errors import HorovodInternalError

_OPS = {ReduceOp[name]: getattr(dist.ReduceOp, name) for name in ("SUM", "MIN", "MAX", "PRODUCT")}
_REDUCED_DTYPES = frozenset(DTYPES.values()) - {torch.int16, torch.bool}
# torch's watchdog ends the whole process when a peer is lost. The liveness check keeps the process alive.
_QUIET_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_NEVER = timedelta(days=7)


class NcclGroup(PeerGroup):
    """Group whose members are on different GPUs."""

    backend = "nccl"

    def __init__(self, store: Store, membership: Membership, device: torch.device) -> None:
        super().__init__(membership)
        member, num_members, check_alive = membership

        def make() -> Any:
            torch.cuda.set_device(device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _NEVER
            with changed_environment(_QUIET_WATCHDOG):
                group: Any = dist.ProcessGroupNCCL(store, member, num_members, options)
            # NCCL connects at the first collective, which blocks: do that here, under the liveness check.
            group.allreduce([torch.ones(1, device=device)]).wait()
            torch.cuda.current_stream(device).synchronize()
            return group

        what = f"{num_members} members to connect over NCCL on {device}"
        self._process_group = connect(make, what, check_alive)

    @staticmethod
    def reduces(dtype: torch.dtype) -> bool:
        """Return whether NCCL supports reductions of the dtype."""
        return dtype in _REDUCED_DTYPES

    def start_allreduce(self, tensor: torch.Tensor, op: int) -> Work:
        """Reduce in place; Average only sums."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(_OPS.get(ReduceOp(op), dist.ReduceOp.SUM))
        return self._start("allreduce", lambda group: group.allreduce([tensor], options))

    def start_alltoall(
        self, output: torch.Tensor, input: torch.Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Work:
        # As bytes: NCCL supports few dtypes but can move all of them this way.
        counts = [[count * input.dtype.itemsize for count in each] for each in (receive_counts, send_counts)]
        return self._start("alltoall", lambda group: group.alltoall_base(as_bytes(output), as_bytes(input), *counts))

    def start_allgather(self, output: torch.Tensor, input: torch.Tensor, counts: Sequence[int]) -> Work:
        if all(count == counts[0] for count in counts):
            return self._start("allgather", lambda group: group._allgather_base(output, input))
        pending: Work | None = None
        for member, part in enumerate(output.split(list(counts))):
            if member == self.member:
                part.copy_(input)
            if counts[member]:
                pending = self.start_broadcast(part, member)  # in order on NCCL's stream: the last one ends last
        assert pending is not None, "nothing is gathered"
        return pending

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._start("broadcast", lambda group: group.broadcast([tensor], options))

    def _start(self, what: str, begin: Callable[[Any], Any]) -> Work:
        if self._process_group is None:
            raise HorovodInternalError(self._lost or "the nccl group has been shut down")
        try:
            return begin(self._process_group), what
        except RuntimeError as error:
            self._fail(error, what)

    def close(self) -> None:
        group, self._process_group = self._process_group, None
        if group is not None:
            _end(group, "shutdown", "_shutdown", "abort", "_abort")

    def discard(self) -> None:
        """Abort, which also ends kernels that wait on the GPU for a lost peer."""
        group, self._process_group = self._process_group, None
        if group is not None:
            _end(group, "abort", "_abort", "shutdown", "_shutdown")

    def _wait(self, work: Any, what: str) -> None:
        work.wait()  # the current stream waits, not the host


def gpu_identity(device: torch.device) -> str:
    """Return a text that is equal for members on the same GPU."""
    properties: Any = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    if uuid is None:  # older than the supported versions, or a build without it
        raise HorovodInternalError(
            f"torch {torch.__version__} cannot identify the GPU {device}; use torch 2.4 or newer"
        )
    return str(uuid)


def _end(group: Any, *methods: str) -> None:
    """Call the first of the methods that this version of torch has."""
    for name in methods:
        if hasattr(group, name):
            getattr(group, name)()
            return
