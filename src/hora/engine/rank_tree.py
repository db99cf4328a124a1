"""The tree of ranks along which control messages and announcements travel. Pure."""

from __future__ import annotations

from collections.abc import Sequence

FANOUT = 4  # child hosts per host: with more, rank 0 needs longer per round; with fewer, a round takes more hops


def by_host(ranks: Sequence[int], hosts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return these ranks grouped by host: hosts in the order of their first ranks here, ranks in the given order."""
    places = {rank: place for place, rank in enumerate(ranks)}
    groups = [sorted((rank for rank in host if rank in places), key=places.__getitem__) for host in hosts]
    return sorted(filter(None, groups), key=lambda group: places[group[0]])


class Tree:
    """Tree of these hosts. The first rank of the first one is the root.

    The ranks of a host are below its first rank, the host leader; host leaders are below one another.
    """

    def __init__(self, hosts: Sequence[Sequence[int]]) -> None:
        self._parents: dict[int, int] = {}
        self._children: dict[int, list[int]] = {rank: [] for host in hosts for rank in host}
        for index, (leader, *others) in enumerate(hosts):
            self._parents |= dict.fromkeys(others, leader)
            if index:
                self._parents[leader] = hosts[(index - 1) // FANOUT][0]
        for rank, parent in self._parents.items():
            self._children[parent].append(rank)

    def parent(self, rank: int) -> int | None:
        """Return the parent of this rank; None for the root."""
        return self._parents.get(rank)

    def children(self, rank: int) -> list[int]:
        return self._children[rank]

    def neighbours(self, rank: int) -> list[int]:
        """Return the ranks with which this one communicates."""
        parent = self._parents.get(rank)
        return self._children[rank] if parent is None else [parent, *self._children[rank]]

    def above(self, rank: int) -> list[int]:
        """Return its ancestors, from its parent to the root."""
        path: list[int] = []
        while (parent := self._parents.get(path[-1] if path else rank)) is not None:
            path.append(parent)
        return path

    def below(self, rank: int) -> list[int]:
        """Return this rank and its descendants, in ascending order."""
        found = [rank]
        for one in found:
            found.extend(self._children[one])
        return sorted(found)

    def behind(self, rank: int, neighbour: int) -> set[int]:
        """Return the ranks that `rank` reaches through this neighbour, including the neighbour."""
        if neighbour == self._parents.get(rank):
            return self._children.keys() - set(self.below(rank))
        return set(self.below(neighbour))
