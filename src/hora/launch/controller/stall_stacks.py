"""Stacks of the ranks that keep others waiting: requested when a rank reports a stall, and logged for the user."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from hora.telemetry.stacks import stack_text
from hora.world import World

__all__ = ["StallStacks"]

_AGAIN_S = 30.0


class StallStacks:
    """`ask(question, worker)` queries a worker, `say(text)` tells the user. `worlds`: the present one, by worker."""

    def __init__(self, ask: Callable[[dict[str, Any], int], None], say: Callable[[str], None]) -> None:
        self._ask, self._say = ask, say
        self.worlds: Mapping[int, World] = {}
        self._asked_at: dict[int, float] = {}
        self._to_show: set[int] = set()

    def on_telemetry(self, worker: int, kind: str, data: bytes) -> None:
        """Take a worker's message; only stalls, and the answers to our own questions, matter here."""
        if kind == "stall":
            ranks = json.loads(data)
            for number, world in self.worlds.items():
                if world.rank in ranks and time.monotonic() - self._asked_at.get(number, -1e9) > _AGAIN_S:
                    self._asked_at[number] = time.monotonic()
                    self._to_show.add(number)
                    self._ask({"question": "stack"}, number)
        elif kind == "stack" and worker in self._to_show and worker in self.worlds:
            self._to_show.discard(worker)
            world = self.worlds[worker]
            where = f"rank {world.rank} on {world.hostname}"
            self._say(f"{where} keeps the others waiting; it is here:\n{stack_text(data)}")
