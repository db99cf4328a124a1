"""Placement of ranks on Spark tasks, and the GPUs that they may see. Pure functions: no Spark, no process, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hora.launch.slots import Slot, place_ranks, visible_gpus

__all__ = ["Placement", "TaskPlace", "place_tasks"]


@dataclass(frozen=True, kw_only=True)
class TaskPlace:
    """Location of a Spark task: its partition, the hash of its host, the addresses of the GPUs Spark gave it."""

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

    Ranks are consecutive within a host, so that ranks beside one another share memory. Hosts are ordered by their hash
    and rotated until the host of task 0 comes first; within a host the order of the tasks is kept.
    """
    by_host: dict[str, list[TaskPlace]] = {}
    for place in sorted(tasks, key=lambda place: place.task):
        by_host.setdefault(place.host, []).append(place)
    first = next(iter(by_host))
    names = sorted(by_host)
    names = names[names.index(first) :] + names[: names.index(first)]
    ordered = [place for name in names for place in by_host[name]]
    slots = place_ranks([place.host for place in ordered])
    return [
        Placement(
            slot=slot,
            task=own.task,
            own_gpus=own.gpus,
            visible_gpus=visible_gpus(own.gpus, [place.gpus for place in by_host[own.host]]),
        )
        for slot, own in zip(slots, ordered, strict=True)
    ]
