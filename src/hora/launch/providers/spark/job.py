"""A job whose ranks run in the tasks of one Spark stage. Spark is the cluster manager here.

Importing this module does not import pyspark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hora.launch.controller.launcher import AgentHandle, HostLauncher
from hora.launch.controller.loop import run_job
from hora.launch.job import Job, JobResult, WorkerSpec
from hora.launch.ports import check_ports
from hora.launch.preload import modules_to_preload
from hora.launch.providers.spark.cluster import GPU_VARIABLE, START_TIMEOUT, seconds_of
from hora.launch.providers.spark.no_driver import NO_DRIVER
from hora.launch.providers.spark.tasks import TASKS_PYTHON, SparkTasks
from hora.launch.slots import Slot, place_ranks, visible_gpus
from hora.telemetry.stacks import callers_line


@dataclass(frozen=True, kw_only=True)
class SparkJob(Job):
    """A job on a Spark cluster. Its slots get their hosts when its tasks have arrived."""

    function: bytes = field(repr=False)
    start_timeout_s: float = field(default_factory=lambda: seconds_of(START_TIMEOUT))
    platform: str = "Spark"
    wait_for_slots: bool = False  # wait for other Spark jobs without a limit; the start timeout begins with the stage
    bind_gpus: bool = True  # make Spark's GPUs the visible ones, indexed by local rank
    python: str | None = None  # of the processes; None: the one of Spark's Python workers
    resources: Any = None  # a ResourceProfile of Spark for the tasks
    function_name: str = ""  # what the user calls, …
    line: str = field(default_factory=callers_line)  # … and where

    @property
    def about(self) -> str:
        """Return the name of the job on Spark's pages."""
        return f"{self.function_name or self.title} ({self.line})" if self.line else self.function_name or self.title


def slots_of(num_proc: int) -> tuple[Slot, ...]:
    """Return the slots of a job before its tasks have arrived."""
    return tuple(place_ranks([""] * num_proc))


def place_tasks(tasks: Sequence[AgentHandle]) -> list[AgentHandle]:
    """Return the tasks in the order of their ranks.

    Ranks are consecutive within a host, so that ranks beside one another share memory. Hosts are ordered by their hash
    and rotated until the host of task 0 comes first; within a host the order of the tasks is kept.
    """
    first = min(tasks, key=lambda agent: agent.number).host
    return sorted(tasks, key=lambda agent: (agent.host < first, agent.host, agent.number))


def run_in_tasks(tasks: SparkTasks, wanted: SparkJob) -> JobResult:
    """Run the job in these tasks, as soon as they have arrived."""
    arrived = tasks.meet_in_time(wanted.num_proc, wanted.start_timeout_s, wait_for_slots=wanted.wait_for_slots)
    placed = place_tasks(arrived)
    check_ports(Counter(agent.host for agent in placed), wanted.env, has_agents=True)
    job = replace(wanted, slots=tuple(place_ranks([agent.host for agent in placed])))

    def route(spec: WorkerSpec) -> tuple[str, WorkerSpec]:
        own = placed[spec.slot.rank]
        # Slots have hashes for names, not addresses.
        spec = replace(spec, env={**spec.env, "MASTER_ADDR": placed[0].address})
        return own.name, in_task(spec, job, own, [agent for agent in placed if agent.host == own.host])

    launcher = HostLauncher(agents=tasks.agents, listen=tasks.address, bind=tasks.bind_address, route=route)
    return run_job(job, launcher)


def in_task(spec: WorkerSpec, job: SparkJob, own: AgentHandle, on_host: Sequence[AgentHandle]) -> WorkerSpec:
    """Return the worker for the agent of a task: with the GPUs that Spark gave that, and the others on its host."""
    env = {**spec.env, GPU_VARIABLE: ",".join(own.gpus), NO_DRIVER: "1"}
    visible = visible_gpus(own.gpus, [agent.gpus for agent in on_host])
    if visible and job.bind_gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    return replace(spec, env=env, cwd=None, argv=(job.python or TASKS_PYTHON, *spec.argv[1:]))


def preload_of(job: SparkJob) -> tuple[str, ...] | None:
    """Return the modules that a warm process loads for the ranks; None: they must be executed."""
    return None if job.python is not None else modules_to_preload(job.function)
