"""The Spark launcher: the ranks of a job as the tasks of one Spark stage. Spark is the cluster manager here.

`run_on_spark` starts the stage, waits until every task has reported its host, assigns ranks to tasks and runs the job
with the controller. `SparkLauncher` starts, watches and ends processes through the tasks. Importing this module does
not import pyspark.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hora.errors import JobFailedError, StartTimeoutError
from hora.launch.controller.launcher import AgentHandle
from hora.launch.controller.loop import run_job
from hora.launch.job import Job, JobResult, LaunchEvents, OutputOptions, Watching, WorkerExit, WorkerSpec
from hora.launch.providers.spark.cluster import GPU_VARIABLE, Placement, TaskPlace, place_tasks
from hora.launch.providers.spark.driver import StageDriver, TaskAgent, TaskAgents
from hora.launch.slots import Slot

__all__ = ["SparkJob", "SparkLauncher", "run_in_tasks", "run_on_spark"]

_NOTICE_AFTER_S = 5.0

_log = logging.getLogger("hora.launch")


@dataclass(frozen=True, kw_only=True)
class SparkJob:
    """Description of a job on a cluster. `function` is the cloudpickle of `(callable, args, kwargs)`.

    `wait_for_slots`: wait for other Spark jobs without a limit; the start timeout begins when Spark starts the stage.
    `bind_gpus`: make Spark's GPUs the visible ones, indexed by local rank. `executable`: the Python of the processes,
    if it is not the one of Spark's Python workers.
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
    watching: Watching | None = None

    def job(self, slots: Iterable[Slot]) -> Job:
        """Return the job for the controller, with its ranks in these slots."""
        return Job(
            slots=tuple(slots),
            function=self.function,
            env=self.env,
            output=self.output,
            start_timeout_s=self.start_timeout_s,
            verbose=self.verbose,
            title=self.group,
            watching=self.watching,
        )


def run_on_spark(context: Any, wanted: SparkJob) -> JobResult:
    """Run the job on the cluster of this SparkContext. All task slots are freed, whatever the outcome."""
    with StageDriver(context, wanted.num_proc, group=wanted.group, stream_output=wanted.stream_output) as driver:
        return run_in_tasks(driver, _meet(driver, wanted), wanted)


def run_in_tasks(driver: TaskAgents, places: Sequence[TaskPlace], wanted: SparkJob) -> JobResult:
    """Run the job in these tasks, which have arrived."""
    placements = place_tasks(places)
    launcher = SparkLauncher(driver, placements, bind_gpus=wanted.bind_gpus, executable=wanted.executable)
    return run_job(wanted.job(placement.slot for placement in placements), launcher)


def _meet(driver: StageDriver, wanted: SparkJob) -> list[TaskPlace]:
    """Wait until every task has arrived."""
    deadline = _StartDeadline(driver, wanted)
    places = driver.meet(wanted.num_proc, deadline.go_on)
    if places is not None:
        return places
    if driver.stage.ended.is_set():
        raise JobFailedError(
            f"Spark job has failed before its {wanted.num_proc} processes started: {driver.stage.failure_text()}"
        )
    raise StartTimeoutError(
        f"Timed out waiting for Spark tasks to start. Tasks {driver.missing()} of {wanted.num_proc} "
        f"had not started after {wanted.start_timeout_s:g} s. Check that the cluster has "
        f"{wanted.num_proc} free task slots and that executors can reach the driver, or raise "
        "start_timeout (HOROVOD_SPARK_START_TIMEOUT)."
    )


class _StartDeadline:
    """Deadline for the tasks: the start timeout, which with `wait_for_slots` begins when Spark starts the stage."""

    def __init__(self, driver: StageDriver, wanted: SparkJob) -> None:
        self._driver, self._wanted = driver, wanted
        self._began = self._started = time.monotonic()
        self._noticed = False

    def go_on(self) -> bool:
        stage, now = self._driver.stage, time.monotonic()
        if self._wanted.wait_for_slots and self._others_have_the_slots():
            self._started = now
            if now - self._began > _NOTICE_AFTER_S and not self._noticed:
                self._noticed = True
                num_proc = self._wanted.num_proc
                _log.warning("waiting for %d free Spark task slots (job group %s)", num_proc, stage.group)
            return True
        return now - self._started <= self._wanted.start_timeout_s

    def _others_have_the_slots(self) -> bool:
        """Return whether there are enough slots and other jobs hold them."""
        if self._driver.num_arrived() or not self._driver.stage.is_waiting():
            return False
        return self._driver.stage.count_slots() >= self._wanted.num_proc


class SparkLauncher:
    """Starts each worker in the Spark task that was placed for its rank. See `job.Launcher`.

    `bind_gpus`: make Spark's GPUs the visible ones. `executable`: the workers' Python, if it is not that of Spark's
    own.
    """

    def __init__(
        self,
        driver: TaskAgents,
        placements: Sequence[Placement],
        *,
        bind_gpus: bool,
        executable: str | None = None,
    ) -> None:
        self.bind_address, self.advertised_address = driver.bind_address, driver.address
        self._driver, self._bind_gpus, self._executable = driver, bind_gpus, executable
        self._placements = {placement.slot.rank: placement for placement in placements}
        # Slots have hashes for names, not addresses. In an elastic job rank 0 has no lasting place.
        self._master = {"MASTER_ADDR": driver.host_of(placements[0].task)} if placements else {}
        self._used: dict[AgentHandle, None] = {}

    def start(self, workers: Sequence[WorkerSpec], events: LaunchEvents) -> None:
        for worker in workers:
            self._start(worker, self._placements[worker.slot.rank], events)

    def _start(self, worker: WorkerSpec, placement: Placement, events: LaunchEvents) -> None:
        agent = self._driver.agent_of(placement.task)
        if agent is None:
            reason = f"its Spark task ({placement.task}) ended: the executor was lost or the task was killed"
            events.exited(WorkerExit(worker=worker.worker, code=TaskAgent.lost_exit_code, reason=reason))
            return
        if agent not in self._used:
            self._used[agent] = None
            agent.look_after(events)
        agent.start([self._in_a_task(worker, placement)])

    def terminate(self, workers: Iterable[int], *, grace_s: float) -> None:
        chosen = list(workers)
        for agent in list(self._used):
            agent.terminate(chosen, grace_s=grace_s)

    def close(self) -> None:
        self._driver.release()

    def _in_a_task(self, worker: WorkerSpec, placement: Placement) -> WorkerSpec:
        env = {**worker.env, **self._master, GPU_VARIABLE: ",".join(placement.own_gpus)}
        if placement.visible_gpus and self._bind_gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(placement.visible_gpus)
        # No program: the Python of the task.
        return replace(worker, env=env, argv=(self._executable or "", *worker.argv[1:]), cwd=None)
