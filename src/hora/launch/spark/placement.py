"""Which Spark task becomes which rank, and which GPUs it may see. Pure functions: no Spark, no process, no clock.

Called by the Spark launcher once every task of a stage has said where it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hora.launch.slots import Slot, place_ranks

__all__ = ["Placement", "TaskPlace", "place_tasks"]


@dataclass(frozen=True, kw_only=True)
class TaskPlace:
    """Where a Spark task runs: its partition, the hash of its host, the addresses of the GPUs Spark gave it."""

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
        Placement(slot=slot, task=own.task, own_gpus=own.gpus, visible_gpus=_visible(own, by_host[own.host]))
        for slot, own in zip(slots, ordered, strict=True)
    ]


def _visible(own: TaskPlace, on_host: Sequence[TaskPlace]) -> tuple[str, ...]:
    """All GPUs of the tasks on a host: each task's first one in the order of local ranks, then the rest.

    `torch.cuda.set_device(hvd.local_rank())` then picks a GPU that Spark gave to this very task. Where
    tasks share a GPU (fractional amounts) no such order exists, because CUDA refuses a device named twice:
    a rank sees its own only.
    """
    firsts = [place.gpus[0] for place in on_host if place.gpus]
    if len(set(firsts)) < len(on_host):
        return own.gpus
    rest = [gpu for place in on_host for gpu in place.gpus[1:]]
    return tuple(dict.fromkeys(firsts + rest))
