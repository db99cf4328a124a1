"""Telemetry of a rank, once a second: a sample of its steps and occasional extras, in few bytes.

`reporter` writes reports on the ranks; `parsing` reads them for observers of the job. They contain only numbers and
short strings.
"""

from __future__ import annotations

import json
import operator
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Parts of a step. `forward` is the remainder: the forward pass, the loss, and everything else in the script. `between`
# is the script's own time from the last gradient to `step()` or `synchronize()`.
PARTS = ("data", "forward", "backward", "between", "wait", "reduce", "optimizer", "checkpoint")

MAX_METRICS = 64
MAX_EVENTS = 64
MAX_NAME = 200


class Sample(NamedTuple):
    """Sums over the steps that ended in one window of a rank. In seconds, unless the name says otherwise."""

    step: int = 0  # steps of this rank since it started
    num_steps: int = 0  # steps in this window
    window_s: float = 0.0
    step_s: float = 0.0
    longest_s: float = 0.0
    data_s: float = 0.0
    backward_s: float = 0.0
    between_s: float = 0.0
    wait_s: float = 0.0  # blocked until other ranks arrived
    reduce_s: float = 0.0  # blocked while data moved
    hidden_s: float = 0.0  # data moved while this rank did something else
    optimizer_s: float = 0.0
    num_bytes: float = 0.0
    num_samples: float = 0.0
    cpu_s: float = 0.0  # processor time of this process
    memory_bytes: float = 0.0
    checkpoint_s: float = 0.0

    @property
    def forward_s(self) -> float:
        known = self.data_s + self.backward_s + self.between_s + self.wait_s + self.reduce_s + self.optimizer_s
        return max(self.step_s - known - self.checkpoint_s, 0.0)

    @property
    def work_s(self) -> float:
        """Return the rank's own work: the step without the time that it waits or moves data."""
        return max(self.step_s - self.wait_s - self.reduce_s, 0.0)

    @property
    def parts_s(self) -> tuple[float, ...]:
        """Return the times in the order of `PARTS`."""
        times: tuple[float, ...] = _parts_s(self)
        return times


_parts_s = operator.attrgetter(*(f"{part}_s" for part in PARTS))
SAMPLE = struct.Struct("<BQI15f")
VERSION = 3


@dataclass(frozen=True)
class Report:
    """One message of a rank: a sample, and optional extras."""

    sample: Sample
    waiting: tuple[str, float, tuple[int, ...]] | None = None  # operation, seconds, the missing ranks (empty: all)
    metrics: Mapping[str, float] = field(default_factory=dict)  # name to value
    events: tuple[tuple[str, str], ...] = ()  # kind and text
    host: Mapping[str, Any] = field(default_factory=dict)  # the state of its machine, from one rank per host
    total_steps: int = 0  # the expected number of steps; 0: unknown

    def encode(self) -> bytes:
        head = SAMPLE.pack(VERSION, *self.sample)
        more = {"w": self.waiting, "m": self.metrics, "e": self.events, "h": self.host, "t": self.total_steps}
        rest = {key: value for key, value in more.items() if value}
        return head + (json.dumps(rest, separators=(",", ":")).encode() if rest else b"")
