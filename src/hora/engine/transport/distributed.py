"""The transport over torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors.

gloo only moves bytes here. Reductions exchange the members' parts directly and combine them locally with
`arithmetic`, in member order: that gives the same bits as shared memory does, for every dtype, and costs no
more traffic than gloo's own ring. NCCL reduces by itself, in its own order, which is the same for all
members. The engine calls it; `HierarchicalTransport` and `StagedTransport` build on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import Store

from hora.engine.request import ReduceOp
from hora.engine.transport.arithmetic import Reduction, adasum_pair, reduction
from hora.engine.transport.base import Guard, Tensors
from hora.engine.transport.group import GlooGroup
from hora.engine.transport.nccl import NcclGroup
from hora.engine.transport.packing import Buffers, as_bytes, pieces, runs, spread

__all__ = ["DistributedTransport"]

# A batch travels in pieces of this size, which bounds the buffers and leaves them in the cache.
_PIECE_BYTES = 4 * 2**20
# NCCL pays per call and has no use for the cache: longer pieces.
_CUDA_PIECE_BYTES = 64 * 2**20
# Up to here everybody sends everything to everybody, one step instead of two.
_ONE_STEP_BYTES = 16 * 2**10


class DistributedTransport:
    """See `Transport`. `device` is "cpu" or the CUDA device; `address` is the one gloo listens at."""

    def __init__(
        self,
        store: Store,
        member: int,
        num_members: int,
        guard: Guard,
        limit_s: float,
        device: str | torch.device = "cpu",
        address: str | None = None,
    ) -> None:
        self._member = member
        self._num_members = num_members
        self._device = torch.device(device)
        self._group: GlooGroup | NcclGroup
        if self._device.type == "cuda":
            self._group = NcclGroup(store, member, num_members, device=self._device, guard=guard, limit_s=limit_s)
            self._piece_bytes = _CUDA_PIECE_BYTES
        else:
            self._group = GlooGroup(
                store, member, num_members, address=address or "127.0.0.1", guard=guard, limit_s=limit_s
            )
            self._piece_bytes = _PIECE_BYTES
        self.name = self._group.backend
        self._buffers = Buffers(self._device, 2 * self._piece_bytes)

    def allreduce(self, inputs: Tensors, outputs: Tensors, *, op: int, prescale: float, postscale: float) -> None:
        dtype = inputs[0].dtype
        rule = reduction(op, dtype, prescale, postscale, self._num_members)
        native = isinstance(self._group, NcclGroup) and self._group.reduces(dtype)
        for sources, results in pieces(inputs, outputs, self._piece_bytes // dtype.itemsize):
            total = sum(source.numel() for source in sources)
            if total == 0:
                continue
            if native:
                self._reduce_natively(sources, results, total, op, rule)
            elif self._num_members == 2:
                self._reduce_with_partner(sources, results, total, rule)
            elif total * dtype.itemsize <= _ONE_STEP_BYTES:
                self._reduce_in_one_step(sources, results, total, rule)
            else:
                self._reduce_in_two_steps(sources, results, total, rule)

    def adasum(self, inputs: Tensors, outputs: Tensors, *, prescale: float, postscale: float) -> None:
        n, me, dtype = self._num_members, self._member, inputs[0].dtype
        assert n & (n - 1) == 0, f"Adasum needs a power of two, not {n} members"
        rule = reduction(ReduceOp.SUM, dtype, prescale, postscale, n)
        sizes = [tensor.numel() for tensor in inputs]
        own = self._buffers.take("own", sum(sizes), dtype)
        for source, part in zip(inputs, own.split(sizes), strict=True):
            rule.prepare(source, part)
        other = self._buffers.take("other", sum(sizes), dtype)
        distance = 1
        while distance < n:
            self._swap(own, other, me ^ distance)
            low, high = (own, other) if me & distance == 0 else (other, own)
            for a, b, out in zip(low.split(sizes), high.split(sizes), own.split(sizes), strict=True):
                adasum_pair(a, b, out)
            distance *= 2
        for part, result in zip(own.split(sizes), outputs, strict=True):
            rule.finish(part, result)

    def allgather(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]]) -> None:
        dtype = inputs[0].dtype
        for run in runs([sum(each) for each in counts], self._piece_bytes // dtype.itemsize):
            if len(run) == 1:
                self._gather(inputs[run[0]], outputs[run[0]], counts[run[0]])
                continue
            totals = [sum(counts[i][m] for i in run) for m in range(self._num_members)]
            own = self._pack("own", [inputs[i] for i in run])
            gathered = self._buffers.take("gathered", sum(totals), dtype)
            self._gather(own, gathered, totals)
            parts = gathered.split([counts[i][m] for m in range(self._num_members) for i in run])
            for k, i in enumerate(run):
                torch.cat(parts[k :: len(run)], out=outputs[i])

    def broadcast(self, tensors: Tensors, root: int) -> None:
        for run in runs([t.numel() for t in tensors], self._piece_bytes // tensors[0].dtype.itemsize):
            group = [tensors[i] for i in run if tensors[i].numel() > 0]
            if len(group) == 1:
                self._group.broadcast(as_bytes(group[0]), root)
            elif group:
                packed = self._pack("own", group)
                self._group.broadcast(as_bytes(packed), root)
                if self._member != root:
                    _unpack(packed, group)

    def alltoall(
        self,
        input: torch.Tensor,
        output: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        size = input.dtype.itemsize
        self._group.alltoall(
            as_bytes(output),
            as_bytes(input[: sum(send_counts)]),  # rows beyond the counts stay at home
            [count * size for count in receive_counts],
            [count * size for count in send_counts],
        )

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
        dtype, n, me = inputs[0].dtype, self._num_members, self._member
        rule = reduction(op, dtype, prescale, postscale, n)
        for run in runs([tensor.numel() for tensor in inputs], self._piece_bytes // dtype.itemsize):
            totals = [sum(counts[i][m] for i in run) for m in range(n)]
            if sum(totals) == 0:
                continue
            if len(run) == 1 and not rule.prescales:
                packed = inputs[run[0]]
            else:
                packed = self._buffers.take("own", sum(totals), dtype)
                targets = iter(packed.split([counts[i][m] for m in range(n) for i in run]))
                parts = [inputs[i].split(list(counts[i])) for i in run]
                for m in range(n):
                    for part in parts:
                        rule.prepare(part[m], next(targets))
            received = self._buffers.take("received", n * totals[me], dtype)
            self.alltoall(packed, received, totals, [totals[me]] * n)
            _combine(rule, received, n, received[: totals[me]], self._buffers)
            reduced = received[: totals[me]].split([counts[i][me] for i in run])
            for i, part in zip(run, reduced, strict=True):
                rule.finish(part, outputs[i])

    def barrier(self) -> None:
        n = self._num_members
        bells = self._buffers.take("bells", 2 * n, torch.uint8)
        self._group.alltoall(bells[:n], bells[n:], [1] * n, [1] * n)

    def close(self) -> None:
        self._group.close()
        self._buffers.clear()

    def abort(self) -> None:
        """Give up what is under way; every later call fails."""
        self._group.discard()

    # Each of the following reduces one piece.

    def _reduce_natively(
        self, sources: list[torch.Tensor], results: list[torch.Tensor], total: int, op: int, rule: Reduction
    ) -> None:
        assert isinstance(self._group, NcclGroup)
        if len(sources) == 1:
            work = results[0]
            if rule.prescales or work.data_ptr() != sources[0].data_ptr():
                rule.prepare(sources[0], work)
        else:
            work = self._prepare("own", sources, total, rule)
        self._group.allreduce(work, op)
        rule.finish_(work)
        if len(sources) > 1:
            _unpack(work, results)

    def _reduce_with_partner(
        self, sources: list[torch.Tensor], results: list[torch.Tensor], total: int, rule: Reduction
    ) -> None:
        """Two members swap everything and both compute the same: one step, and no more traffic than two."""
        single = len(sources) == 1
        own = sources[0] if single and not rule.prescales else self._prepare("own", sources, total, rule)
        other = self._buffers.take("other", total, own.dtype)
        self._swap(own, other, 1 - self._member)
        operands = (own, other) if self._member == 0 else (other, own)
        out = results[0] if single else other
        rule.combine(operands, out, other)
        rule.finish_(out)
        if not single:
            _unpack(out, results)

    def _reduce_in_one_step(
        self, sources: list[torch.Tensor], results: list[torch.Tensor], total: int, rule: Reduction
    ) -> None:
        n = self._num_members
        own = self._prepare("own", sources, total, rule)
        copies = self._buffers.take("copies", n * total, own.dtype)
        copies.view(n, total).copy_(own)
        received = self._buffers.take("received", n * total, own.dtype)
        self.alltoall(copies, received, [total] * n, [total] * n)
        _combine(rule, received, n, own, self._buffers)
        rule.finish_(own)
        _unpack(own, results)

    def _reduce_in_two_steps(
        self, sources: list[torch.Tensor], results: list[torch.Tensor], total: int, rule: Reduction
    ) -> None:
        """Member m receives slice m of everybody and combines it; then everybody receives all slices."""
        n, me = self._num_members, self._member
        slices = spread(total, n)
        direct = len(sources) == 1 and total % n == 0
        own = sources[0] if direct and not rule.prescales else self._prepare("own", sources, total, rule)
        received = self._buffers.take("received", n * slices[me], own.dtype)
        self.alltoall(own, received, slices, [slices[me]] * n)
        reduced = self._buffers.take("reduced", slices[0], own.dtype)
        _combine(rule, received, n, reduced[: slices[me]], self._buffers)
        rule.finish_(reduced[: slices[me]])
        gathered = results[0] if direct else self._buffers.take("gathered", n * slices[0], own.dtype)
        self._group.allgather(as_bytes(gathered), as_bytes(reduced))
        if not direct:
            _unpack(gathered, results)

    # Moving bytes.

    def _swap(self, own: torch.Tensor, other: torch.Tensor, partner: int) -> None:
        counts = [own.numel() if m == partner else 0 for m in range(self._num_members)]
        if sum(counts):
            self.alltoall(own, other, counts, counts)

    def _gather(self, own: torch.Tensor, gathered: torch.Tensor, counts: Sequence[int]) -> None:
        """One tensor of everybody; `gathered` is contiguous in member order."""
        n, total = self._num_members, sum(counts)
        if total == 0:
            return
        if all(count == counts[0] for count in counts):
            self._group.allgather(as_bytes(gathered), as_bytes(own))
        elif total * own.dtype.itemsize <= _ONE_STEP_BYTES * n:
            copies = self._buffers.take("copies", n * own.numel(), own.dtype)
            copies.view(n, own.numel()).copy_(own)
            self.alltoall(copies, gathered, [own.numel()] * n, counts)
        else:
            for m, part in enumerate(gathered.split(list(counts))):
                if m == self._member:
                    part.copy_(own)
                if counts[m]:
                    self._group.broadcast(as_bytes(part), m)

    def _pack(self, purpose: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        packed = self._buffers.take(purpose, sum(t.numel() for t in tensors), tensors[0].dtype)
        return torch.cat(list(tensors), out=packed)

    def _prepare(self, purpose: str, sources: list[torch.Tensor], total: int, rule: Reduction) -> torch.Tensor:
        packed = self._buffers.take(purpose, total, rule.dtype)
        torch.cat(sources, out=packed)
        rule.prepare_(packed)
        return packed


def _unpack(packed: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    offset = 0
    for output in outputs:
        output.copy_(packed[offset : offset + output.numel()])
        offset += output.numel()


def _combine(rule: Reduction, received: torch.Tensor, n: int, out: torch.Tensor, buffers: Buffers) -> None:
    """`received` holds the members' parts one after another; `out` may be the first of them."""
    count = out.numel()
    if count:
        scratch = buffers.take("scratch", count, rule.dtype)
        rule.combine(received[: n * count].split(count), out, scratch)
