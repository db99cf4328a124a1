"""The Spark launcher: the ranks of a job as the tasks of one Spark stage. Spark is the cluster manager here.

`run_in_tasks` waits until every task has reported its host, assigns ranks to tasks and runs the job with the
controller. `SparkLauncher` starts, watches and ends processes through the tasks. Importing this module does
not import pyspark.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hora.launch.agent.protocol import Exited
from hora.launch.controller.launcher import AgentHandle
from hora.launch.controller.loop import run_job
from hora.launch.job import Job, JobResult, LaunchEvents, OutputOptions, Watching, WorkerSpec
from hora.launch.providers.spark.cluster import GPU_VARIABLE, Placement, place_tasks
from hora.launch.providers.spark.driver import TaskAgent, TaskAgents
from hora.launch.slots import Slot


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


def run_in_tasks(driver: TaskAgents, wanted: SparkJob) -> JobResult:
    """Run the job in these tasks, as soon as they have arrived."""
    places = driver.meet_in_time(wanted.num_proc, wanted.start_timeout_s, wait_for_slots=wanted.wait_for_slots)
    placements = place_tasks(places)
    launcher = SparkLauncher(driver, placements, bind_gpus=wanted.bind_gpus, executable=wanted.executable)
    return run_job(wanted.job(placement.slot for placement in placements), launcher)


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
            events.exited(Exited(worker=worker.worker, code=TaskAgent.lost_exit_code, reason=reason))
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
