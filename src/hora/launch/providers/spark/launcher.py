"""The Spark launcher: the ranks of a job as the tasks of one Spark stage. Spark is the cluster manager here.

Importing this module does not import pyspark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hora.launch.controller.launcher import HostLauncher
from hora.launch.controller.loop import run_job
from hora.launch.job import Job, JobResult, WorkerSpec
from hora.launch.providers.spark.cluster import GPU_VARIABLE, seconds_of
from hora.launch.providers.spark.driver import TaskAgent, TaskAgents
from hora.launch.providers.spark.no_driver import NO_DRIVER
from hora.launch.slots import Slot, place_ranks, visible_gpus
from hora.telemetry.stacks import callers_line


@dataclass(frozen=True, kw_only=True)
class SparkJob(Job):
    """A job on a Spark cluster. Its slots get their hosts when its tasks have arrived."""

    function: bytes = field(repr=False)
    start_timeout_s: float = field(default_factory=lambda: seconds_of("HOROVOD_SPARK_START_TIMEOUT"))
    wait_for_slots: bool = False  # wait for other Spark jobs without a limit; the start timeout begins with the stage
    bind_gpus: bool = True  # make Spark's GPUs the visible ones, indexed by local rank
    python: str | None = None  # of the processes; None: the one of Spark's Python workers
    function_name: str = ""  # what the user calls, …
    line: str = field(default_factory=callers_line)  # … and where

    @property
    def about(self) -> str:
        """Return the name of the job on Spark's pages."""
        return f"{self.function_name or self.title} ({self.line})" if self.line else self.function_name or self.title


def slots_of(num_proc: int) -> tuple[Slot, ...]:
    """Return the slots of a job before its tasks have arrived."""
    return tuple(place_ranks([""] * num_proc))


def place_tasks(tasks: Sequence[TaskAgent]) -> list[TaskAgent]:
    """Return the tasks in the order of their ranks.

    Ranks are consecutive within a host, so that ranks beside one another share memory. Hosts are ordered by their hash
    and rotated until the host of task 0 comes first; within a host the order of the tasks is kept.
    """
    first = min(tasks, key=lambda agent: agent.task).host
    return sorted(tasks, key=lambda agent: (agent.host < first, agent.host, agent.task))


def run_in_tasks(driver: TaskAgents, wanted: SparkJob) -> JobResult:
    """Run the job in these tasks, as soon as they have arrived."""
    arrived = driver.meet_in_time(wanted.num_proc, wanted.start_timeout_s, wait_for_slots=wanted.wait_for_slots)
    tasks = place_tasks(arrived)
    job = replace(wanted, slots=tuple(place_ranks([task.host for task in tasks])))
    return run_job(job, SparkLauncher(driver, job, tasks))


class SparkLauncher(HostLauncher):
    """Starts each worker in the Spark task of its rank; without `tasks`, in the one that its slot's host names."""

    def __init__(self, driver: TaskAgents, job: SparkJob, tasks: Sequence[TaskAgent] = ()) -> None:
        super().__init__(agents=driver, listen=driver.address)
        self.bind_address = driver.bind_address
        self._driver, self._job, self._tasks = driver, job, tasks
        # Slots have hashes for names, not addresses. In an elastic job rank 0 has no lasting place.
        self._master = {"MASTER_ADDR": tasks[0].address} if tasks else {}

    def close(self) -> None:
        self._driver.release()

    def _node_of(self, spec: WorkerSpec) -> str:
        return self._tasks[spec.slot.rank].name if self._tasks else spec.slot.hostname

    def _for_elsewhere(self, spec: WorkerSpec) -> WorkerSpec:
        own = self._driver.agent(self._node_of(spec))
        env = {**spec.env, **self._master, GPU_VARIABLE: ",".join(own.gpus), NO_DRIVER: "1"}
        visible = visible_gpus(own.gpus, [task.gpus for task in self._tasks or [own] if task.host == own.host])
        if visible and self._job.bind_gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
        # An empty program means the task's own Python.
        return replace(spec, env=env, argv=(self._job.python or "", *spec.argv[1:]))
