"""Workers as the tasks of a Spark stage, one stage for each launch. Spark is the cluster manager here.

A launch asks for as many task slots as it has workers; until Spark has them all, its workers are `scheduling`. A worker
that ends gives its slot back at once. When Spark loses an executor it ends the whole stage, so the workers of that
launch end together. Called by `session`; importing this does not import pyspark.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hora.launch.job import LaunchEvents, WorkerExit, WorkerSpec
from hora.launch.spark.launcher import SparkJob, SparkLauncher, driver_addresses
from hora.launch.spark.placement import place_tasks
from hora.launch.spark.session import active_context
from hora.launch.spark.slots import count_slots, require_slots
from hora.launch.spark.stage import SparkStage
from hora.launch.spark.tasks import SparkTasks
from hora.launch.spark.variables import forwarded_variables
from hora.workers.backend import GRACE_S, PlannedWorker, order_file
from hora.workers.capacity import Refused

__all__ = ["SparkBackend", "spark_context"]

_MEET_S = 0.25
_CLOSE_LIMIT_S = GRACE_S + 45.0
_TERMINATED = 143


def spark_context(backend: str) -> Any | None:
    """The SparkContext on whose cluster workers shall run, or None for this machine.

    `auto` is Spark where this process has a session on a cluster: a `local[n]` master has no machine but this one.
    """
    if backend == "spark":
        context = active_context()
        if context is None:
            raise ValueError("backend='spark' needs an active SparkSession in this process, and there is none")
        return context
    if backend != "auto" or "pyspark" not in sys.modules:
        return None
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    return None if context is None or context._jsc is None or str(context.master).startswith("local") else context


class SparkBackend:
    """See `backend.Backend`. Calls are serialised by the session."""

    def __init__(self, context: Any, events: LaunchEvents) -> None:
        self._context, self._events = context, events
        self._held: set[str] = set()
        self._groups: list[_Group] = []

    def settle(self, n: int) -> None:
        try:
            require_slots(self._context, len(self._held) + n)
        except ValueError:
            return  # `reserve` says it, worker by worker

    def reserve(self, worker: str, request: Mapping[str, Any]) -> None:
        conf = self._context.getConf()
        cores, gpus = float(conf.get("spark.task.cpus", "1")), float(conf.get("spark.task.resource.gpu.amount", "0"))
        for what, wanted, has, setting in (
            ("CPU cores", request["cpu"], cores, "spark.task.cpus"),
            ("GPUs", request["nvidia_gpu"], gpus, "spark.task.resource.gpu.amount"),
        ):
            if wanted > has:
                raise Refused(f"{wanted:g} {what} were asked for, but a Spark task here has {has:g} ({setting})")
        slots = count_slots(self._context)
        if len(self._held) >= slots:
            raise Refused(f"a Spark task slot was asked for, but {slots - len(self._held)} of {slots} are free")
        self._held.add(worker)

    def start(self, launched: Sequence[PlannedWorker]) -> None:
        self._groups = [group for group in self._groups if not group.over]
        self._groups.append(_Group(self._context, launched, self._events))

    def terminate(self, numbers: Iterable[int], *, grace_s: float) -> None:
        wanted = set(numbers)
        for group in self._groups:
            group.terminate(wanted, grace_s=grace_s)

    def release(self, worker: str) -> None:
        self._held.discard(worker)

    def clear_up(self, number: int) -> None:
        pass  # its task ends what is left of it

    def close(self) -> None:
        for group in self._groups:
            group.terminate(group.numbers, grace_s=GRACE_S)
        for group in self._groups:
            group.join()


class _Tasks(SparkTasks):
    """Knows from which address each task has called."""

    def address(self, task: int) -> str:
        with self._arrived:
            peer = self._peers.get(task)
            return "unknown" if peer is None else peer.host


class _Group:
    """The workers of one launch: waiting for slots -> running -> over. Implements LaunchEvents for the launcher."""

    def __init__(self, context: Any, launched: Sequence[PlannedWorker], events: LaunchEvents) -> None:
        self._launched, self._events = list(launched), events
        # Here and now: executors need not have the file, and it may change before there are slots.
        script = launched[0].request.get("script")
        self._source = Path(script).read_text() if script else None
        self.numbers = frozenset(worker.number for worker in launched)
        self._lock = threading.RLock()
        self._stopped: set[int] = set()
        self._left = set(self.numbers)
        self._all_ended = threading.Event()
        self._launcher: SparkLauncher | None = None
        self._tasks_of: dict[int, int] = {}
        self._bind_address, self._address = driver_addresses(context)
        self._tasks = _Tasks(len(self._launched), bind_address=self._bind_address)
        keep_output = not str(context.master).startswith("local")
        body = self._tasks.body(self._address, stream_output=True, keep_output=keep_output)
        self._stage = SparkStage(context, len(self._launched), body, group="hora-workers")
        self._stage.start()
        self._thread = threading.Thread(target=self._run, name=self._stage.group, daemon=True)
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

    # What the launcher reports, on the listener's thread.

    def output(self, worker: int, stream: str, data: bytes) -> None:
        self._events.output(worker, stream, data)

    def started(self, worker: int) -> None:
        self._events.started(worker)

    def exited(self, ended: WorkerExit) -> None:
        with self._lock:
            if ended.worker not in self._left:
                return
            self._left.remove(ended.worker)
            task = self._tasks_of.get(ended.worker)
            if task is not None:
                self._tasks.send(task, {"kind": "leave"})
            none_left = not self._left
        self._events.exited(ended)
        if none_left:
            self._all_ended.set()

    # The group's own thread.

    def _run(self) -> None:
        try:
            if self._meet():
                self._all_ended.wait()
        finally:
            self._end_rest("the Spark stage of these workers ended")
            self._tasks.dismiss()
            if self._tasks.missing() or not self._stage.ended.wait(GRACE_S):
                self._stage.cancel()
            self._tasks.close()

    def _meet(self) -> bool:
        """Wait until every task is there, then start the workers. False if it does not come to that."""
        while (places := self._tasks.wait(_MEET_S)) is None:
            with self._lock:
                if self._left <= self._stopped:
                    return False
            if self._stage.ended.is_set():
                self._end_rest(self._stage.failure_text())
                return False
        placements = place_tasks(places)
        wanted = SparkJob(function=b"", num_proc=len(placements), group=self._stage.group, bind_gpus=False)
        specs = []
        for worker, placement in zip(self._launched, placements, strict=True):
            self._tasks_of[worker.number] = placement.task
            worker.record.ip_address = self._tasks.address(placement.task)
            own = {"CDSW_IP_ADDRESS": worker.record.ip_address, "CDSW_MASTER_IP": self._address}
            own |= {"CML_MASTER_IP": self._address, "CUDA_VISIBLE_DEVICES": ",".join(placement.own_gpus)}
            spec = WorkerSpec(
                worker=worker.number,
                slot=placement.slot,
                argv=(sys.executable, "-m", "hora.workers.main"),
                env={**forwarded_variables(), **worker.variables, **own, **worker.request["env"]},
                private_files=order_file(worker.request, cores=(), source=self._source),
                grace_s=GRACE_S,
            )
            specs.append(spec)
        launcher = SparkLauncher(
            self._tasks, self._stage, placements, wanted, bind_address=self._bind_address, address=self._address
        )
        with self._lock:
            self._launcher = launcher
            early = sorted(self._left & self._stopped)
        # Not under the lock: the launcher may report at once, and the session's lock comes before ours.
        launcher.start([spec for spec in specs if spec.worker not in early], self)
        with self._lock:
            meanwhile = self._stopped.difference(early)
        launcher.terminate(meanwhile, grace_s=GRACE_S)
        for number in early:
            self.exited(WorkerExit(worker=number, code=_TERMINATED, reason="it was stopped before it started"))
        return True

    def _end_rest(self, reason: str) -> None:
        with self._lock:
            left = sorted(self._left)
        for number in left:
            stopped = number in self._stopped
            why = "it was stopped before it started" if stopped else reason
            self.exited(WorkerExit(worker=number, code=_TERMINATED if stopped else 255, reason=why))
