"""A simulated job: the entries that the ranks of a training would have produced.

It serves the live page's development, tests and benchmarks: an hour of training in a second, stragglers of known
slowness, a rank that is lost, a rank that hangs. Equal seeds give equal jobs.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hora.telemetry import Report, Sample
from hora.watch.model import Entry

__all__ = ["Simulation", "Slowness"]

_SHARES = {"data": 0.06, "forward": 0.30, "backward": 0.50, "between": 0.02, "optimizer": 0.12}


@dataclass(frozen=True)
class Slowness:
    """From `begin` to `end` (seconds), a part of a rank's step takes longer, by `factor` of its whole work."""

    rank: int
    factor: float
    part: str = "data"
    begin: float = 0.0
    end: float = math.inf


@dataclass(kw_only=True)
class Simulation:
    """A simulated training. `lost_at`, `hangs_at`: (seconds, rank) at which a rank is lost or hangs."""

    num_ranks: int = 8
    hosts: Sequence[str] = ("alpha", "beta")
    work_s: float = 0.21
    noise: float = 0.03
    batch: int = 64
    total_steps: int = 0
    slow: Sequence[Slowness] = ()
    lost_at: tuple[float, int] | None = None
    hangs_at: tuple[float, int] | None = None
    began: float = 1_700_000_000.0
    seed: int = 0
    chatty: bool = True
    _loss: float = field(default=2.4, init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._size = self.num_ranks
        self._workers = list(range(self.num_ranks))
        self._clock = 0.0
        self._step = 0
        self._sums: dict[int, Sample] = {}
        self._next_report = 1.0
        self._stopped = False

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "id": f"{self.seed:016x}",
            "title": "train.py",
            "command": f"hora run -np {self.num_ranks} --dashboard python train.py --epochs 30",
            "began": self.began,
            "elastic": self.lost_at is not None,
            "launcher": "simulated",
        }

    def entries(self, duration_s: float) -> Iterator[Entry]:
        """Yield the events until `duration_s` has passed; a later call continues."""
        if self._clock == 0.0:
            yield self._world(0)
            for worker in self._workers:
                yield Entry(self.began + 0.3, "joined", worker, b"")
            self._clock = 1.5
        while self._clock < duration_s:
            yield from self._one_step()
            while self._clock >= self._next_report:
                yield from self._reports(self._next_report)
                self._next_report += 1.0

    def _host(self, rank: int) -> str:
        return self.hosts[rank * len(self.hosts) // self._size]

    def _world(self, generation: int) -> Entry:
        places = [[worker, rank, self._host(rank)] for rank, worker in enumerate(self._workers)]
        news = {"generation": generation, "places": places}
        return Entry(self.began + self._clock, "world", -1, json.dumps(news).encode())

    def _one_step(self) -> Iterator[Entry]:
        at = self.began + self._clock
        if self.lost_at is not None and self._clock >= self.lost_at[0]:
            yield from self._lose(self.lost_at[1])
            self.lost_at = None
        if self.hangs_at is not None and self._clock >= self.hangs_at[0]:
            self._stopped = True
            self._clock += 1.0
            return
        parts = [self._parts(rank) for rank in range(self._size)]
        works = [sum(one.values()) for one in parts]
        longest = max(works)
        hidden_s, reduce_s = 0.035 * self.work_s / 0.2, 0.012 * self.work_s / 0.2
        self._step += 1
        for rank, (part, work) in enumerate(zip(parts, works, strict=True)):
            before = self._sums.get(rank, Sample())
            self._sums[rank] = Sample(
                step=self._step,
                num_steps=before.num_steps + 1,
                step_s=before.step_s + longest + reduce_s,
                longest_s=max(before.longest_s, longest + reduce_s),
                data_s=before.data_s + part["data"],
                backward_s=before.backward_s + part["backward"],
                between_s=before.between_s + part["between"],
                wait_s=before.wait_s + longest - work,
                reduce_s=before.reduce_s + reduce_s,
                hidden_s=before.hidden_s + hidden_s,
                optimizer_s=before.optimizer_s + part["optimizer"],
                num_bytes=before.num_bytes + 102.2e6,
                num_samples=before.num_samples + self.batch,
            )
        self._clock += longest + reduce_s
        self._loss += (0.35 + 2.1 * math.exp(-self._step / 900) - self._loss) * 0.05 + self._random.gauss(0, 0.008)
        if self.chatty and self._step % 40 == 0:
            text = f"o[step {self._step:>6}] loss {self._loss:.4f}  lr 0.100"
            yield Entry(at, "line", self._workers[0], text.encode())
        if self._step % 400 == 0:
            news = {"kind": "commit", "text": f"checkpoint at step {self._step}"}
            yield Entry(at, "event", self._workers[0], json.dumps(news).encode())

    def _parts(self, rank: int) -> dict[str, float]:
        parts = {
            part: self.work_s * share * max(self._random.gauss(1.0, self.noise), 0.2) for part, share in _SHARES.items()
        }
        for slow in self.slow:
            if slow.rank == rank and slow.begin <= self._clock < slow.end:
                parts[slow.part] += self.work_s * (slow.factor - 1.0)
        return parts

    def _lose(self, rank: int) -> Iterator[Entry]:
        worker, at = self._workers[rank], self.began + self._clock
        yield Entry(at, "exited", worker, json.dumps({"code": 137, "reason": "killed by signal SIGKILL"}).encode())
        self._workers.pop(rank)
        self._size -= 1
        self._clock += 3.0
        self._sums.clear()
        yield self._world(1)

    def _reports(self, second: float) -> Iterator[Entry]:
        at = self.began + second
        for rank, worker in enumerate(self._workers):
            sample = self._sums.get(rank, Sample(step=self._step))
            sample = sample._replace(window_s=1.0, cpu_s=0.93, memory_bytes=1.9e9 + 1e7 * rank)
            waiting = None
            if self._stopped and self.hangs_at is not None and rank != self.hangs_at[1]:
                waiting = ("allreduce.optimizer.0.bucket.3", second - self.hangs_at[0], ())
            metrics = {}
            if rank == 0 and self._sums and not self._stopped:
                metrics = {"loss": self._loss, "accuracy": 1 - 0.4 * self._loss / 2.4}
            is_first = rank == 0 or self._host(rank) != self._host(rank - 1)
            host = self._host_facts() if is_first and int(second) % 2 == 0 else {}
            report = Report(sample, waiting, metrics, (), host, self.total_steps)
            yield Entry(at, "report", worker, report.encode())
        self._sums.clear()

    def _host_facts(self) -> dict[str, Any]:
        wave = self._random.gauss(0, 0.01)
        return {
            "cpu": round(0.71 + wave, 3),
            "num_cpus": 32,
            "memory": round(34.1e9),
            "memory_total": round(128e9),
            "shm": round(0.82e9),
            "shm_total": round(64e9),
            "net_in": round(2.1e8 * (1 + wave)),
            "net_out": round(2.0e8 * (1 - wave)),
            "link": round(1.25e9),
            "load": 24.1,
            "gpus": [
                {"name": "H200", "busy": round(0.87 + wave, 3), "memory": round(61e9), "memory_total": round(139e9)}
                for _ in range(2)
            ],
        }
