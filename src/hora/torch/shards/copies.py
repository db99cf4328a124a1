"""Copies of commits on other hosts, sent beside the training on streams that are encrypted as all between hosts.

A rank sends the bytes of its slot, and the keeper receives them into its own vault. The next commit goes into the other
slot, and waits for the copies of this one first.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hora.errors import HorovodInternalError
from hora.torch.distributed.group import HoraProcessGroup
from hora.torch.shards.vault import CommitSlot, Vault


class Copies:
    """The copies of one world's commits that are under way, in a group of their own."""

    def __init__(self, default: HoraProcessGroup) -> None:
        self._group: HoraProcessGroup = default.among(range(default.size()))
        self._rank = default.rank()
        self._sent: list[Any] = []
        self._received: list[tuple[Any, CommitSlot, int]] = []

    def start(self, vault: Vault, number: int) -> None:
        """Send this rank's part of a commit, and receive those that it keeps."""
        for other, keeper in sorted(vault.keepers.items()):
            if keeper == self._rank:
                slot = vault.slot(other, number)
                slot.number = 0
                work = self._group.recv([slot.contents], other, 0)
                self._received.append((work, slot, number))
            if other == self._rank:
                self._sent.append(self._group.send([vault.slot(other, number).contents], keeper, 0))

    def finish(self) -> None:
        """Wait for all of them."""
        for work in self._sent:
            work.wait()
        for work, slot, number in self._received:
            work.wait()
            slot.number = number
        self._sent, self._received = [], []

    def end(self) -> None:
        """Keep those that have arrived before the end of their world, and forget the others."""
        for work, slot, number in self._received:
            try:
                if work.is_success():
                    slot.number = number
            except HorovodInternalError:
                continue
        self._sent, self._received = [], []
        self._group.shutdown()


def default_group() -> HoraProcessGroup:
    """Return the default group, if it is ours alone. Raises ValueError otherwise."""
    group: Any = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        raise ValueError(
            'a ShardedState in an elastic job needs init_process_group("hora") before the training function'
        )
    if not isinstance(group, HoraProcessGroup):
        raise ValueError(
            f'a ShardedState in an elastic job needs the backend "hora", but this process group has '
            f'"{dist.get_backend()}", which cannot go on without a lost rank: use init_process_group("hora")'
        )
    return group
