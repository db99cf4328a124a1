"""Autotune (`HOROVOD_AUTOTUNE=1`): which size of gradient buckets makes this training's steps shortest.

Small buckets start early and overlap with backward, large ones cost less per byte; all in one overlap with nothing. What
pays depends on the model and the machine, so the first steps try: each size for some steps, in turns, because machines
have moods. The members add up their times, so all of them see the same numbers and decide the same without another word.
The default stays unless another size is clearly better. Pure but for the log file; `BucketOrder` asks it after each step.

    warming up --steps--> trying, size by size, round by round --last round--> done
    any --a rank has joined--> done, with what there is
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hora.torch.optimizer.bucket_plan import BUCKET_BYTES

__all__ = ["Autotuner", "TuningOptions"]

_MB = 2**20
_CANDIDATES = (BUCKET_BYTES, _MB, 16 * _MB, 64 * _MB, 2**62)
# A size must be better than the default by this much to be chosen: less is noise, and would come out worse half the time.
_MARGIN = 0.01
_HEADER = (
    "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,"
    "tensor_fusion_threshold,score"
)

log = logging.getLogger("hora")


@dataclass(frozen=True, kw_only=True)
class TuningOptions:
    """Horovod's: discarded trials, steps of a trial, trials at most, where to log. `log_file`: of rank 0 alone."""

    warmup_samples: int = 3
    steps_per_sample: int = 10
    max_samples: int = 20
    log_file: str = ""


class Autotuner:
    """`bucket_bytes` is the size to use now; `step` says when it has changed."""

    def __init__(self, options: TuningOptions, *, num_bytes: int, num_members: int) -> None:
        self._options = options
        self._num_bytes = num_bytes
        self._num_members = num_members
        # Sizes beyond the model's are all the same: one bucket.
        sizes = dict.fromkeys(min(size, max(num_bytes, 1)) for size in _CANDIDATES)
        self._sizes = list(sizes)
        num_rounds = max(options.max_samples // len(self._sizes), 1)
        warm_up = [self._sizes[0]] * options.warmup_samples
        self._trials = warm_up + [size for _ in range(num_rounds) for size in self._sizes]
        self._num_warm_up = len(warm_up)
        self._trial = 0
        self._times: list[float] = []  # of this trial
        self._results: dict[int, list[float]] = {}
        self.bucket_bytes = self._trials[0]
        self.done = len(self._sizes) == 1
        self._write(_HEADER, first=True)

    def step(self, lasted_s: float) -> int | None:
        """A step has ended. The microseconds to add up with the other members' when the trial is over, else None."""
        self._times.append(lasted_s)
        if len(self._times) <= self._options.steps_per_sample:  # the first one paid for the change
            return None
        return round(statistics.median(self._times[1:]) * 1e6)

    def take(self, totals: Sequence[int]) -> None:
        """(members that took part, sum of their microseconds): what all know now. Changes `bucket_bytes`, or is done."""
        num_members, total_us = totals
        self._times = []
        if num_members < self._num_members:
            log.info("autotune ends: a rank has joined")
            self.done = True
            return
        step_us = max(total_us / num_members, 1.0)
        if self._trial >= self._num_warm_up:
            self._results.setdefault(self.bucket_bytes, []).append(step_us)
            self._log(self.bucket_bytes, step_us)
        self._trial += 1
        if self._trial < len(self._trials):
            self.bucket_bytes = self._trials[self._trial]
            return
        self.done = True
        self.bucket_bytes = self._best()
        step_us = statistics.median(self._results[self.bucket_bytes])
        self._log(self.bucket_bytes, step_us)
        log.info("autotune: the best bucket size is %s; a step takes %.3f ms", _words(self.bucket_bytes), step_us / 1e3)

    def _best(self) -> int:
        medians = {size: statistics.median(times) for size, times in self._results.items()}
        default = self._sizes[0]
        best = min(medians, key=lambda size: medians[size])
        return best if medians[best] < (1 - _MARGIN) * medians[default] else default

    def _log(self, size: int, step_us: float) -> None:
        score = self._num_bytes / step_us
        log.info("autotune: buckets of %s, %.3f ms a step, %.1f bytes/us", _words(size), step_us / 1e3, score)
        self._write(f"0,0,0,1,0,{size / _MB:g},{score:g}")

    def _write(self, line: str, *, first: bool = False) -> None:
        if self._options.log_file:
            with Path(self._options.log_file).open("w" if first else "a") as file:
                file.write(line + "\n")


def _words(size: int) -> str:
    return f"{size / _MB:.3g} MB"
