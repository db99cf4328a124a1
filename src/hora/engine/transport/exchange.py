"""What a carrier does with its slice between the hosts: `ours`, what this host has, and `theirs`, what comes.

Two hosts swap. Of more, each carrier combines one part of the slice and gathers the other parts, so that `theirs` is the
result; a small slice goes to all of them as it is. With a code the bytes on the way are fewer, and `ours` becomes what was
sent. An exchange is started and finished later; several are under way in different turns. Used by `relay`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from hora.engine.transport.arithmetic import Arithmetic
from hora.engine.transport.codes import Code
from hora.engine.transport.group import Group, Pending, Sockets
from hora.engine.transport.packing import Buffers, as_bytes

__all__ = ["Exchange", "Swap", "make_exchange"]

# Up to here a slice goes to all other hosts as it is, in one step instead of two.
_ONE_STEP_BYTES = 16 * 2**10


class Exchange(ABC):
    """One carrier's, with those of the other hosts. `between` combines the hosts' numbers; a `residual` is what a code has
    lost before of the slice, see `Code`."""

    def __init__(self, group: Group, host: int, num_hosts: int, between: Arithmetic, buffers: Buffers) -> None:
        self._group, self._host, self._num_hosts = group, host, num_hosts
        self._between, self._buffers = between, buffers

    def room(self, count: int) -> int:
        """How many elements `ours` and `theirs` must have for a slice of so many."""
        return count

    @abstractmethod
    def start(self, turn: int, ours: torch.Tensor, theirs: torch.Tensor, residual: torch.Tensor | None) -> Pending:
        """Begin to send and to receive."""

    @abstractmethod
    def finish(self, turn: int, pending: Pending, theirs: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Wait for it. Then `theirs` is what the other host has; of more than two hosts, what all have together."""

    def sockets(self, num_slices: int, slice_bytes: int) -> Sockets | None:
        """To and from the other one of two hosts, where numbers travel as they are, for so many slices each way."""
        return None

    def using_sockets(self) -> contextlib.AbstractContextManager[None]:
        """While another than this exchange sends and receives through them."""
        return self._group.using_sockets()

    def _swap(self, ours: torch.Tensor, theirs: torch.Tensor) -> Pending:
        """With the other one of two hosts."""
        counts = [0, ours.numel()] if self._host == 0 else [ours.numel(), 0]
        return self._group.start_alltoall(theirs, ours, counts, counts)

    def _combine(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        scratch = self._buffers.take("scratch", out.numel(), out.dtype)
        self._between.reduce(parts, out, scratch)


class Swap(Exchange):
    """Two hosts."""

    def sockets(self, num_slices: int, slice_bytes: int) -> Sockets | None:
        return self._group.sockets_with(1 - self._host, num_slices, slice_bytes)

    def start(self, turn: int, ours: torch.Tensor, theirs: torch.Tensor, residual: torch.Tensor | None) -> Pending:
        return self._swap(ours, theirs)

    def finish(self, turn: int, pending: Pending, theirs: torch.Tensor, residual: torch.Tensor | None) -> None:
        self._group.finish(pending)


class _CodedSwap(Exchange):
    """Two hosts, in fewer bytes."""

    def __init__(
        self, group: Group, host: int, num_hosts: int, between: Arithmetic, buffers: Buffers, code: Code
    ) -> None:
        super().__init__(group, host, num_hosts, between, buffers)
        self._code = code

    def start(self, turn: int, ours: torch.Tensor, theirs: torch.Tensor, residual: torch.Tensor | None) -> Pending:
        num_bytes = self._code.num_bytes(ours.numel())
        sent = self._buffers.take(f"sent{turn}", num_bytes, torch.uint8)
        self._code.encode(ours, sent, residual, self._buffers)
        return self._swap(sent, self._buffers.take(f"gathered{turn}", num_bytes, torch.uint8))

    def finish(self, turn: int, pending: Pending, theirs: torch.Tensor, residual: torch.Tensor | None) -> None:
        self._group.finish(pending)
        num_bytes = self._code.num_bytes(theirs.numel())
        self._code.decode(self._buffers.take(f"gathered{turn}", num_bytes, torch.uint8), theirs)


class _Sharing(Exchange):
    """More hosts: host h combines part h of the slice. Parts are of one size: the last one may reach beyond the slice."""

    def room(self, count: int) -> int:
        return self._num_hosts * self._part(count)

    def start(self, turn: int, ours: torch.Tensor, theirs: torch.Tensor, residual: torch.Tensor | None) -> Pending:
        gathered = self._gathered(turn, ours)
        if self._in_one_step(ours):
            return self._group.start_allgather(as_bytes(gathered), as_bytes(ours))
        counts = [ours.numel() // self._num_hosts] * self._num_hosts
        return self._group.start_alltoall(gathered, ours, counts, counts)

    def finish(self, turn: int, pending: Pending, theirs: torch.Tensor, residual: torch.Tensor | None) -> None:
        self._group.finish(pending)
        gathered = self._gathered(turn, theirs)
        if self._in_one_step(theirs):
            self._combine(gathered.split(theirs.numel()), theirs)
            return
        part = theirs.numel() // self._num_hosts
        mine = theirs[self._host * part : (self._host + 1) * part]
        self._combine(gathered.split(part), mine)
        self._group.finish(self._group.start_allgather(as_bytes(theirs), as_bytes(mine)))

    def _part(self, count: int) -> int:
        return -(-count // self._num_hosts)

    def _in_one_step(self, slice: torch.Tensor) -> bool:
        return slice.nbytes <= _ONE_STEP_BYTES

    def _gathered(self, turn: int, slice: torch.Tensor) -> torch.Tensor:
        count = slice.numel() * (self._num_hosts if self._in_one_step(slice) else 1)
        return self._buffers.take(f"gathered{turn}", count, slice.dtype)


class _CodedSharing(_Sharing):
    """More hosts, in fewer bytes: each part is encoded by itself, and so is what becomes of it."""

    def __init__(
        self, group: Group, host: int, num_hosts: int, between: Arithmetic, buffers: Buffers, code: Code
    ) -> None:
        super().__init__(group, host, num_hosts, between, buffers)
        self._code = code

    def start(self, turn: int, ours: torch.Tensor, theirs: torch.Tensor, residual: torch.Tensor | None) -> Pending:
        part = ours.numel() // self._num_hosts
        sent, gathered = self._coded(f"sent{turn}", part), self._coded(f"gathered{turn}", part)
        lost: Sequence[torch.Tensor | None] = [None] * self._num_hosts
        if residual is not None:
            padded = self._padded(turn, part)
            padded[: residual.numel()].copy_(residual)
            padded[residual.numel() :].zero_()
            lost = padded.split(part)
        for numbers, out, residual_part in zip(ours.split(part), sent, lost, strict=True):
            self._code.encode(numbers, out, residual_part, self._buffers)
        counts = [sent[0].numel()] * self._num_hosts
        return self._group.start_alltoall(_joined(gathered), _joined(sent), counts, counts)

    def finish(self, turn: int, pending: Pending, theirs: torch.Tensor, residual: torch.Tensor | None) -> None:
        self._group.finish(pending)
        part, dtype = theirs.numel() // self._num_hosts, theirs.dtype
        gathered = self._coded(f"gathered{turn}", part)
        decoded = self._buffers.take("decoded", self._num_hosts * part, dtype).split(part)
        for data, numbers in zip(gathered, decoded, strict=True):
            self._code.decode(data, numbers)
        mine = theirs.split(part)[self._host]
        self._combine(decoded, mine)
        wanted = decoded[0].copy_(mine) if residual is not None else None
        self._code.encode(mine, gathered[self._host], None, self._buffers)
        if residual is not None and wanted is not None:  # what is lost of all hosts' sum, this host adds the next time
            padded = self._padded(turn, part)
            padded.split(part)[self._host].add_(wanted.sub_(mine).nan_to_num_(0.0, 0.0, 0.0))
            residual.copy_(padded[: residual.numel()])
        self._group.finish(self._group.start_allgather(_joined(gathered), gathered[self._host]))
        for data, numbers in zip(gathered, theirs.split(part), strict=True):
            self._code.decode(data, numbers)

    def _padded(self, turn: int, part: int) -> torch.Tensor:
        """Room for the residual of every part."""
        return self._buffers.take(f"residual{turn}", self._num_hosts * part, torch.float32)

    def _coded(self, purpose: str, part: int) -> Sequence[torch.Tensor]:
        """Room for the bytes of every part."""
        num_bytes = self._code.num_bytes(part)
        return self._buffers.take(purpose, self._num_hosts * num_bytes, torch.uint8).split(num_bytes)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """What was split."""
    first = parts[0]
    return first.as_strided((first.numel() * len(parts),), (1,))


def make_exchange(
    group: Group, host: int, num_hosts: int, between: Arithmetic, buffers: Buffers, code: Code | None
) -> Exchange:
    if code is not None:
        coded = _CodedSwap if num_hosts == 2 else _CodedSharing
        return coded(group, host, num_hosts, between, buffers, code)
    return (Swap if num_hosts == 2 else _Sharing)(group, host, num_hosts, between, buffers)
