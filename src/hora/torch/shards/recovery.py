"""The commit from which a new world goes on: decided from the survivors' reports, in pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from hora.torch.shards.vault import ShardLayout

Key = tuple[int, int]  # of a vault


@dataclass(frozen=True)
class Holdings:
    """The commits that a rank of the new world holds: for each of its vaults, by rank of the vault's world."""

    is_founder: bool  # it has been there since the start of the job
    vaults: Mapping[Key, Mapping[int, Collection[int]]]


@dataclass(frozen=True)
class Source:
    """A commit of which every shard is there. `holders`: by rank of its world, ranks of the new one with its slot."""

    key: Key
    number: int
    layouts: Sequence[ShardLayout]
    holders: Mapping[int, Sequence[int]]

    def metadata(self) -> Metadata:
        """Return the commit's tensors as torch.distributed.checkpoint describes those of a checkpoint."""
        tensors: dict[str, TensorStorageMetadata] = {}
        # Replicas have the same index.
        for item in {item.index: item for layout in self.layouts for item in layout.plan.items}.values():
            data = item.tensor_data
            assert data is not None
            empty = TensorStorageMetadata(data.properties, data.size, [])
            tensors.setdefault(item.index.fqn, empty).chunks.append(data.chunk)
        return Metadata(dict(tensors))


def choose_root(reports: Sequence[Holdings]) -> int | None:
    """Return the first rank with the newest vaults; None if no rank has one. It decides for all."""
    having = [rank for rank, report in enumerate(reports) if report.vaults]
    return max(having, key=lambda rank: (sorted(reports[rank].vaults, reverse=True), -rank), default=None)


def choose(reports: Sequence[Holdings], layouts: Mapping[Key, Sequence[ShardLayout]]) -> Source | str:
    """Return the newest commit of which every shard is there; otherwise what is missing."""
    missing = "no rank has finished a commit"
    for key in sorted(layouts, reverse=True):
        found = [report.vaults.get(key, {}) for report in reports]
        numbers = {number for vault in found for some in vault.values() for number in some}
        for number in sorted(numbers, reverse=True):
            holders = {
                old: [rank for rank, vault in enumerate(found) if number in vault.get(old, ())]
                for old in range(len(layouts[key]))
            }
            present = {old: ranks for old, ranks in holders.items() if ranks}
            if not lacking(layouts[key], present):
                return Source(key, number, layouts[key], present)
            gone = sorted(set(holders) - set(present))
            hosts = sorted({layouts[key][old].host for old in gone})
            missing = f"commit {number} lacks the shards of the former rank(s) {gone} on {', '.join(hosts)}"
    return missing


def lacking(layouts: Sequence[ShardLayout], present: Iterable[int]) -> set[MetadataIndex]:
    """Return the pieces that none of these ranks has."""
    here = {piece.index for rank in present for piece in layouts[rank].pieces}
    return {piece.index for layout in layouts for piece in layout.pieces if piece.num_bytes} - here


def keepers_of(layouts: Sequence[ShardLayout], homes: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return for each rank that has pieces which no other home has the rank of the next home that keeps a copy."""
    keepers = {}
    for index, home in enumerate(homes):
        others = [rank for other in homes if other is not home for rank in other]
        only_here = lacking(layouts, others)
        following = homes[(index + 1) % len(homes)]
        for position, rank in enumerate(home):
            if others and any(piece.index in only_here for piece in layouts[rank].pieces):
                keepers[rank] = following[position % len(following)]
    return keepers
