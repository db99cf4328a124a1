"""The Spark launcher: the ranks of a job as the tasks of one Spark stage. Spark is the cluster manager here.

`run_on_spark` starts the stage, waits until every task has said where it runs, gives ranks to tasks and
hands the job to the controller like any other. `SparkLauncher` then starts, watches and ends processes
through the tasks. Called by `HorovodRunner` and `horovod.spark.run`. Importing this module does not import
pyspark.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hora.errors import JobFailedError, StartTimeoutError
from hora.launch.control.controller import run_job
from hora.launch.job import Job, JobResult, LaunchEvents, OutputOptions, WorkerExit, WorkerSpec
from hora.launch.spark.placement import Placement, TaskPlace, place_tasks
from hora.launch.spark.stage import SparkStage
from hora.launch.spark.task import mask
from hora.launch.spark.tasks import SparkTasks
from hora.launch.spark.variables import GPU_VARIABLE
from hora.net.wire import Header

__all__ = ["SparkJob", "SparkLauncher", "driver_addresses", "run_on_spark"]

_LEAVE_LIMIT_S = 10.0
_LOST_EXIT_CODE = 137
_NOTICE_AFTER_S = 5.0

_log = logging.getLogger("hora.launch")


@dataclass(frozen=True, kw_only=True)
class SparkJob:
    """What to run on a cluster. `function` is the cloudpickle of `(callable, args, kwargs)`.

    `wait_for_slots`: other Spark jobs may hold the slots for as long as they like, the start timeout begins
    when Spark starts the stage. `bind_gpus`: make Spark's GPUs the visible ones, indexed by local rank.
    `executable`: the Python of the processes, if it is not the one of Spark's Python workers.
    """

    function: bytes = dataclasses.field(repr=False)
    num_proc: int
    group: str
    env: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    output: OutputOptions = dataclasses.field(default_factory=OutputOptions)
    stream_output: bool = True
    start_timeout_s: float = 600.0
    wait_for_slots: bool = False
    bind_gpus: bool = True
    executable: str | None = None
    verbose: bool = False


def run_on_spark(context: Any, wanted: SparkJob) -> JobResult:
    """Run the job on the cluster of this SparkContext. However it ends, no task slot stays taken."""
    bind_address, address = driver_addresses(context)
    with contextlib.ExitStack() as stack:
        tasks = SparkTasks(wanted.num_proc, bind_address=bind_address)
        stack.callback(tasks.close)
        # In local mode the executor's log is the driver's own terminal, which has its say already.
        keep_output = not context.master.startswith("local")
        body = tasks.body(address, stream_output=wanted.stream_output, keep_output=keep_output)
        stage = SparkStage(context, wanted.num_proc, body, group=wanted.group)
        stack.callback(_release, tasks, stage)
        stage.start()
        placements = place_tasks(_meet(tasks, stage, wanted))
        launcher = SparkLauncher(tasks, stage, placements, wanted, bind_address=bind_address, address=address)
        job = Job(
            slots=tuple(placement.slot for placement in placements),
            function=wanted.function,
            env=wanted.env,
            output=wanted.output,
            start_timeout_s=wanted.start_timeout_s,
            verbose=wanted.verbose,
        )
        return run_job(job, launcher)


class SparkLauncher:
    """Starts each worker in the Spark task that was placed for its rank. See `spec.Launcher`."""

    def __init__(
        self,
        tasks: SparkTasks,
        stage: SparkStage,
        placements: Sequence[Placement],
        wanted: SparkJob,
        *,
        bind_address: str,
        address: str,
    ) -> None:
        self.bind_address, self.advertised_address = bind_address, address
        self._tasks, self._stage, self._wanted = tasks, stage, wanted
        self._placements = {placement.slot.rank: placement for placement in placements}
        self._lock = threading.Lock()
        self._running: dict[int, int] = {}  # task -> worker
        self._events: LaunchEvents | None = None

    def start(self, workers: Sequence[WorkerSpec], events: LaunchEvents) -> None:
        self._events = events
        self._tasks.on_message = self._message
        for worker in workers:
            placement = self._placements[worker.slot.rank]
            with self._lock:
                self._running[placement.task] = worker.worker
            self._tasks.send(placement.task, *self._order(worker, placement))
        for task in set(range(len(self._placements))) - self._tasks.connected():
            self._message(task, {"kind": "gone"}, b"")

    def terminate(self, workers: Iterable[int], *, grace_s: float) -> None:
        wanted = set(workers)
        with self._lock:
            ending = [(task, worker) for task, worker in self._running.items() if worker in wanted]
        for task, worker in ending:
            self._tasks.send(task, {"kind": "terminate", "worker": worker, "grace_s": grace_s})

    def close(self) -> None:
        _release(self._tasks, self._stage)

    def _order(self, worker: WorkerSpec, placement: Placement) -> tuple[Header, bytes]:
        """The message that makes a task start the worker's process."""
        nonce = secrets.token_bytes(32)
        private = json.dumps({name: data.hex() for name, data in worker.private_files.items()}).encode()
        env = dict(worker.env)
        env[GPU_VARIABLE] = ",".join(placement.own_gpus)
        if placement.visible_gpus and self._wanted.bind_gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(placement.visible_gpus)
        header = {
            "kind": "start",
            "worker": worker.worker,
            "slot": dataclasses.asdict(worker.slot),
            "executable": self._wanted.executable,
            "arguments": list(worker.argv[1:]),
            "grace_s": worker.grace_s,
            "preload": worker.preload,
            "nonce": nonce.hex(),
            "private_files": mask(self._tasks.secret, nonce, private).hex(),
        }
        return header, json.dumps(env).encode()

    def _message(self, task: int, header: Header, payload: bytes) -> None:
        assert self._events is not None
        kind = header.pop("kind")
        if kind == "output":
            self._events.output(header["worker"], header["stream"], payload)
        elif kind == "started":
            self._events.started(header["worker"])
        elif kind == "exited":
            self._exited(task, WorkerExit(**header))
        elif kind == "gone":
            with self._lock:
                worker = self._running.get(task)
            if worker is not None:
                reason = f"its Spark task ({task}) ended: the executor was lost or the task was killed"
                self._exited(task, WorkerExit(worker=worker, code=_LOST_EXIT_CODE, reason=reason))

    def _exited(self, task: int, ended: WorkerExit) -> None:
        with self._lock:
            if self._running.get(task) != ended.worker:
                return
            del self._running[task]
        assert self._events is not None
        self._events.exited(ended)


def driver_addresses(context: Any) -> tuple[str, str]:
    """Where to listen for the executors, and the address under which they reach it.

    Spark has already settled how executors reach the driver. Where that is loopback nobody else shall reach
    us.
    """
    if context.master.startswith("local"):
        return "127.0.0.1", "127.0.0.1"
    conf = context.getConf()
    host = conf.get("spark.driver.host", "") or socket.gethostname()
    try:
        resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:  # a name that only the executors' side of the network knows
        return "0.0.0.0", host
    if ipaddress.ip_address(resolved).is_loopback:
        return str(resolved), str(resolved)
    bind = conf.get("spark.driver.bindAddress", "") or str(resolved)
    return (bind if _can_bind(bind) else "0.0.0.0"), host


def _can_bind(address: str) -> bool:
    # In a pod the driver's host is often a service's address, which is not an address of this machine.
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def _meet(tasks: SparkTasks, stage: SparkStage, wanted: SparkJob) -> list[TaskPlace]:
    """Wait until every task has arrived."""
    began = time.monotonic()
    started = began
    noticed = False
    while True:
        places = tasks.wait(0.25)
        if places is not None:
            return places
        if stage.ended.is_set():
            raise JobFailedError(
                f"Spark job has failed before its {wanted.num_proc} processes started: {stage.failure_text()}"
            )
        if wanted.wait_for_slots and not tasks.num_arrived() and stage.is_waiting():
            started = time.monotonic()
            if started - began > _NOTICE_AFTER_S and not noticed:
                noticed = True
                _log.warning("waiting for %d free Spark task slots (job group %s)", wanted.num_proc, stage.group)
        elif time.monotonic() - started > wanted.start_timeout_s:
            raise StartTimeoutError(
                f"Timed out waiting for Spark tasks to start. Tasks {tasks.missing()} of {wanted.num_proc} "
                f"had not started after {wanted.start_timeout_s:g} s. Check that the cluster has "
                f"{wanted.num_proc} free task slots and that executors can reach the driver, or raise "
                "start_timeout (HOROVOD_SPARK_START_TIMEOUT)."
            )


def _release(tasks: SparkTasks, stage: SparkStage) -> None:
    """Give the slots back: the tasks end on their own as a rule, and Spark kills those that do not."""
    tasks.dismiss()
    # After the loss of a task Spark would repeat the stage, which is of no use to anybody.
    if tasks.missing() or tasks.lost_one or not stage.ended.wait(_LEAVE_LIMIT_S):
        stage.cancel()
