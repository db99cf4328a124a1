"""A generation: ranks for the workers that take part in it. Pure; called by `elastic`."""

from __future__ import annotations

from collections.abc import Sequence

from hora.launch.control.elastic_policy import Worker
from hora.launch.job import Slot

__all__ = ["assign", "provisional"]


def assign(workers: Sequence[Worker]) -> dict[int, Slot]:
    """Ranks in the order given. Local ranks follow the slots, so that a worker's device stays its own."""
    local: dict[str, list[int]] = {}
    for worker in sorted(workers, key=lambda w: w.slot):
        local.setdefault(worker.host, []).append(worker.number)
    hosts = list(dict.fromkeys(worker.host for worker in workers))
    places: dict[int, Slot] = {}
    for rank, worker in enumerate(workers):
        local_rank = local[worker.host].index(worker.number)
        owners = [host for host in hosts if len(local[host]) > local_rank]
        places[worker.number] = Slot(
            hostname=worker.host,
            rank=rank,
            size=len(workers),
            local_rank=local_rank,
            local_size=len(local[worker.host]),
            cross_rank=owners.index(worker.host),
            cross_size=len(owners),
        )
    return places


def provisional(host: str, slot: int, num_slots: int) -> Slot:
    """What a newcomer knows of its place before a generation has one for it: the device that will be its own."""
    return Slot(hostname=host, rank=0, size=1, local_rank=slot, local_size=max(num_slots, slot + 1))
