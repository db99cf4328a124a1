"""The transport of members that can only send to one another, over Hora's streams or NCCL.

For CPU tensors a group only moves bytes. Reductions exchange the members' parts directly and combine them locally with
`arithmetic`, in member order or host by host, which gives the same bits as shared memory for every dtype. So this is
the plain path without the native part: slow and correct. NCCL reduces by itself, in its own order, which is the same
for all members. `HierarchicalTransport` and `CudaTransport` build on it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from hora.engine.request import Reduce
from hora.engine.transport.arithmetic import (
    SERIAL_ELEMENTS,
    Arithmetic,
    HostwiseArithmetic,
    adasum,
    arithmetic_of,
    hostwise_arithmetic,
)
from hora.engine.transport.base import FusingTransport, Tensors
from hora.engine.transport.group import PeerGroup, Work
from hora.engine.transport.nccl import NcclGroup
from hora.engine.transport.packing import InTwoHalves, as_bytes, overlap, portions, spread, unpack

# A batch is sent in portions of this size, which bounds the buffers.
_PORTION_BYTES = 8 * 2**20
# A GPU needs larger ones to be busy.
_CUDA_PORTION_BYTES = 64 * 2**20

# Up to this size each member combines all data, in one exchange instead of two.
_DIRECT_BYTES = 64 * 2**10

AnyArithmetic = Arithmetic | HostwiseArithmetic


class _Portion(NamedTuple):
    """A part of an allreduce: views of several tensors, or of one. Two are in flight at a time, in different turns."""

    sources: list[torch.Tensor]
    results: list[torch.Tensor]
    turn: int

    @property
    def single(self) -> bool:
        return len(self.sources) == 1

    @property
    def total(self) -> int:
        return sum([source.numel() for source in self.sources])


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
        self._device = torch.device(device)
        portion_bytes = _CUDA_PORTION_BYTES if self._device.type == "cuda" else _PORTION_BYTES
        super().__init__(group.member, self._device, portion_bytes)
        self._group = group
        self._weights = weights
        self._hosts = tuple(tuple(host) for host in hosts)
        self._num_members = group.num_members
        self.name = group.backend

    def allreduce(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        dtype = inputs[0].dtype
        elsewhere = isinstance(self._group, NcclGroup) and self._group.reduces(dtype)
        arithmetic = self._arithmetic(reduce, dtype, elsewhere=elsewhere)
        cut = portions(inputs, outputs, self._fused_bytes // dtype.itemsize)
        overlap(
            self._reduce(_Portion(sources, results, number % 2), reduce.op, arithmetic)
            for number, (sources, results) in enumerate(cut)
            if any(source.numel() for source in sources)
        )

    def _arithmetic(self, reduce: Reduce, dtype: torch.dtype, *, elsewhere: bool = False) -> AnyArithmetic:
        if self._hosts:
            return hostwise_arithmetic(reduce._replace(code=""), dtype, self._hosts, self._member)
        return arithmetic_of(reduce, dtype, self._num_members, elsewhere=elsewhere, weights=self._weights)

    def adasum(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        dtype, sizes = inputs[0].dtype, [tensor.numel() for tensor in inputs]
        own, other = (self._buffers.take(purpose, sum(sizes), dtype) for purpose in ("own", "other"))
        mine, theirs, swap = own.split(sizes), other.split(sizes), partial(self._swap, own, other)
        adasum(inputs, outputs, reduce, self._member, self._num_members, mine=mine, theirs=theirs, swap=swap)

    def alltoall(
        self, input: torch.Tensor, output: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        self._group.finish(self.start_alltoall(input, output, send_counts, receive_counts))

    def start_scatter(
        self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int], reduce: Reduce, turn: int = 0
    ) -> InTwoHalves:
        """Start a reducescatter of one tensor; of two that overlap, one has turn 0 and one turn 1."""
        arithmetic = self._arithmetic(reduce, source.dtype)
        if arithmetic.prescales:
            prepared = self._buffers.take(f"own{turn}", source.numel(), source.dtype)
            arithmetic.prepare(source, prepared)
            source = prepared
        output.copy_((yield from self._reduce_slice(source, counts, turn, arithmetic)))

    def _reduce_slice(
        self, packed: torch.Tensor, counts: Sequence[int], turn: int, arithmetic: AnyArithmetic
    ) -> Generator[None, None, torch.Tensor]:
        """Send each member its slice, and return this one's slice of all members, combined."""
        mine = counts[self._member]
        received = self._buffers.take(f"received{turn}", self._num_members * mine, packed.dtype)
        pending = self.start_alltoall(packed, received, counts, [mine] * self._num_members)
        yield
        self._group.finish(pending)
        own = received[:mine]
        self._combine(arithmetic, received.split(max(mine, 1)), own)
        return own

    def start_alltoall(
        self, input: torch.Tensor, output: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Work:
        """Start an alltoall, for `finish`."""
        # Rows beyond the counts are not sent.
        return self._group.start_alltoall(output, input[: sum(send_counts)], receive_counts, send_counts)

    def start_gather(self, own: torch.Tensor, gathered: torch.Tensor, counts: Sequence[int]) -> Work:
        """Start gathering one tensor of all members, for `finish`; `gathered` is contiguous in member order."""
        sizes = [count * own.itemsize for count in counts]
        return self._group.start_allgather(as_bytes(gathered), as_bytes(own), sizes)

    def finish(self, pending: Work) -> None:
        """Wait for a started operation."""
        self._group.finish(pending)

    def barrier(self) -> None:
        n = self._num_members
        bells = self._buffers.take("bells", 2 * n, torch.uint8)
        self._group.finish(self._group.start_alltoall(bells[:n], bells[n:], [1] * n, [1] * n))

    def close(self) -> None:
        self._group.close()
        self._buffers.clear()

    def abort(self) -> None:
        """Discard work in flight; every later call fails."""
        self._group.discard()

    # Each of the following reduces one portion: it starts the exchange, yields, and then does the rest.

    def _reduce(self, portion: _Portion, op: int, arithmetic: AnyArithmetic) -> InTwoHalves:
        if (
            isinstance(arithmetic, Arithmetic)
            and isinstance(self._group, NcclGroup)
            and self._group.reduces(arithmetic.dtype)
        ):
            return self._reduce_natively(self._group, portion, op, arithmetic)
        if portion.total * arithmetic.dtype.itemsize <= _DIRECT_BYTES:
            return self._reduce_in_one_step(portion, arithmetic)
        return self._reduce_in_two_steps(portion, arithmetic)

    def _reduce_natively(self, group: NcclGroup, portion: _Portion, op: int, arithmetic: Arithmetic) -> InTwoHalves:
        if portion.single:
            work = portion.results[0]
            if arithmetic.prescales or work.data_ptr() != portion.sources[0].data_ptr():
                arithmetic.prepare(portion.sources[0], work)
        else:
            work = self._prepare(portion, arithmetic)
        pending = group.start_allreduce(work, op)
        yield
        group.finish(pending)
        arithmetic.finish(work, work)
        if not portion.single:
            unpack(work, portion.results)

    def _reduce_in_one_step(self, portion: _Portion, arithmetic: AnyArithmetic) -> InTwoHalves:
        """Every member receives everything and combines it."""
        count, n = portion.total, self._num_members
        own = self._prepare(portion, arithmetic)
        received = self._take("received", n * count, portion)
        pending = self.start_gather(own, received, [count] * n)
        yield
        self._group.finish(pending)
        out = portion.results[0] if portion.single else received[:count]
        self._combine(arithmetic, received.split(count), out)
        if not portion.single:
            unpack(out, portion.results)

    def _reduce_in_two_steps(self, portion: _Portion, arithmetic: AnyArithmetic) -> InTwoHalves:
        """Member m receives slice m of all and combines it; then all receive all slices."""
        slices = spread(portion.total, self._num_members)
        own = self._prepare(portion, arithmetic)
        reduced = yield from self._reduce_slice(own, slices, portion.turn, arithmetic)
        gathered = portion.results[0] if portion.single else self._take("gathered", portion.total, portion)
        self._gather(reduced, gathered, slices)
        if not portion.single:
            unpack(gathered, portion.results)

    def _combine(self, arithmetic: AnyArithmetic, operands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Combine the members' parts into `out`, which may be one of them, and finish it."""
        count = out.numel()
        # On the CPU in parts that stay in the cache between steps, and on one thread.
        step = SERIAL_ELEMENTS if self._device.type == "cpu" else max(count, 1)
        scratch = self._buffers.take("scratch", min(step, count), arithmetic.dtype)
        for start in range(0, count, step):
            stop = min(start + step, count)
            result = out[start:stop]
            arithmetic.reduce([operand[start:stop] for operand in operands], result, scratch[: stop - start])

    # Moving bytes.

    def _broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self._group.finish(self._group.start_broadcast(as_bytes(tensor), root))

    def _swap(self, own: torch.Tensor, other: torch.Tensor, partner: int) -> None:
        counts = [own.numel() if m == partner else 0 for m in range(self._num_members)]
        if sum(counts):
            self.alltoall(own, other, counts, counts)

    def _gather(self, own: torch.Tensor, gathered: torch.Tensor, counts: Sequence[int]) -> None:
        self._group.finish(self.start_gather(own, gathered, counts))

    def _scatter(self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int], reduce: Reduce) -> None:
        for _ in self.start_scatter(source, output, counts, reduce):
            pass

    def _take(self, purpose: str, count: int, portion: _Portion) -> torch.Tensor:
        """Return a buffer that the other portion in flight does not use."""
        return self._buffers.take(f"{purpose}{portion.turn}", count, portion.sources[0].dtype)

    def _prepare(self, portion: _Portion, arithmetic: AnyArithmetic) -> torch.Tensor:
        """Return this member's data as one tensor, prescaled."""
        if portion.single and not arithmetic.prescales:
            return portion.sources[0]
        packed = self._take("own", portion.total, portion)
        torch.cat(portion.sources, out=packed)
        arithmetic.prepare(packed, packed)
        return packed
