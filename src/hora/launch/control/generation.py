"""A generation: ranks for the workers that take part in it. Pure; called by `elastic`."""

from __future__ import annotations

from collections.abc import Sequence

from hora.launch.control.elastic_policy import Worker
from hora.launch.slots import Slot, place_ranks

__all__ = ["assign", "provisional"]


def assign(workers: Sequence[Worker]) -> dict[int, Slot]:
    """Ranks in the order given. Local ranks follow the slots, so that a worker's device stays its own."""
    slots = place_ranks([worker.host for worker in workers], local_order=[worker.slot for worker in workers])
    return {worker.number: slot for worker, slot in zip(workers, slots, strict=True)}


def provisional(host: str, slot: int, num_slots: int) -> Slot:
    """What a newcomer knows of its place before a generation has one for it: the device that will be its own."""
    return Slot(
        hostname=host,
        rank=0,
        local_rank=slot,
        cross_rank=0,
        size=1,
        local_size=max(num_slots, slot + 1),
        cross_size=1,
    )
