"""Soak test: hours of elastic training under random faults. `make soak MINUTES=120`.

Injects the faults of `chaos`, about one every half minute, but spares one rank, so that this rank, the launcher and its
agent live through the whole test. Prints their resource use every minute. At the end the training must be correct, as
after chaos, and memory, descriptors and threads of every process that lived most of the time must not have grown since
the first quarter. The steps mostly sleep, to keep the load low.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
from chaos import Chaos

SLACK_MIB = 12.0  # the training records the samples it has seen: about 1 KiB per step
SLACK_DESCRIPTORS = SLACK_THREADS = 3  # those of a worker that is just starting


class Health:
    """Samples of one process: time, MiB of memory, descriptors, threads."""

    def __init__(self, process: psutil.Process) -> None:
        self.process, self.name = process, "a process"
        with suppress(psutil.Error):
            self.name = process.name()
        self.samples: list[tuple[float, float, int, int]] = []

    def look(self) -> None:
        with suppress(psutil.Error), self.process.oneshot():
            # RSS rather than private memory: a fork server's private memory depends on its forks, which share pages
            # until they write to them.
            memory = self.process.memory_info().rss / 2**20
            self.samples.append((time.monotonic(), memory, self.process.num_fds(), self.process.num_threads()))

    def quarters(self) -> tuple[list[float], list[float]]:
        """Return the medians of the second and the last quarter of the process's life; the first one is warm-up."""
        size = len(self.samples) // 4
        parts = self.samples[size : 2 * size], self.samples[-size:]
        early, late = ([statistics.median(column) for column in list(zip(*part, strict=True))[1:]] for part in parts)
        return early, late


class Soak(Chaos):
    """Slow chaos that monitors the processes which live longest."""

    def __init__(self, work: Path, seed: int) -> None:
        super().__init__(work, seed, num_proc=3, pause_s=1.0)
        self.healths: dict[int, Health] = {}
        self.spared = 0

    def members(self) -> list[int]:
        return [pid for pid in super().members() if pid != self.spared]

    def strike(self) -> int:
        """Inject faults as in chaos. The spared rank keeps the state, so all other ranks may be hurt."""
        hurt = 0
        for pid in self.random.sample(found := self.members(), min(self.random.choice((1, 1, 1, 2)), len(found))):
            hurt += self.hurt_one(pid)
        return hurt

    def look(self) -> None:
        alive = {process.pid: process for process in self.job.processes()}
        if self.spared not in alive:
            trained = [pid for pid in Chaos.members(self) if pid in alive]
            self.spared = trained[0] if trained else 0
        for pid, process in alive.items():
            self.healths.setdefault(pid, Health(process)).look()

    def tell(self, minutes: float, num_faults: int) -> None:
        names = {self.job.process.pid: "launcher", self.spared: "spared rank"}
        names |= {process.pid: f"agent {number}" for number, process in enumerate(self.job.agents())}
        texts = []
        for pid, name in names.items():
            if pid in self.healths and self.healths[pid].samples:
                _, memory, descriptors, threads = self.healths[pid].samples[-1]
                texts.append(f"{name} {memory:.1f} MiB, {descriptors} descriptors, {threads} threads")
        print(f"{minutes:6.1f} min, step {self.job.step()}, {num_faults} faults; {'; '.join(texts)}", flush=True)

    def last(self, minutes: float) -> None:
        begin, num_faults, looked = time.monotonic(), 0, 0.0
        strike_at = begin + 20.0
        while (now := time.monotonic()) - begin < minutes * 60:
            step = self.job.step()
            self.wait(f"a step after step {step}", lambda step=step: self.job.step() > step)
            if now - looked > min(60.0, minutes * 60 / 40):
                looked = now
                self.look()
                self.tell((now - begin) / 60, num_faults)
            if now > strike_at:
                num_faults += self.strike()
                strike_at = now + self.random.uniform(15.0, 60.0)
            time.sleep(0.5)
        self.finish()
        print(
            f"{num_faults} faults in {self.job.step()} steps and {minutes:g} minutes; the weights are right", flush=True
        )
        self.assert_flat(minutes)

    def assert_flat(self, minutes: float) -> None:
        held = [
            (pid, health)
            for pid, health in self.healths.items()
            if len(health.samples) >= 12 and health.samples[-1][0] - health.samples[0][0] > minutes * 60 * 0.6
        ]
        assert len(held) >= 2, "too little has lived for most of the time to say anything"
        for pid, health in held:
            early, late = health.quarters()
            name = {self.job.process.pid: "launcher", self.spared: "spared rank"}.get(pid) or health.name
            what = zip(("MiB", "descriptors", "threads"), early, late, strict=True)
            print(f"{name}: " + ", ".join(f"{one:.1f} -> {other:.1f} {unit}" for unit, one, other in what), flush=True)
            for before, after, slack in zip(early, late, (SLACK_MIB, SLACK_DESCRIPTORS, SLACK_THREADS), strict=True):
                assert after <= before + slack, f"{name} (process {pid}) has grown from {early} to {late}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as work:
        soak = Soak(Path(work), arguments.seed)
        try:
            soak.last(arguments.minutes)
        except BaseException:
            print(soak.job.text()[-8000:], flush=True)
            for process in soak.job.processes():
                process.kill()
            raise
    print("memory, descriptors and threads are flat", flush=True)


if __name__ == "__main__":
    sys.exit(main())
