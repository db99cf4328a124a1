"""CUDA tensors of members that share a GPU, through the GPU's own memory.

Every member has two slots there that all members map. In a step each member writes its data to one of its slots; when
its stream has done so, it increments a counter in the host's shared memory. Once all have done so, each member reads
all slots and computes the result in member order, so with the same bits everywhere. No member waits for the last part:
it is ordered on the stream. The next step uses the other slots; a member that reports its data for that step has read
the slots of this one, because its stream is ordered.

A GPU switches between processes in about a tenth of a millisecond, so few steps with much data each are fast. Small
data goes through host memory (`CudaStagingTransport`), and so do Adasum and alltoall. No wait is on the GPU: the
liveness check handles a dead peer. `CudaTransport` creates it; all calls use one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from hora.engine.request import Reduce, ReduceOp
from hora.engine.shm.counters import MEMBER_BYTES, Counters
from hora.engine.shm.segment import Segment
from hora.engine.transport.arithmetic import arithmetic_of
from hora.engine.transport.base import Membership, Tensors, Transport
from hora.engine.transport.cuda_ipc import DriverError, Mapped, Shared
from hora.engine.transport.cuda_staging import CudaStagingTransport, mark, wait_for
from hora.engine.transport.packing import Buffers, pack, portions, unpack

# Below this much per member, process switches on the GPU take longer than the path through the host.
SMALL_BYTES = 2**20
_FIRST_SLOT_BYTES = 4 * 2**20
_LARGEST_SLOT_BYTES = 128 * 2**20
_KEEP_BYTES = 128 * 2**20


class DeviceMemoryTransport(CudaStagingTransport):
    """`CudaStagingTransport` with a way through the GPU's memory for much data.

    `segment`: zeroed host memory of `num_bytes` for the counters, shared by all members.

    `exchange(words)` is collective and returns what each member passed. Raises DriverError on all members
    if they cannot share memory of this GPU.
    """

    def __init__(
        self,
        segment: Segment,
        exchange: Callable[[str], list[str]],
        membership: Membership,
        device: torch.device,
        cpu: Transport,
    ) -> None:
        super().__init__(cpu)
        self.name = "cuda-ipc"
        self._exchange = exchange
        self._member, self._num_members, self._check_alive = member, num_members, _ = membership
        self._segment = segment
        self._counters = Counters(segment.memory, 0, member, num_members)
        self._step = 0
        self._on_gpu = Buffers(device, _KEEP_BYTES)
        self._most_bytes = _LARGEST_SLOT_BYTES  # of a slot; less if the GPU has little to spare
        self._memory = _Slots(exchange, member, num_members, _FIRST_SLOT_BYTES)

    @staticmethod
    def num_bytes(num_members: int) -> int:
        """Return the size of the counters."""
        return MEMBER_BYTES * num_members

    def allreduce(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        dtype = inputs[0].dtype
        count = sum(tensor.numel() for tensor in inputs)
        if reduce.op == ReduceOp.ADASUM or self.stages(count * dtype.itemsize):
            super().allreduce(inputs, outputs, reduce)
            return
        arithmetic = arithmetic_of(reduce, dtype, self._num_members)
        for sources, results in portions(inputs, outputs, self._slot_bytes(count * dtype.itemsize) // dtype.itemsize):
            sizes = [source.numel() for source in sources]
            own, slots = self._turn(sum(sizes), dtype)
            if arithmetic.prescales:
                for source, part in zip(sources, own.split(sizes), strict=True):
                    arithmetic.prepare(source, part)
            else:
                pack(sources, own)
            self._publish("allreduce")
            out = results[0] if len(results) == 1 else self._on_gpu.get("out", sum(sizes), dtype)
            arithmetic.reduce(slots, out)
            if len(results) > 1:
                unpack(out, results)

    def allgather(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]]) -> None:
        dtype = inputs[0].dtype
        if self.stages(sum(map(sum, counts)) * dtype.itemsize):
            super().allgather(inputs, outputs, counts)
            return
        for source, output, sizes in zip(inputs, outputs, counts, strict=True):
            self._gather(source, output.split(list(sizes)))

    def _gather(self, source: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        most = max(part.numel() for part in parts)
        limit = self._slot_bytes(most * source.dtype.itemsize) // source.dtype.itemsize
        for start in range(0, most, limit):
            here = slice(start, start + limit)
            own, slots = self._turn(min(limit, most - start), source.dtype)
            piece = source[here]
            own[: piece.numel()].copy_(piece)
            self._publish("allgather")
            for part, slot in zip(parts, slots, strict=True):
                target = part[here]
                target.copy_(slot[: target.numel()])

    def broadcast(self, tensors: Tensors, root: int) -> None:
        dtype = tensors[0].dtype
        count = sum(tensor.numel() for tensor in tensors)
        if self.stages(count * dtype.itemsize):
            super().broadcast(tensors, root)
            return
        for group, _ in portions(tensors, tensors, self._slot_bytes(count * dtype.itemsize) // dtype.itemsize):
            own, slots = self._turn(sum(tensor.numel() for tensor in group), dtype)
            if self._member == root:
                pack(group, own)
            self._publish("broadcast")
            if self._member != root:
                unpack(slots[root], group)

    def reducescatter(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]], reduce: Reduce) -> None:
        dtype = inputs[0].dtype
        if self.stages(sum(map(sum, counts)) * dtype.itemsize):
            super().reducescatter(inputs, outputs, counts, reduce)
            return
        for source, output, sizes in zip(inputs, outputs, counts, strict=True):
            self._reduce_and_scatter(source.split(list(sizes)), output, reduce)

    def _reduce_and_scatter(self, parts: Sequence[torch.Tensor], output: torch.Tensor, reduce: Reduce) -> None:
        """Reduce and scatter; `parts[m]` is member m's part."""
        dtype, num_members, me = output.dtype, self._num_members, self._member
        arithmetic = arithmetic_of(reduce, dtype, num_members)
        most = max(part.numel() for part in parts)
        cell = min(self._slot_bytes(num_members * most * dtype.itemsize) // dtype.itemsize // num_members, most)
        for start in range(0, most, max(cell, 1)):
            here = slice(start, start + cell)
            own, slots = self._turn(num_members * cell, dtype)
            for part, place in zip(parts, own.split(cell), strict=True):
                piece = part[here]
                arithmetic.prepare(piece, place[: piece.numel()])
            self._publish("reducescatter")
            result = output[here]
            count = result.numel()
            mine = [slot[me * cell : me * cell + count] for slot in slots]
            arithmetic.reduce(mine, result)

    def close(self) -> None:
        with suppress(DriverError):  # at process exit the driver may be gone
            self._memory.close()
        super().close()
        self._on_gpu.clear()
        self._counters.close()
        self._segment.close()

    def stages(self, num_bytes: int) -> bool:
        return num_bytes < SMALL_BYTES * self._num_members

    def _slot_bytes(self, num_bytes: int) -> int:
        """Return the bytes of a slot, after growing it for an operation of this size, alike on all members."""
        wanted = min(1 << max(num_bytes - 1, 0).bit_length(), self._most_bytes)
        if wanted > self._memory.slot_bytes:
            self._grow(wanted)
        return self._memory.slot_bytes

    def _grow(self, slot_bytes: int) -> None:
        try:
            larger = _Slots(self._exchange, self._member, self._num_members, slot_bytes)
        except DriverError:
            self._most_bytes = self._memory.slot_bytes
            return
        self._step += 1
        self._publish("larger slots")  # afterwards no member reads the memory released here
        smaller, self._memory = self._memory, larger
        smaller.unmap()
        self._step += 1
        self._publish("larger slots")  # afterwards no member has it mapped
        smaller.close()

    def _turn(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the slots of the next step: this member's, to be filled, and those of all, to be read later."""
        self._step += 1
        slots = self._memory.views(self._step % 2, count, dtype)
        return slots[self._member], slots

    def _publish(self, what: str) -> None:
        """Wait until every member has written its data to the slots of this step."""
        wait_for(mark(), self._check_alive)
        self._counters.meet(self._step, self._check_alive, what=what)


class _Slots:
    """Two slots of every member, on the current GPU. Raises DriverError on all members if one of them fails."""

    def __init__(self, exchange: Callable[[str], list[str]], member: int, num_members: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._own: Shared | None = None
        self._turns: list[list[torch.Tensor]] = []
        self._others: dict[int, Mapped] = {}
        try:
            self._make(exchange, member, num_members)
        except BaseException:
            self.close()
            raise
        own = self._own
        assert own is not None
        whole = [own.tensor() if peer == member else self._others[peer].tensor() for peer in range(num_members)]
        self._turns = [[memory[turn * slot_bytes :][:slot_bytes] for memory in whole] for turn in range(2)]

    def _make(self, exchange: Callable[[str], list[str]], member: int, num_members: int) -> None:
        handle = problem = ""
        try:
            self._own = Shared(2 * self.slot_bytes)
            handle = self._own.handle
        except DriverError as error:
            problem = str(error)
        handles = exchange(handle)
        if all(handles):
            try:
                for peer in range(num_members):
                    if peer != member:
                        self._others[peer] = Mapped(handles[peer], 2 * self.slot_bytes)
            except DriverError as error:
                problem = str(error)
        problems = [words for words in exchange(problem) if words]
        if problems:
            raise DriverError(problems[0])

    def views(self, turn: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
        num_bytes = count * dtype.itemsize
        return [slot[:num_bytes].view(dtype) for slot in self._turns[turn]]

    def unmap(self) -> None:
        """Unmap the others' memory."""
        self._turns = []
        for mapped in self._others.values():
            mapped.close()
        self._others.clear()

    def close(self) -> None:
        self.unmap()
        if self._own is not None:
            self._own.close()
            self._own = None
