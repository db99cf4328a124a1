"""Resharding in memory: every rank gets the parts of a commit that it needs now, as torch.distributed.checkpoint plans.

Parts in this host's memory are copied from there. The other parts are asked for: every rank announces its wishes, and
one exchange between all ranks carries the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem

from hora.torch.functions import allgather_object
from hora.torch.shards.recovery import Source
from hora.torch.shards.vault import Vault


class _Part(NamedTuple):
    """A part of a piece of a commit."""

    old_rank: int
    piece: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        for dimension, (offset, length) in enumerate(zip(self.offsets, self.lengths, strict=True)):
            tensor = tensor.narrow(dimension, offset, length)
        return tensor


@torch.no_grad()
def reshard(targets: Mapping[str, torch.Tensor], source: Source, vault: Vault | None, rank: int, size: int) -> None:
    """Fill tensors from a commit (collective). `vault`: the commit's, if this rank has it."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), source.metadata())
    wanted: dict[int, list[tuple[_Part, torch.Tensor]]] = {holder: [] for holder in range(size)}
    places = _places(source)
    for item in planner.create_local_plan().items:
        target = planner.resolve_tensor(item).detach()
        candidates = [_part(item, place) for place in places[item.storage_index]]
        near = next((part for part in candidates if rank in source.holders[part.old_rank]), None)
        if near is not None:
            assert vault is not None
            target.copy_(near.of(vault.slot(near.old_rank, source.number).piece(near.piece)))
        else:
            holders = source.holders[candidates[0].old_rank]
            wanted[holders[rank % len(holders)]].append((candidates[0], target))
    _exchange(wanted, source, vault)


def _places(source: Source) -> dict[MetadataIndex, list[tuple[int, int]]]:
    """Return the ranks of the commit's world that have each piece, with its number in their slots."""
    found: dict[MetadataIndex, list[tuple[int, int]]] = {}
    for old_rank in source.holders:
        for number, piece in enumerate(source.layouts[old_rank].pieces):
            found.setdefault(piece.index, []).append((old_rank, number))
    return found


def _part(item: ReadItem, place: tuple[int, int]) -> _Part:
    return _Part(*place, tuple(item.storage_offsets), tuple(item.lengths))


def _exchange(wanted: Mapping[int, Sequence[tuple[_Part, torch.Tensor]]], source: Source, vault: Vault | None) -> None:
    """Send the parts that others want, and fill the tensors of this rank (collective)."""
    wishes = [[part for part, _ in wanted[holder]] for holder in sorted(wanted)]
    of_all: list[list[list[_Part]]] = allgather_object(wishes, "elastic.wanted_shards")
    if not any(parts for its in of_all for parts in its):
        return
    rank = dist.get_rank()
    outgoing = [[_bytes(part, source, vault) for part in its[rank]] for its in of_all]
    sent = [sum(data.numel() for data in some) for some in outgoing]
    expected = [sum(target.numel() * target.itemsize for _, target in wanted[holder]) for holder in sorted(wanted)]
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    received = torch.empty(sum(expected), dtype=torch.uint8, device="cpu")
    dist.all_to_all_single(received, torch.cat([empty, *_flat(outgoing)]), expected, sent)
    at = 0
    for holder in sorted(wanted):
        for _, target in wanted[holder]:
            num_bytes = target.numel() * target.itemsize
            # A copy, because a dtype's elements must be aligned.
            data = received[at : at + num_bytes].clone().view(target.dtype)
            target.copy_(data.view(target.shape))
            at += num_bytes


def _bytes(part: _Part, source: Source, vault: Vault | None) -> torch.Tensor:
    assert vault is not None
    piece = part.of(vault.slot(part.old_rank, source.number).piece(part.piece))
    return piece.contiguous().view(-1).view(torch.uint8)


def _flat(lists: Sequence[Sequence[torch.Tensor]]) -> Iterator[torch.Tensor]:
    for some in lists:
        yield from some
