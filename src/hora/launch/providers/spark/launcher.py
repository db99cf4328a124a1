"""The Spark launcher: the ranks of a job as the tasks of one Spark stage. Spark is the cluster manager here.

`run_in_tasks` waits until every task has reported its host, assigns ranks to tasks and runs the job with the
controller. `SparkLauncher` starts, watches and ends processes through the tasks. Importing this module does
not import pyspark.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hora.launch.controller.launcher import HostLauncher
from hora.launch.controller.loop import run_job
from hora.launch.job import Job, JobResult, OutputOptions, Watching, WorkerSpec
from hora.launch.providers.spark.cluster import GPU_VARIABLE, TaskPlace, place_tasks
from hora.launch.providers.spark.driver import TaskAgents
from hora.launch.slots import Slot, place_ranks, visible_gpus


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
    tasks = driver.meet_in_time(wanted.num_proc, wanted.start_timeout_s, wait_for_slots=wanted.wait_for_slots)
    places = place_tasks(tasks)
    launcher = SparkLauncher(driver, places, bind_gpus=wanted.bind_gpus, executable=wanted.executable)
    return run_job(wanted.job(place_ranks([place.host for place in places])), launcher)


class SparkLauncher(HostLauncher):
    """Starts each worker in the Spark task that was placed for its rank.

    `bind_gpus`: make Spark's GPUs the visible ones. `executable`: the workers' Python, if it is not that of Spark's
    own.
    """

    def __init__(
        self,
        driver: TaskAgents,
        places: Sequence[TaskPlace] = (),
        *,
        bind_gpus: bool,
        executable: str | None = None,
    ) -> None:
        super().__init__(agents=driver, listen=driver.address)
        self.bind_address = driver.bind_address
        self._driver, self._bind_gpus, self._executable = driver, bind_gpus, executable
        self._places = places  # by rank
        # Slots have hashes for names, not addresses. In an elastic job rank 0 has no lasting place.
        self._master = {"MASTER_ADDR": driver.host_of(places[0].task)} if places else {}

    def close(self) -> None:
        self._driver.release()

    def _place(self, worker: WorkerSpec) -> TaskPlace:
        return self._places[worker.slot.rank]

    def _node_of(self, spec: WorkerSpec) -> str:
        return self._place(spec).agent

    def _for_elsewhere(self, spec: WorkerSpec) -> WorkerSpec:
        own = self._place(spec)
        env = {**spec.env, **self._master, GPU_VARIABLE: ",".join(own.gpus)}
        visible = visible_gpus(own.gpus, [place.gpus for place in self._places or [own] if place.host == own.host])
        if visible and self._bind_gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
        # No program: the Python of the task.
        return replace(spec, env=env, argv=(self._executable or "", *spec.argv[1:]), cwd=None)
