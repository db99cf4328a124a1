"""The division of a collective's data over several hosts: into portions, and among members, hosts and slice leaders.

No communication. `HierarchicalTransport` calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hora.engine.transport.packing import runs, unpack

__all__ = ["Division", "Portion", "consecutive", "portions", "where"]

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Division:
    """The division of one tensor among members, hosts and the slice leaders of this host.

    `counts[m]` elements belong to member m. A host's block is what belongs to its members, one after another, and
    `shares[h][c]` elements of host h's block are carried by slice leader c of every host.
    """

    hosts: Sequence[Sequence[int]]
    counts: Sequence[int]
    shares: Sequence[Sequence[int]]

    @property
    def carried(self) -> list[int]:
        """Return how much each member of this host carries, of all blocks together."""
        return [sum(shares) for shares in zip(*self.shares, strict=True)]

    def block(self, host: int) -> list[int]:
        """Return how much of a host's block belongs to each of its members."""
        return [self.counts[member] for member in self.hosts[host]]

    def by_leader(self, members: Tensors, out: torch.Tensor) -> None:
        """Bring the members' parts into the order of slice leaders: for each, its share of every host's block."""
        shares = self._shares(out)
        for number, host in enumerate(self.hosts):
            block = torch.cat([members[member] for member in host])
            unpack(block, shares[number :: len(self.hosts)])

    def by_member(self, arranged: torch.Tensor, members: Tensors) -> None:
        """Undo `by_leader`."""
        shares = self._shares(arranged)
        for number, host in enumerate(self.hosts):
            block = torch.cat(shares[number :: len(self.hosts)])
            unpack(block, [members[member] for member in host])

    def _shares(self, arranged: torch.Tensor) -> list[torch.Tensor]:
        return list(arranged.split([size for leader in zip(*self.shares, strict=True) for size in leader]))


@dataclass(frozen=True)
class Portion:
    """A part of an allgather or a reducescatter: for each of some tensors what is the member's own, and the parts of
    all members, with their sizes. Two are under way at a time, in different turns.
    """

    own: list[torch.Tensor]
    members: list[Tensors]
    counts: list[Sequence[int]]
    turn: int


def portions(own: Tensors, whole: Tensors, counts: Sequence[Sequence[int]], limit: int) -> Iterator[Portion]:
    """Portions of about `limit` elements: small tensors together, of large ones the next bit of every member's part."""
    turns = itertools.cycle((0, 1))
    for run in runs([sum(each) for each in counts], limit):
        parts = [whole[i].split(list(counts[i])) for i in run]
        most = max(max(counts[i]) for i in run)
        if len(run) > 1 or sum(counts[run[0]]) <= limit:
            if most:
                yield Portion([own[i] for i in run], list(parts), [counts[i] for i in run], next(turns))
            continue
        (number,), step = run, max(limit // len(parts[0]), 1)
        for start in range(0, most, step):
            bit = slice(start, start + step)
            members = [part[bit] for part in parts[0]]
            yield Portion([own[number][bit]], [members], [[part.numel() for part in members]], next(turns))


def consecutive(members: Iterable[int]) -> list[range]:
    """The members as ranges."""
    found: list[range] = []
    for member in members:
        if found and found[-1].stop == member:
            found[-1] = range(found[-1].start, member + 1)
        else:
            found.append(range(member, member + 1))
    return found


def where(parts: Sequence[torch.Tensor], members: range, whole: torch.Tensor) -> torch.Tensor:
    """Return the slices of these members' parts in the tensor that was split into all members' parts."""
    start = sum(part.numel() for part in parts[: members.start])
    return whole[start : start + sum(parts[member].numel() for member in members)]
