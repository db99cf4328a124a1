"""A vault: the memory of a world's commits, two slots for each rank.

All ranks of a host map the slots of all of them, and those for copies of ranks of other hosts. The memory belongs to no
process and has no name: a dead rank's slots stay as long as one rank of the host lives, and nothing outlives the last.

A slot: the number of its commit, or 0 while it is written; the size of the values; the tensors; the pickled values.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from hora.engine import Runtime
from hora.engine.shm.segment import Segment, aligned

_HEADER_BYTES = _LINE_BYTES = 64
_NUMBER_BYTES = 8
_LEAST_VALUES_BYTES = 2**16


@dataclass(frozen=True)
class Piece:
    """A rank's tensor, or shard of one, in its slots."""

    index: MetadataIndex  # the tensor's name and the shard's place in it
    shape: torch.Size
    dtype: torch.dtype
    at: int  # its first byte

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class ShardLayout:
    """The contents of a rank's slots, and their places."""

    host: str
    plan: SavePlan
    pieces: tuple[Piece, ...]
    values_at: int
    num_bytes: int

    @classmethod
    def of(cls, host: str, tensors: Mapping[str, torch.Tensor], num_value_bytes: int) -> ShardLayout:
        plan = create_default_local_save_plan(dict(tensors), False)
        at, pieces = _HEADER_BYTES, []
        for item in plan.items:
            assert item.tensor_data is not None
            piece = Piece(item.index, item.tensor_data.chunk.sizes, item.tensor_data.properties.dtype, at)
            pieces.append(piece)
            at += aligned(piece.num_bytes, _LINE_BYTES)
        room = max(_LEAST_VALUES_BYTES, 2 * num_value_bytes)  # they may grow
        return cls(host, plan, tuple(pieces), at, aligned(at + room))

    def fits(self, tensors: Mapping[str, torch.Tensor], num_value_bytes: int) -> bool:
        """Return whether a commit of these tensors has this layout."""
        if self.values_at + num_value_bytes > self.num_bytes or len(tensors) != len(self.pieces):
            return False
        for piece in self.pieces:
            tensor = tensors.get(piece.index.fqn)
            if tensor is None or local(tensor).shape != piece.shape or tensor.dtype != piece.dtype:
                return False
        return True


class CommitSlot:
    """Room for one commit of one rank."""

    def __init__(self, segment: Segment, at: int, layout: ShardLayout) -> None:
        self._layout = layout
        self.memory = segment.tensor(at, layout.num_bytes, torch.uint8)
        self._header = self.memory[:_HEADER_BYTES].view(torch.int64)
        self.contents = self.memory[_NUMBER_BYTES:]  # everything but the number
        self._pieces = [self._view(piece) for piece in layout.pieces]

    def _view(self, piece: Piece) -> torch.Tensor:
        return self.memory[piece.at : piece.at + piece.num_bytes].view(piece.dtype).view(piece.shape)

    @property
    def number(self) -> int:
        """The number of its commit; 0 if there is none, or an unfinished one."""
        return int(self._header[0])

    @number.setter
    def number(self, number: int) -> None:
        self._header[0] = number

    def write(self, number: int, tensors: Mapping[str, torch.Tensor], values: bytes) -> None:
        self.number = 0
        for piece, view in zip(self._layout.pieces, self._pieces, strict=True):
            view.copy_(local(tensors[piece.index.fqn]))
        self._header[1] = len(values)
        start = self._layout.values_at
        self.memory[start : start + len(values)] = torch.frombuffer(bytearray(values), dtype=torch.uint8)
        self.number = number

    def piece(self, index: int) -> torch.Tensor:
        return self._pieces[index]

    def values(self) -> dict[str, Any]:
        start = self._layout.values_at
        found: dict[str, Any] = pickle.loads(self.memory[start : start + int(self._header[1])].numpy().tobytes())
        return found


class Vault:
    """The slots of a world's ranks that are in this host's memory. `key`: the world's generation and a number in it.

    `homes`: the ranks that share memory. `keepers`: by rank, the rank of another home that receives its copies.
    """

    def __init__(
        self,
        key: tuple[int, int],
        layouts: Sequence[ShardLayout],
        homes: Sequence[Sequence[int]],
        keepers: Mapping[int, int],
        runtime: Runtime,
    ) -> None:
        self.key, self.layouts, self.keepers = key, layouts, keepers
        rank = runtime.world.rank
        (home,) = (ranks for ranks in homes if rank in ranks)
        kept = [*home, *(other for other, keeper in sorted(keepers.items()) if keeper in home)]
        num_bytes = sum(2 * layouts[other].num_bytes for other in kept)
        segment = _shared(runtime, home, num_bytes)
        self.slots: dict[int, tuple[CommitSlot, CommitSlot]] = {}
        at = 0
        for other in kept:
            size = layouts[other].num_bytes
            self.slots[other] = CommitSlot(segment, at, layouts[other]), CommitSlot(segment, at + size, layouts[other])
            at += 2 * size

    def slot(self, rank: int, number: int) -> CommitSlot:
        """Return the slot of this rank of the vault's world for this commit."""
        return self.slots[rank][number % 2]

    def numbers(self) -> dict[int, set[int]]:
        """Return the commits that are here, by rank of the vault's world."""
        return {rank: {slot.number for slot in slots} - {0} for rank, slots in self.slots.items()}


def homes_of(runtime: Runtime) -> list[list[int]]:
    """Return the ranks by the memory that they share."""
    if runtime.world.size == 1:
        return [[0]]
    homes: list[list[int]] = []
    for host in runtime.sharing:
        homes += [host] if runtime.peers.can_share(host) else [[rank] for rank in host]
    return homes


def _shared(runtime: Runtime, home: Sequence[int], num_bytes: int) -> Segment:
    if len(home) == 1:
        return Segment.create(num_bytes, label="hora-commits")
    segment = runtime.peers.share_or_none("commits", home, num_bytes)
    if segment is None:
        raise MemoryError(
            f"there is no room for {num_bytes / 2**20:.0f} MiB of commits in the memory of this host: two copies of "
            f"the state of its ranks {list(home)}; free memory, or start fewer ranks on it"
        )
    return segment


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
