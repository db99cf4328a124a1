"""Which Spark task becomes which rank, and which GPUs it may see. Pure functions: no Spark, no process, no
clock.

Called by the Spark launcher once every task of a stage has said where it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hora.launch.hosts import HostInfo, get_host_assignments
from hora.launch.job import Slot

__all__ = ["Placement", "TaskPlace", "place_tasks"]


@dataclass(frozen=True, kw_only=True)
class TaskPlace:
    """Where a Spark task runs: its partition, the hash of its host, the addresses of the GPUs Spark gave
    it.
    """

    task: int
    host: str
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A rank's slot, the task that carries it, the task's GPUs, and those the rank should see."""

    slot: Slot
    task: int
    own_gpus: tuple[str, ...]
    visible_gpus: tuple[str, ...]


def place_tasks(tasks: Sequence[TaskPlace]) -> list[Placement]:
    """Ranks for the tasks, in rank order.

    Ranks are consecutive within a host, so that neighbours share memory. Hosts are ordered by their hash
    and rotated until the host of task 0 comes first; within a host the order of the tasks is kept.
    """
    by_host: dict[str, list[TaskPlace]] = {}
    for place in sorted(tasks, key=lambda place: place.task):
        by_host.setdefault(place.host, []).append(place)
    first = next(iter(by_host))
    names = sorted(by_host)
    names = names[names.index(first) :] + names[: names.index(first)]
    slots = get_host_assignments([HostInfo(name, len(by_host[name])) for name in names], len(tasks))
    placements: list[Placement] = []
    for info in slots:
        neighbours = by_host[info.hostname]
        own = neighbours[info.local_rank]
        placements.append(
            Placement(
                slot=Slot(**vars(info)),
                task=own.task,
                own_gpus=own.gpus,
                visible_gpus=_visible(own, neighbours),
            )
        )
    return placements


def _visible(own: TaskPlace, neighbours: Sequence[TaskPlace]) -> tuple[str, ...]:
    """All GPUs of the tasks on a host: first everybody's first one in local rank order, then the rest.

    `torch.cuda.set_device(hvd.local_rank())` then picks a GPU that Spark gave to this very task. Where
    tasks share a GPU (fractional amounts) no such order exists, because CUDA refuses a device named twice:
    a rank sees its own only.
    """
    firsts = [place.gpus[0] for place in neighbours if place.gpus]
    if len(set(firsts)) < len(neighbours):
        return own.gpus
    rest = [gpu for place in neighbours for gpu in place.gpus[1:]]
    return tuple(dict.fromkeys(firsts + rest))
