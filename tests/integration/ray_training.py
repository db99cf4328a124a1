"""Elastic training on Ray whose test reads the workers' log and then injects a fault."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

INTERVAL = "horovod.runner.elastic.driver.DISCOVER_HOSTS_FREQUENCY_SECS"


def train(directory: str) -> tuple[int, int, int, int]:
    """Commit step after step until the test ends the training; return rank, size, pid and steps."""
    import time

    import horovod.torch as hvd
    from horovod.ray import ray_logger

    hvd.init()
    ray_logger.log({"started": os.getpid()})
    state = hvd.elastic.TorchState(step=0)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while not hvd.broadcast_object(os.path.exists(f"{directory}/over"), root_rank=0):
            state.step += 1
            host = os.environ["HOROVOD_HOSTNAME"]
            ray_logger.log({"step": state.step, "pid": os.getpid(), "host": host, "size": hvd.size()})
            time.sleep(0.02)
            state.commit()

    loop(state)
    ray_logger.log({"finished": os.getpid()})
    return hvd.rank(), hvd.size(), os.getpid(), state.step


def elastic_settings(hosts: Mapping[str, int], **limits: Any) -> Any:
    from horovod.ray import ElasticRayExecutor
    from horovod.runner.elastic.discovery import FixedHosts

    settings = ElasticRayExecutor.create_settings(timeout_s=120, elastic_timeout=120, **limits)
    settings.discovery = FixedHosts(hosts)
    return settings


class Misfortune:
    """A log callback: injects a fault when all workers train, and ends the training at the expected size."""

    def __init__(
        self, size: int, happens: Callable[[dict[int, str]], object], size_afterwards: int, directory: Path
    ) -> None:
        self.size, self.happens, self.size_afterwards, self.directory = size, happens, size_afterwards, directory
        self.beginners: dict[int, str] = {}
        self.victim: object = None

    def __call__(self, entry: dict[str, Any]) -> None:
        if "step" not in entry:
            return
        if self.victim is None:
            self.beginners[entry["pid"]] = entry["host"]
            if len(self.beginners) == self.size and entry["step"] > 3:
                self.victim = self.happens(self.beginners)
        elif entry["size"] == self.size_afterwards and (
            self.size_afterwards < self.size or entry["pid"] not in self.beginners
        ):
            (self.directory / "over").touch()


class Stages:
    """A discovery and a log callback: when all slots of a stage train, discovery returns the hosts of the next stage;
    after the last stage the training ends. `least`, `most`: limits of the number of workers; a stage with fewer slots
    than `least` ends at the next discovery.
    """

    def __init__(
        self, stages: Sequence[Mapping[str, int]], directory: Path, *, least: int = 1, most: int | None = None
    ) -> None:
        self._stages, self._directory, self._least, self._most = list(stages), directory, least, most
        self._training: set[int] = set()
        self.started: set[int] = set()
        self.finished: set[int] = set()

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        found = dict(self._stages[0])
        if sum(found.values()) < self._least:
            self._stages.pop(0)
        return found

    def __call__(self, entry: dict[str, Any]) -> None:
        self.started |= {entry["started"]} if "started" in entry else set()
        self.finished |= {entry["finished"]} if "finished" in entry else set()
        wanted = min(sum(self._stages[0].values()), self._most or 1_000)
        if entry.get("size") == wanted and entry["host"] in self._stages[0]:
            self._training.add(entry["pid"])
        if len(self._training) < wanted:
            return
        if len(self._stages) > 1:
            self._training.clear()
            self._stages.pop(0)
        else:
            (self._directory / "over").touch()
