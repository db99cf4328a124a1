"""Chaos: random faults over one elastic training on four ranks. `python tests/integration/chaos.py --faults 100`.

Ranks are killed, stopped and told to end, one or two at a time and also while the others recover; their slots come back
after a second and newcomers join. At the end the training must have done its epochs with every sample, its weights must be
those of an undisturbed run of the same steps, no committed step may have been lost, and nothing may be left behind.

With `--per-step` nothing is committed: no step at all may have been lost, and losses, weights and the optimizer's state
must be to the last bit those of a run with the same ranks in the same steps.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, os.path.dirname(__file__))
sys.path.insert(0, os.path.dirname(sys.path[0]))

from elastic_job import ElasticJob, assert_good_ending, assert_no_step_lost

from waiting import wait_until

# A stopped rank takes the stall check's time to be noticed, and then some: few of them. The limit is longer than a busy
# machine takes to import torch, during which a rank is as silent as a stopped one.
FAULTS = [signal.SIGKILL] * 8 + [signal.SIGTERM] * 3 + [signal.SIGSTOP]
ENVIRONMENT = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "10"}


class Chaos:
    """A job under attack."""

    def __init__(
        self, work: Path, seed: int, *, num_proc: int = 4, pause_s: float = 0.05, per_step: bool = False
    ) -> None:
        self.random = random.Random(seed)
        plan = {"samples": 96, "epochs": 10**6, "pause_s": pause_s, "per_step": per_step}
        self.job = ElasticJob(work, plan, ENVIRONMENT, num_proc=num_proc, min_num_proc=1, cooldown_range=(1, 1))
        self.hurt: set[int] = set()

    def members(self) -> list[int]:
        """Processes that were in the loop last and are unharmed."""
        entered = [int(note.split()[1]) for note in self.job.notes()]
        alive = {process.pid for process in self.job.processes()}
        return [pid for pid in dict.fromkeys(reversed(entered)) if pid in alive and pid not in self.hurt]

    def strike(self) -> int:
        """Hurt one or two of those that have the state, but not all of them; returns how many."""
        candidates = self.members()
        count = min(self.random.choice((1, 1, 1, 2)), len(candidates) - 1)
        for pid in self.random.sample(candidates, max(count, 0)):
            self.hurt_one(pid)
        return max(count, 0)

    def hurt_one(self, pid: int) -> bool:
        """Return whether it was still there."""
        self.hurt.add(pid)
        try:
            os.kill(pid, self.random.choice(FAULTS))
        except ProcessLookupError:
            return False
        time.sleep(self.random.uniform(0, 0.3))  # the second one: at any moment of the recovery
        return True

    def run(self, num_faults: int) -> None:
        done = 0
        while done < num_faults:
            step = self.job.step()
            # Somebody must have got over the last fault: then at least two have the state again, sooner or later.
            self.wait(f"a step after fault {done}", lambda step=step: self.job.step() > step)
            time.sleep(self.random.uniform(0, 1.0))
            done += self.strike()
        print(f"{done} faults in {self.job.step()} steps", flush=True)
        self.finish()

    def finish(self) -> None:
        """Let the training end: it must be right, and nothing may be left."""
        (self.job.folder / "last_epoch").touch()
        results = self.job.results(limit_s=120)
        self.job.plan["epochs"] = results[0]["epoch"]
        assert_good_ending(self.job, results)
        self.assert_no_commit_was_lost()
        if self.job.plan["per_step"]:
            assert_no_step_lost(self.job, results)
            print(
                f"{len(results[0]['losses'])} steps in {len(set(results[0]['worlds']))} worlds, made again: the same bits"
            )

    def wait(self, what: str, happened) -> None:
        wait_until(what, lambda: happened() or self.job.process.poll() is not None, limit_s=90)
        assert self.job.process.poll() is None, self.job.text()[-5000:]

    def assert_no_commit_was_lost(self) -> None:
        commits = [(float(n.split()[0]), int(n.split()[4])) for n in self.job.notes("committed")]
        for note in self.job.notes():
            at, step = float(note.split()[0]), int(note.split("at step ")[1].split()[0])
            before = [number for when, number in commits if when < at]
            assert step >= max(before, default=0), f"step {max(before)} was committed, but then: {note}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--per-step", action="store_true")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as work:
        began = time.monotonic()
        chaos = Chaos(Path(work), arguments.seed, per_step=arguments.per_step)
        try:
            chaos.run(arguments.faults)
        except BaseException:
            print(chaos.job.text()[-8000:])
            for process in chaos.job.processes():
                process.kill()
            raise
        print(f"all is well after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
