"""A verdict: which rank slowed the others down, from when until when, in which part of the step, and in which line.

Made of findings (`lateness`) and profiles, both of which a recording holds, so that a recorded run comes to the same
verdicts as the live one. Pure: no clock, no process.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hora.watch.lateness import Straggler

__all__ = ["SlowLine", "Verdict", "find_line"]

PART_WORDS = {
    "data": "waiting for data",
    "forward": "in the forward pass or the script itself",
    "backward": "in the backward pass",
    "between": "between backward and step",
    "optimizer": "in the optimizer",
}
_SAME_TIME_S = 10.0  # profiles of two ranks can be compared when they end this close together
_LIBRARY = re.compile(
    r"site-packages|dist-packages|/lib/python3|^<frozen|/hora/(engine|torch|launch|workflow|watch|telemetry)/"
)
_ENGINE = re.compile(r"/hora/engine/")

Frame = Sequence[Any]  # [file, line, function, code]


@dataclass(frozen=True)
class SlowLine:
    """The stack in which a slow rank is found more often than an ordinary one, innermost frame first.

    `share`, `usual`: of the slow rank's time, and of the time of rank `other` (None: no other rank was profiled).
    """

    frames: Sequence[Frame]
    share: float
    usual: float
    other: int | None

    @property
    def own(self) -> Frame:
        """The innermost frame of the script, or the innermost one."""
        return next((frame for frame in self.frames if not _LIBRARY.search(frame[0])), self.frames[0])


@dataclass
class Verdict:
    """`finding`: the latest, or the worst once it is over. `than`: what it is compared with. `until` None: now."""

    finding: Straggler
    host: str
    than: str
    until: float | None = None
    line: SlowLine | None = None
    _worst: Straggler | None = None

    @property
    def rank(self) -> int:
        return self.finding.rank

    @property
    def part_words(self) -> str:
        return PART_WORDS.get(self.finding.main_part, "")

    def update(self, finding: Straggler) -> None:
        self.finding = finding
        self._worst = max(self._worst or finding, finding, key=lambda one: one.slowdown)

    def close(self, at: float) -> None:
        self.until, self.finding = at, self._worst or self.finding

    def sentence(self) -> str:
        verb = "is" if self.until is None else "was"
        text = f"rank {self.rank} on {self.host} {verb} {self.finding.slowdown:.2f}× slower than {self.than}"
        if self.part_words:
            text += f", {100 * self.finding.excess[self.finding.main_part]:.0f} % of it {self.part_words}"
        return text


def find_line(profiles: Mapping[int, Mapping[str, Any]], rank: int, slow: Collection[int]) -> SlowLine | None:
    """Compare a slow rank's profile with an ordinary rank's of the same time; None without a profile of it.

    Stacks in which the rank waits for others are left out: no line of the script is slow there.
    """
    mine = profiles.get(rank)
    if mine is None:
        return None
    other = next(
        (r for r, p in profiles.items() if r not in slow and abs(p["at"] - mine["at"]) < _SAME_TIME_S),
        None,
    )
    usual = {} if other is None else _shares(profiles[other])
    found = [
        SlowLine(frames, share, usual[key][0] if key in usual else 0.0, other)
        for key, (share, frames) in _shares(mine).items()
    ]
    return max(found, key=lambda line: line.share - line.usual, default=None)


def _shares(profile: Mapping[str, Any]) -> dict[Any, tuple[float, Sequence[Frame]]]:
    """Return each place in the script with its share of the samples and a stack that leads there."""
    shares: dict[Any, tuple[float, Sequence[Frame]]] = {}
    for count, frames in profile["stacks"]:
        if not frames or any(_ENGINE.search(frame[0]) for frame in frames):
            continue
        first = next((i for i, frame in enumerate(frames) if not _LIBRARY.search(frame[0])), 0)
        key = tuple(tuple(frame[:3]) for frame in frames[first:])
        before, shown = shares.get(key, (0.0, frames))
        shares[key] = before + count / max(profile["num_samples"], 1), shown
    return shares
