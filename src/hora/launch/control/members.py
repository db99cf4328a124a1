"""The roster of an elastic job: every worker there ever was, and what is known of it. Pure; kept by `elastic`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from hora.launch.control.elastic_policy import State, Worker

__all__ = ["Roster"]


class Roster:
    """Workers by number. States and their changes are those of `elastic_policy`."""

    def __init__(self) -> None:
        self._workers: dict[int, Worker] = {}

    def __getitem__(self, number: int) -> Worker:
        return self._workers[number]

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def add(self, host: str, slot: int, state: State, now: float) -> int:
        """A new worker's number."""
        number = len(self._workers)
        self._workers[number] = Worker(number=number, host=host, slot=slot, state=state, since=now)
        return number

    def set(self, number: int, state: State, now: float) -> None:
        self._workers[number] = replace(self._workers[number], state=state, since=now)

    def waits(self, number: int, generation: int, now: float) -> None:
        """It asks for a place after this generation; old questions are no news."""
        worker = self._workers.get(number)
        if worker is not None and worker.alive and worker.generation == generation:
            self.set(number, State.READY, now)

    def connected(self, number: int) -> None:
        if number in self._workers:
            self._workers[number] = replace(self._workers[number], lost_at=None)

    def lost(self, number: int, now: float) -> None:
        """Its connection ended without a good-bye."""
        worker = self._workers.get(number)
        if worker is not None and worker.alive:
            self._workers[number] = replace(worker, lost_at=now)

    def begin(self, generation: int, members: Collection[int], now: float) -> None:
        """A generation begins: its members work, and those of the one before who have no place in it leave."""
        for worker in self:
            if worker.number in members:
                first = generation if worker.generation < 0 else worker.first_generation
                self._workers[worker.number] = replace(
                    worker, state=State.WORKING, since=now, generation=generation, first_generation=first
                )
            elif worker.state is State.READY and worker.generation >= 0:
                self.set(worker.number, State.LEFT, now)
