"""The tree in which ranks hear of one another: the ranks of a host below its first one, the hosts below one another.

The first rank of a host is its speaker. Its children are the other ranks of its host and the speakers of at most
`FANOUT` other hosts, so that no rank talks to more than its host and `FANOUT + 1` others, however many there are. The
world has a tree of all its ranks; a process set has one of its members alone, so that no rank holds up a set that it is
not in.

Pure: every rank derives the same tree from the same hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["FANOUT", "Tree"]

FANOUT = 4  # hosts below a host: with more, rank 0 works longer for a round; with fewer, a round takes more hops


class Tree:
    """Of these hosts, in the order of their first ranks, each with its ranks in ascending order. The first is root."""

    def __init__(self, hosts: Sequence[Sequence[int]]) -> None:
        self.root = hosts[0][0]
        self._parents: dict[int, int] = {}
        self._children: dict[int, list[int]] = {rank: [] for host in hosts for rank in host}
        for index, (speaker, *others) in enumerate(hosts):
            for rank in others:
                self._attach(rank, speaker)
            if index:
                self._attach(speaker, hosts[(index - 1) // FANOUT][0])

    def _attach(self, rank: int, parent: int) -> None:
        self._parents[rank] = parent
        self._children[parent].append(rank)

    def parent(self, rank: int) -> int | None:
        """The rank to which this one speaks; None for the root."""
        return self._parents.get(rank)

    def children(self, rank: int) -> list[int]:
        return self._children[rank]

    def neighbours(self, rank: int) -> list[int]:
        """The ranks with which this one speaks."""
        parent = self._parents.get(rank)
        return self._children[rank] if parent is None else [parent, *self._children[rank]]

    def above(self, rank: int) -> list[int]:
        """Its parent, the parent of that, and so on to the root."""
        path: list[int] = []
        while (parent := self._parents.get(path[-1] if path else rank)) is not None:
            path.append(parent)
        return path

    def below(self, rank: int) -> list[int]:
        """This rank and all that speak through it, in ascending order."""
        found = [rank]
        for one in found:
            found.extend(self._children[one])
        return sorted(found)

    def behind(self, rank: int, neighbour: int) -> set[int]:
        """The ranks of which `rank` hears through this neighbour, which is one of them."""
        if neighbour == self._parents.get(rank):
            return self._children.keys() - set(self.below(rank))
        return set(self.below(neighbour))
