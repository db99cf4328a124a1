"""Autotune (`HOROVOD_AUTOTUNE=1`): find the bucket size and overlap that make this training's steps shortest.

Small buckets start early and overlap with backward; large ones cost less per byte; without a free core, no overlap may
be best. The answer depends on the model and the machine, so the first steps run a race. Each round tries the default
and every remaining setting, because the speed of a machine drifts. Slow settings drop out. The default stays unless
another setting is clearly better. The members sum their times, so all of them see the same numbers and make the same
decision without further messages. Pure except for the log file; `BucketOrder` calls it after each step.

    warming up --trials--> racing, round by round --one is left, no trial, or a rank has joined--> done
"""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Generator, Sequence
from typing import IO, NamedTuple

from hora.config import EngineConfig
from hora.files import new_file
from hora.torch.optimizer.bucket_plan import BUCKET_BYTES

_MB = 2**20
# Leading steps of a trial that don't count: they pay for the change and run with cold caches.
_SETTLING_STEPS = 2
# Rounds after which the slower half drops out.
_ROUNDS_A_HEAT = 2
# A setting must beat the default by this much: a smaller difference is noise.
_MARGIN = 0.02
# Horovod's columns plus `overlap`.
_HEADER = (
    "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,"
    "tensor_fusion_threshold,score,overlap"
)

log = logging.getLogger("hora")


class Setting(NamedTuple):
    """Bucket size and overlap. With `overlap` a bucket is reduced as soon as it is full, otherwise after backward."""

    bucket_bytes: int
    overlap: bool

    def __str__(self) -> str:
        return f"buckets of {self.bucket_bytes / _MB:.3g} MB{'' if self.overlap else ' after backward'}"


DEFAULT = Setting(BUCKET_BYTES, overlap=True)
_CHALLENGERS = (
    *(Setting(size, overlap=True) for size in (_MB, 16 * _MB, 64 * _MB, 2**62)),
    Setting(BUCKET_BYTES, overlap=False),
)


class Autotuner:
    """`setting` is the one in use; `take` and `end` change it. Only the rank that `tells` logs."""

    def __init__(self, config: EngineConfig, *, tells: bool, num_bytes: int, num_members: int) -> None:
        self._num_steps, self._tells = max(config.autotune_steps_per_sample, 1), tells
        self._csv = _opened(config.autotune_log) if config.autotune_log and tells else None
        self._num_bytes, self._num_members = num_bytes, num_members
        self._times: list[float] = []  # of the steps of this trial
        self._challengers = _challengers(num_bytes)
        self._rounds: list[dict[Setting, float]] = []  # a step's time by setting, of every complete round
        self._trials = self._race(config.autotune_warmup_samples, config.autotune_max_samples)
        self.setting = DEFAULT
        self.done = next(self._trials, None) is None
        self._write(_HEADER)

    def step(self, lasted_s: float) -> int | None:
        """Record a step. Returns the microseconds to sum over the members once the trial is complete, else None."""
        self._times.append(lasted_s)
        if len(self._times) < _SETTLING_STEPS + self._num_steps:
            return None
        times, self._times = self._times[_SETTLING_STEPS:], []
        return round(statistics.median(times) * 1e6)

    def record(self, totals: Sequence[int]) -> None:
        """Record the totals over all members: how many took part, and the sum of their microseconds."""
        num_members, total_us = totals
        if num_members < self._num_members:  # joined ranks end when they return, with the same rounds
            self.end()
            return
        try:
            self.setting = self._trials.send(max(total_us / num_members, 1.0))
        except StopIteration:
            self.end()

    def end(self) -> None:
        """Decide with the results of the complete rounds."""
        self.done = True
        self.setting = self._winner()
        step_us = statistics.median_low(self._times_of(self.setting) or [0.0])
        if step_us:
            self._log(self.setting, step_us)
            self._tell(f"the best are {self.setting}; a step takes {step_us / 1e3:.3f} ms")
        if self._csv is not None:
            self._csv.close()
            self._csv = None

    def _race(self, num_warm_up: int, trials_left: int) -> Generator[Setting, float, None]:
        """Yield the setting of each trial; receives the microseconds that a step took."""
        while order := self._next_round(trials_left):
            for _ in range(num_warm_up):
                yield DEFAULT
            times: dict[Setting, float] = {}
            for setting in order:
                times[setting] = yield setting
                self._log(setting, times[setting])
            self._rounds.append(times)
            num_warm_up, trials_left = 0, trials_left - len(order)

    def _next_round(self, trials_left: int) -> list[Setting]:
        """Return the remaining settings, in the opposite order of the last round; nothing if the race is over."""
        num_rounds = len(self._rounds)
        self._challengers.sort(key=self._best_time)
        if trials_left < 2 or not self._challengers:
            return []
        if num_rounds and num_rounds % _ROUNDS_A_HEAT == 0:
            del self._challengers[max(len(self._challengers) // 2, 1) :]
        del self._challengers[trials_left - 1 :]
        forth = [DEFAULT, *self._challengers]
        return forth if num_rounds % 2 == 0 else forth[::-1]

    def _times_of(self, setting: Setting, beside: Setting | None = None) -> list[float]:
        """Return the times of a setting, in the rounds in which `beside` ran too."""
        return [times[setting] for times in self._rounds if setting in times and (beside or setting) in times]

    def _best_time(self, setting: Setting) -> float:
        return min(self._times_of(setting), default=0.0)

    def _winner(self) -> Setting:
        best = min(self._challengers, key=self._best_time, default=DEFAULT)
        its, the_defaults = self._times_of(best), self._times_of(DEFAULT, beside=best)
        # Noise only makes a step longer: compare the best round and the better half of the rounds.
        clearly = its and all(
            typical(its) <= (1 - _MARGIN) * typical(the_defaults) for typical in (min, statistics.median_low)
        )
        return best if clearly else DEFAULT

    def _log(self, setting: Setting, step_us: float) -> None:
        score = self._num_bytes / step_us
        self._tell(f"{setting}, {step_us / 1e3:.3f} ms a step, {score:.1f} bytes/us")
        self._write(f"0,0,0,1,0,{setting.bucket_bytes / _MB:g},{score:g},{setting.overlap:d}")

    def _tell(self, text: str) -> None:
        if self._tells:
            log.info("autotune: %s", text)

    def _write(self, line: str) -> None:
        if self._csv is not None:
            self._csv.write(line + "\n")


def _opened(path: str) -> IO[str]:
    """Open a file of which each line is written at once."""
    return os.fdopen(new_file(path, mode=0o666), "w", buffering=1)


def _challengers(num_bytes: int) -> list[Setting]:
    """Return the settings that differ from the default; all sizes beyond the model's mean a single bucket."""
    sizes = [(min(size, num_bytes), overlap) for size, overlap in (DEFAULT, *_CHALLENGERS)]
    return list(dict.fromkeys(Setting(size, overlap or size == num_bytes) for size, overlap in sizes))[1:]
