"""Workers as the tasks of a Spark stage, one stage per launch. Spark is the cluster manager.

A launch requests one task slot per worker; until Spark grants all of them, its workers are `scheduling`. A worker's
slot is free as soon as it ends. If Spark loses an executor it ends the whole stage, so the workers of that launch end
together. Importing this module does not import pyspark.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hora.launch.agent.protocol import Exited
from hora.launch.job import LaunchEvents, WorkerSpec
from hora.launch.providers.spark.cluster import (
    Placement,
    active_cluster,
    count_slots,
    forwarded_variables,
    is_local,
    place_tasks,
    require_slots,
)
from hora.launch.providers.spark.driver import StageDriver
from hora.launch.providers.spark.launcher import SparkLauncher
from hora.workers.backend import GRACE_S, PlannedWorker, order_file, worker_spec
from hora.workers.capacity import CapacityError

_CLOSE_LIMIT_S = GRACE_S + 45.0
_TERMINATED, _FAILED = 143, 255


def spark_cluster(backend: str) -> Any | None:
    """Return the SparkContext, or the Connect session, on whose cluster workers run; None for this machine.

    `auto` selects Spark if this process has a session on a cluster. A `local[n]` master has only this machine.
    """
    if backend != "spark" and (backend != "auto" or "pyspark" not in sys.modules):
        return None
    found = active_cluster()
    if found is None and backend == "spark":
        raise ValueError("backend='spark' needs an active SparkSession in this process, and there is none")
    if found is not None and backend == "auto" and is_local(found):
        return None
    return found


class TaskSlots:
    """Task slots of a Spark cluster that workers hold; shared by both Spark backends."""

    def __init__(self) -> None:
        self._held: set[str] = set()

    def shared(self, n: int, request: Mapping[str, Any]) -> Mapping[str, Any]:
        return request  # a task has the cores that Spark gives it

    def release(self, worker: str) -> None:
        self._held.discard(worker)

    def clear_up(self, number: int) -> None:
        pass  # its task ends what is left of it

    def _take(self, worker: str, request: Mapping[str, Any], conf: Any, slots: int) -> None:
        for what, wanted, setting, default in (
            ("CPU cores", request["cpu"], "spark.task.cpus", "1"),
            ("GPUs", request["nvidia_gpu"], "spark.task.resource.gpu.amount", "0"),
        ):
            if wanted > (has := float(conf.get(setting, default))):
                raise CapacityError(f"{wanted:g} {what} were requested, but a Spark task here has {has:g} ({setting})")
        if len(self._held) >= slots:
            raise CapacityError(f"a Spark task slot was requested, but {slots - len(self._held)} of {slots} are free")
        self._held.add(worker)


class SparkWorkerBackend(TaskSlots):
    """See `backend.WorkerBackend`. Calls are serialised by the session."""

    def __init__(self, context: Any, events: LaunchEvents) -> None:
        super().__init__()
        self._context, self._events = context, events
        self._launches: list[_Launch] = []

    def settle(self, n: int) -> None:
        try:
            require_slots(self._context, len(self._held) + n)
        except ValueError:
            return  # `reserve` says it, worker by worker

    def reserve(self, worker: str, request: Mapping[str, Any]) -> None:
        self._take(worker, request, self._context.getConf(), count_slots(self._context))

    def start(self, planned: Sequence[PlannedWorker]) -> None:
        self._launches = [launch for launch in self._launches if not launch.over]
        self._launches.append(_Launch(self._context, planned, self._events))

    def terminate(self, numbers: Iterable[int], *, grace_s: float) -> None:
        wanted = set(numbers)
        for launch in self._launches:
            launch.terminate(wanted, grace_s=grace_s)

    def close(self) -> None:
        for launch in self._launches:
            launch.terminate(launch.numbers, grace_s=GRACE_S)
        for launch in self._launches:
            launch.join()


class _Launch:
    """Workers of one launch: waiting for slots -> running -> over. Implements LaunchEvents for the Spark launcher.

    Its own thread drives these states; `_lock` guards what callers and the server's thread see.
    """

    def __init__(self, context: Any, planned: Sequence[PlannedWorker], events: LaunchEvents) -> None:
        self._planned, self._events = list(planned), events
        # Here and now: executors need not have the file, and it may change before there are slots.
        script = planned[0].request.get("script")
        self._source = Path(script).read_text() if script else None
        self.numbers = frozenset(worker.number for worker in planned)
        self._lock = threading.RLock()
        self._stopped: set[int] = set()
        self._left = set(self.numbers)  # those whose end was not reported yet
        self._all_ended = threading.Event()
        self._launcher: SparkLauncher | None = None
        self._task_of: dict[int, int] = {}
        self._driver = StageDriver(context, len(self._planned), group="hora-workers")
        self._thread = threading.Thread(target=self._run, name=self._driver.stage.group, daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def terminate(self, numbers: Iterable[int], *, grace_s: float) -> None:
        with self._lock:
            chosen = self._left.intersection(numbers)
            self._stopped |= chosen
            if self._launcher is not None:
                self._launcher.terminate(chosen, grace_s=grace_s)

    def join(self) -> None:
        self._thread.join(_CLOSE_LIMIT_S)

    # What the launcher reports, on the server's thread.

    def output(self, worker: int, stream: str, data: bytes) -> None:
        self._events.output(worker, stream, data)

    def started(self, worker: int) -> None:
        self._events.started(worker)

    def exited(self, ended: Exited) -> None:
        with self._lock:
            if ended.worker not in self._left:
                return
            self._left.remove(ended.worker)
            if ended.worker in self._task_of:
                self._driver.dismiss_task(self._task_of[ended.worker])
            none_left = not self._left
        self._events.exited(ended)
        if none_left:
            self._all_ended.set()

    # The launch's own thread.

    def _run(self) -> None:
        reason = "the Spark stage of these workers ended"
        with self._driver:
            try:
                places = self._driver.meet(len(self._planned), self._still_wanted)
                if places is not None:
                    self._start(place_tasks(places))
                    self._all_ended.wait()
                elif self._driver.stage.ended.is_set():
                    reason = self._driver.stage.failure_text()
            finally:
                self._end_rest(reason)

    def _still_wanted(self) -> bool:
        """Return whether any worker was not stopped while it waited for its slot."""
        with self._lock:
            return not self._left <= self._stopped

    def _start(self, placements: Sequence[Placement]) -> None:
        """Start the workers that were not stopped meanwhile, each in its task."""
        specs = [self._spec(worker, placement) for worker, placement in zip(self._planned, placements, strict=True)]
        launcher = SparkLauncher(self._driver, placements, bind_gpus=False)
        with self._lock:
            self._launcher = launcher  # from here on `terminate` reaches what runs
            stopped = sorted(self._left & self._stopped)
        # Not under the lock: the launcher may report at once, and the session's lock comes before ours.
        launcher.start([spec for spec in specs if spec.worker not in stopped], self)
        with self._lock:
            meanwhile = self._stopped.difference(stopped)
        launcher.terminate(meanwhile, grace_s=GRACE_S)
        for number in stopped:
            self._report_stopped(number)

    def _spec(self, worker: PlannedWorker, placement: Placement) -> WorkerSpec:
        self._task_of[worker.number] = placement.task
        worker.record.ip_address = self._driver.host_of(placement.task)
        own = {
            "CDSW_IP_ADDRESS": worker.record.ip_address,
            "CDSW_MASTER_IP": self._driver.address,
            "CML_MASTER_IP": self._driver.address,
            "CUDA_VISIBLE_DEVICES": ",".join(placement.own_gpus),
        }
        env = {**forwarded_variables(), **worker.variables, **own, **worker.request["env"]}
        files = order_file(worker.request, cores=(), source=self._source)
        return worker_spec(worker.number, env, files, slot=placement.slot)

    def _end_rest(self, reason: str) -> None:
        """Report the end of every remaining worker: the stopped ones, and those that failed for `reason`."""
        with self._lock:
            left = sorted(self._left)
        for number in left:
            if number in self._stopped:
                self._report_stopped(number)
            else:
                self.exited(Exited(worker=number, code=_FAILED, reason=reason))

    def _report_stopped(self, number: int) -> None:
        self.exited(Exited(worker=number, code=_TERMINATED, reason="it was stopped before it started"))
