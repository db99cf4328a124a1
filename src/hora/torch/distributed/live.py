"""The live process groups of this process, and how they follow it into another world.

A group's members are processes. Their numbers in the job stay when ranks change (`World.number`), so a group is carried
into a new world by the numbers of its members: the Python object stays, and with it every reference of torch's, such as
DDP's; rank and size change. A member that has no rank in the new world is dropped.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from hora.engine import Runtime
from hora.torch.distributed.calls import Calls

_number = itertools.count()
_live: weakref.WeakKeyDictionary[Calls, _Entry] = weakref.WeakKeyDictionary()


class _Entry:
    """The n-th group of this process: its name in the engine, and the numbers of its members in the job."""

    def __init__(self, name: str, members: Sequence[int]) -> None:
        self.created, self.name, self.members = next(_number), name, tuple(members)


def remember(group: Calls, name: str) -> None:
    """Add a group. Its members are those of its ranks in the current world."""
    workers = group.runtime.workers
    _live[group] = _Entry(name, [workers[rank] for rank in group.ranks])


def forget(group: Calls) -> None:
    """Remove a group that was destroyed."""
    _live.pop(group, None)


def live_groups() -> list[Calls]:
    """Return the groups that were not destroyed, in the order in which they were created."""
    return sorted(_live, key=lambda group: _live[group].created)


def name_of(group: Calls) -> str:
    """Return the name by which the group's members know one another in the engine."""
    return _live[group].name


def rename(group: Calls, name: str, members: Sequence[int]) -> None:
    """Make this process's group the one that these processes have; it may be carried into their world then."""
    _live[group].name, _live[group].members = name, tuple(members)


def members(group: Calls) -> tuple[int, ...]:
    """Return the numbers of the group's members in the job, in the order of their ranks in the group."""
    return _live[group].members


def carry(group: Calls, runtime: Runtime, admitted: Sequence[int] = (), *, limit_s: float) -> None:
    """Take a group into this runtime's world (collective among its members there), and tell torch.

    `admitted`: the numbers of processes that become members. Members follow the order of their ranks in the world.
    """
    entry, workers = _live[group], runtime.workers
    staying = {*entry.members, *admitted}
    ranks = [rank for rank, worker in enumerate(workers) if worker in staying]
    queue = runtime.sets.add_group(ranks, entry.name, limit_s=limit_s)
    group.enter(ranks.index(runtime.world.rank), len(ranks), runtime, queue)
    entry.members = tuple(workers[rank] for rank in ranks)
    _record_members()


def carry_all(runtime: Runtime, *, limit_s: float) -> None:
    """Take every live group into this runtime's world (collective among the members of each)."""
    for group in live_groups():
        carry(group, runtime, limit_s=limit_s)


def start_over(runtime: Runtime, default: Calls) -> None:
    """Take the default group into this runtime's world, with all of its ranks, and destroy every other group: the
    program makes them again (collective). A process that has just joined has made other groups than the others.
    """
    groups: list[Any] = [*dist.distributed_c10d._world.pg_map]
    for group in groups:
        if group is not default:
            dist.destroy_process_group(group)
    dist.distributed_c10d._world.group_count = 1  # names of new groups count on from that of the default group
    rename(default, f"world of generation {runtime.world.generation}", runtime.workers)
    carry(default, runtime, limit_s=default.limit_s)


def _record_members() -> None:
    """Tell torch the members of every group, by their ranks in the default group."""
    records: dict[Any, dict[int, int]] = dist.distributed_c10d._world.pg_group_ranks
    default: Any = dist.group.WORLD
    if default not in _live:
        return
    whole = members(default)
    for group, entry in _live.items():
        if group in records and set(entry.members) <= set(whole):
            records[group] = {whole.index(member): index for index, member in enumerate(entry.members)}
