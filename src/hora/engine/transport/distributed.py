"""The transport of members that can only send to one another, over Hora's streams or NCCL.

For CPU tensors a group only moves bytes. Reductions exchange the members' parts directly and combine them locally with
`arithmetic`, in member order or host by host, which gives the same bits as shared memory for every dtype. So this is
the plain path without the native part: slow and correct. NCCL reduces by itself, in its own order, which is the same
for all members. `HierarchicalTransport` and `CudaTransport` build on it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from hora.engine.request import Reduce, ReduceOp
from hora.engine.transport.arithmetic import (
    Arithmetic,
    HostwiseArithmetic,
    adasum_pair,
    arithmetic_of,
    hostwise_arithmetic,
)
from hora.engine.transport.base import FusingTransport, Tensors
from hora.engine.transport.group import PeerGroup, Work
from hora.engine.transport.nccl import NcclGroup
from hora.engine.transport.packing import InTwoHalves, as_bytes, overlap, pack, portions, spread, total, unpack

# A batch is sent in portions of this size, which bounds the buffers.
_PORTION_BYTES = 8 * 2**20
# A GPU needs larger ones to be busy.
_CUDA_PORTION_BYTES = 64 * 2**20

# Up to this size each member combines all data, in one exchange instead of two.
_DIRECT_BYTES = 64 * 2**10

AnyArithmetic = Arithmetic | HostwiseArithmetic


class DistributedTransport(FusingTransport):
    """See `Transport`. `device`: "cpu" or the CUDA device, for which `group` is NCCL's; `weights`: see `Arithmetic`.

    `hosts`: the members of each host, if reductions go host by host; member order otherwise.
    """

    def __init__(
        self,
        group: PeerGroup,
        device: str | torch.device = "cpu",
        weights: tuple[int, ...] = (),
        hosts: Sequence[Sequence[int]] = (),
    ) -> None:
        device = torch.device(device)
        super().__init__(group.member, device, _CUDA_PORTION_BYTES if device.type == "cuda" else _PORTION_BYTES)
        self.group = group
        self._weights = weights
        self._hosts = tuple(tuple(host) for host in hosts)
        self._num_members = group.num_members
        self.name = group.backend

    def allreduce(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        if reduce.op == ReduceOp.ADASUM:
            self._adasum(inputs, outputs, reduce)
            return
        dtype = inputs[0].dtype
        nccl = self.group if isinstance(self.group, NcclGroup) and self.group.reduces(dtype) else None
        arithmetic = self._arithmetic(reduce, dtype, elsewhere=nccl is not None)
        cut = portions(inputs, outputs, self._fused_bytes // dtype.itemsize)
        overlap(
            self._reduce(sources, results, number % 2, arithmetic, nccl, reduce.op)
            for number, (sources, results) in enumerate(cut)
        )

    def _arithmetic(self, reduce: Reduce, dtype: torch.dtype, *, elsewhere: bool = False) -> AnyArithmetic:
        if self._hosts:
            return hostwise_arithmetic(reduce._replace(code=""), dtype, self._hosts, self._member)
        return arithmetic_of(reduce, dtype, self._num_members, elsewhere=elsewhere, weights=self._weights)

    def _adasum(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        """Combine pairs of members at doubling distances, each tensor separately."""
        n, dtype, sizes = self._num_members, inputs[0].dtype, [tensor.numel() for tensor in inputs]
        assert n & (n - 1) == 0, f"Adasum needs a power of two, not {n} members"
        arithmetic = arithmetic_of(reduce._replace(op=ReduceOp.SUM), dtype, n, elsewhere=True)
        own, other = (self._buffers.get(purpose, sum(sizes), dtype) for purpose in ("own", "other"))
        mine, theirs = own.split(sizes), other.split(sizes)
        for source, part in zip(inputs, mine, strict=True):
            arithmetic.prepare(source, part)
        distance = 1
        while distance < n and any(sizes):
            counts = [sum(sizes) if m == self._member ^ distance else 0 for m in range(n)]
            self.alltoall(own, other, counts, counts)
            for one, two in zip(mine, theirs, strict=True):
                adasum_pair(*((two, one) if self._member & distance else (one, two)), one)
            distance *= 2
        for part, out in zip(mine, outputs, strict=True):
            arithmetic.finish(part, out)

    def alltoall(
        self, input: torch.Tensor, output: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        sent = input[: sum(send_counts)]  # rows beyond the counts are not sent
        self.group.finish(self.group.start_alltoall(output, sent, receive_counts, send_counts))

    def start_scatter(
        self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int], reduce: Reduce, turn: int = 0
    ) -> InTwoHalves:
        """Start a reducescatter of one tensor; of two that overlap, one has turn 0 and one turn 1."""
        arithmetic = self._arithmetic(reduce, source.dtype)
        if arithmetic.prescales:
            prepared = self._buffers.get(f"own{turn}", source.numel(), source.dtype)
            arithmetic.prepare(source, prepared)
            source = prepared
        output.copy_((yield from self._reduce_slice(source, counts, turn, arithmetic)))

    def _reduce_slice(
        self, packed: torch.Tensor, counts: Sequence[int], turn: int, arithmetic: AnyArithmetic
    ) -> Generator[None, None, torch.Tensor]:
        """Send each member its slice, and return this one's slice of all members, combined."""
        mine = counts[self._member]
        received = self._buffers.get(f"received{turn}", self._num_members * mine, packed.dtype)
        pending = self.group.start_alltoall(received, packed, [mine] * self._num_members, counts)
        yield
        self.group.finish(pending)
        own = received[:mine]
        arithmetic.reduce(received.split(max(mine, 1)), own)
        return own

    def start_gather(self, own: torch.Tensor, gathered: torch.Tensor, counts: Sequence[int]) -> Work:
        """Start gathering one tensor of all members, for `finish`; `gathered` is contiguous in member order."""
        sizes = [count * own.itemsize for count in counts]
        return self.group.start_allgather(as_bytes(gathered), as_bytes(own), sizes)

    def barrier(self) -> None:
        n = self._num_members
        bells = self._buffers.get("bells", 2 * n, torch.uint8)
        self.group.finish(self.group.start_alltoall(bells[:n], bells[n:], [1] * n, [1] * n))

    def close(self) -> None:
        self.group.close()
        self._buffers.clear()

    def abort(self) -> None:
        """Discard work in flight; every later call fails."""
        self.group.discard()

    def _reduce(
        self,
        sources: Tensors,
        results: Tensors,
        turn: int,
        arithmetic: AnyArithmetic,
        nccl: NcclGroup | None,
        op: int,
    ) -> InTwoHalves:
        """Start to reduce a portion: views of several tensors, or of one. Two are in flight, in different turns."""
        count, dtype, source = total(sources), arithmetic.dtype, sources[0]
        several, in_one_step = len(sources) > 1, count * dtype.itemsize <= _DIRECT_BYTES
        out = self._buffers.get(f"out{turn}", count, dtype) if several else results[0]
        own = out if nccl is not None else source
        if nccl is None and (several or arithmetic.prescales):
            own = self._buffers.get(f"own{turn}", count, dtype)
        if several:
            pack(sources, own)
            arithmetic.prepare(own, own)
        elif arithmetic.prescales or own.data_ptr() != source.data_ptr():
            arithmetic.prepare(source, own)
        if nccl is not None:
            assert isinstance(arithmetic, Arithmetic)
            pending = nccl.start_allreduce(out, op)
            yield
            self.group.finish(pending)
            arithmetic.finish(out, out)
        elif in_one_step:  # every member receives everything and combines it
            received = self._buffers.get(f"received{turn}", self._num_members * count, dtype)
            pending = self.start_gather(own, received, [count] * self._num_members)
            yield
            self.group.finish(pending)
            arithmetic.reduce(received.split(count), out)
        else:  # member m receives slice m of all and combines it; then all receive all slices
            slices = spread(count, self._num_members)
            reduced = yield from self._reduce_slice(own, slices, turn, arithmetic)
            self._gather(reduced, out, slices)
        if several:
            unpack(out, results)

    # Moving bytes.

    def _broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self.group.finish(self.group.start_broadcast(as_bytes(tensor), root))

    def _gather(self, own: torch.Tensor, gathered: torch.Tensor, counts: Sequence[int]) -> None:
        self.group.finish(self.start_gather(own, gathered, counts))

    def _scatter(self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int], reduce: Reduce) -> None:
        for _ in self.start_scatter(source, output, counts, reduce):
            pass
