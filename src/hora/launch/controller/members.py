"""The members of a job, all workers ever, and their ranks in a generation; `policy` explains the states. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from hora.launch.controller.policy import Worker, WorkerState
from hora.launch.slots import Slot, place_ranks

__all__ = ["Roster", "assign", "provisional"]


class Roster:
    """Workers by number. News of numbers that were never given are ignored: they come from the network."""

    def __init__(self) -> None:
        self._workers: dict[int, Worker] = {}

    def __getitem__(self, number: int) -> Worker:
        return self._workers[number]

    def __contains__(self, number: int) -> bool:
        return number in self._workers

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def saved(self) -> list[list[Any]]:
        """The workers, for a leader after this one."""
        return [
            [w.number, w.host, w.slot, w.state.name, w.generation, w.first_generation, w.joined, w.written_off]
            for w in self
        ]

    def restore(self, saved: Sequence[Sequence[Any]], now: float) -> None:
        """Take over the workers of the leader before: those that were connected are cut off until they are again."""
        for number, host, slot, state, generation, first, joined, written_off in saved:
            worker = Worker(
                number=number,
                host=host,
                slot=slot,
                state=WorkerState[state],
                generation=generation,
                first_generation=first,
                since=now,
                started=True,
                joined=joined,
                written_off=written_off,
            )
            lost_at = now if worker.alive and joined else None
            self._workers[number] = replace(worker, lost_at=lost_at, exited=not worker.alive)

    def add(self, host: str, slot: int, state: WorkerState, now: float) -> int:
        """A new worker's number."""
        number = len(self._workers)
        self._workers[number] = Worker(number=number, host=host, slot=slot, state=state, since=now)
        return number

    def set(self, number: int, state: WorkerState, now: float) -> None:
        self._workers[number] = replace(self._workers[number], state=state, since=now)

    def started(self, number: int) -> None:
        self._workers[number] = replace(self._workers[number], started=True)

    def joined(self, number: int) -> None:
        """It has connected, perhaps again."""
        if number in self._workers:
            self._workers[number] = replace(self._workers[number], joined=True, lost_at=None)

    def lost(self, number: int, now: float) -> None:
        """Its connection ended without a good-bye."""
        worker = self._workers.get(number)
        if worker is not None and worker.alive:
            self._workers[number] = replace(worker, lost_at=now)

    def waits(self, number: int, generation: int, now: float) -> None:
        """It asks for a place after this generation; old questions are no news."""
        worker = self._workers.get(number)
        if worker is not None and worker.alive and worker.generation == generation:
            self.set(number, WorkerState.READY, now)

    def exited(self, number: int) -> None:
        self._workers[number] = replace(self._workers[number], exited=True)

    def write_off(self, number: int) -> None:
        """The job goes on without this one, which failed."""
        self._workers[number] = replace(self._workers[number], written_off=True)

    def begin(self, generation: int, members: Collection[int], now: float) -> None:
        """A generation begins: its members work, and those of the one before who have no place in it leave."""
        for worker in self:
            if worker.number in members:
                first = generation if worker.generation < 0 else worker.first_generation
                self._workers[worker.number] = replace(
                    worker, state=WorkerState.WORKING, since=now, generation=generation, first_generation=first
                )
            elif worker.state is WorkerState.READY and worker.generation >= 0:
                self.set(worker.number, WorkerState.LEFT, now)


def assign(workers: Sequence[Worker]) -> dict[int, Slot]:
    """Ranks in the order given. Local ranks follow the slots, so that a worker's device stays its own."""
    slots = place_ranks([worker.host for worker in workers], local_order=[worker.slot for worker in workers])
    return {worker.number: slot for worker, slot in zip(workers, slots, strict=True)}


def provisional(host: str, slot: int, num_slots: int, *, num_ranks: int) -> Slot:
    """Return a newcomer's place before a generation has one for it: the device that will be its own, and the rank after
    those that there are.
    """
    return Slot(
        hostname=host,
        rank=num_ranks,
        local_rank=slot,
        cross_rank=0,
        size=num_ranks + 1,
        local_size=max(num_slots, slot + 1),
        cross_size=1,
    )
