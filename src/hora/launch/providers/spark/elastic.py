"""Elastic jobs on Spark: every attempt of a Spark task is a host with one slot.

A failed worker fails its task; Spark retries the task (at most `spark.task.maxFailures` times), perhaps on another
executor, and the new attempt is a new host for the elastic controller. Lost and new executors work the same way; ranks
on an executor that Spark decommissions commit and leave first. The stage is an ordinary one: in a barrier stage one
failure would end all tasks.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hora.launch.agent.protocol import Exited, Join
from hora.launch.controller.hosts import ElasticSpec
from hora.launch.controller.launcher import AgentHandle
from hora.launch.controller.loop import run_job
from hora.launch.controller.policy import Limits
from hora.launch.job import JobResult, LaunchEvents, WorkerSpec
from hora.launch.providers.spark.cluster import check_protection, decommissions, seconds_of
from hora.launch.providers.spark.driver import StageDriver, TaskAgent
from hora.launch.providers.spark.launcher import SparkJob, SparkLauncher
from hora.launch.slots import HostInfo, place_ranks
from hora.net.session import SessionPeer

_LOOK_S = 1.0

_log = logging.getLogger("hora.launch")


def run_elastic_on_spark(
    context: Any,
    wanted: SparkJob,
    *,
    min_num_proc: int,
    max_num_proc: int,
    elastic_timeout_s: float | None = None,
    reset_limit: int | None = None,
) -> JobResult:
    """Run the job on up to `max_num_proc` tasks of this SparkContext's cluster, on no fewer than `min_num_proc`."""
    check_protection(context)
    if elastic_timeout_s is None:
        elastic_timeout_s = seconds_of("HOROVOD_ELASTIC_TIMEOUT")
    limits = Limits(
        num_proc=wanted.num_proc,
        min_num_proc=min_num_proc,
        max_num_proc=max_num_proc,
        reset_limit=reset_limit,
        elastic_timeout_s=elastic_timeout_s,
        stuck_s=max(elastic_timeout_s / 2, 1.0),
        lost_s=seconds_of("HORA_LAUNCHER_TIMEOUT", default_s=30.0),
    )
    stage: dict[str, Any] = {"group": wanted.title, "about": wanted.about, "stream_output": wanted.output.console}
    stage["return_s"] = limits.lost_s
    with _Attempts(context, max_num_proc, least=min_num_proc, **stage) as driver:
        driver.meet_in_time(limits.num_proc, wanted.start_timeout_s, least=min_num_proc)
        hosts = driver.hosts()
        slots = tuple(place_ranks([host.hostname for host in hosts]))
        job = replace(wanted, slots=slots, env={**wanted.env, **limits.worker_env()})
        spec = ElasticSpec(limits=limits, hosts=tuple(hosts), script=driver)
        if decommissions(context):
            threading.Thread(target=driver.watch_leaving, name="hora-decommissioning", daemon=True).start()
        result = run_job(job, _ElasticLauncher(driver, job), spec)
        return replace(result, results=tuple(value for value in result.results if value is not None))


class _Attempts(StageDriver):
    """The current attempts of the tasks. `changed` is called with each new list of hosts.

    Those on executors that are about to end are leaving: they are no longer hosts, and their ranks end at the next
    commit. If all are leaving, `_least` of them, which the job needs, stay until Spark has started the others' tasks
    elsewhere, which copy the state.
    """

    def __init__(self, context: Any, num_tasks: int, *, least: int, **rest: Any) -> None:
        self._least, self._numbers = least, itertools.count()
        self._left: set[tuple[int, int]] = set()  # attempts that were notified
        super().__init__(context, num_tasks, barrier=False, **rest)

    def hosts(self) -> list[HostInfo]:
        return super().hosts() or [HostInfo(agent.name, 1) for agent in self.tasks()[: self._least]]

    def watch_leaving(self) -> None:
        """Until the stage ends, watch for executors that Spark decommissions, and tell their ranks to leave."""
        while not self.stage.ended.wait(_LOOK_S):
            self._leave(self.stage.on_leaving_executors())

    def _leave(self, attempts: Mapping[int, int]) -> None:
        with self._changed:
            new = set(attempts.items()) - self._left
            self._left |= new
            tasks = sorted(task for task, _ in new)
            for task in self._nodes.keys() & tasks:
                self._nodes[task].leaving = True
        if new:
            _log.warning("Spark decommissions executors: the ranks of tasks %s commit and leave", tasks)
            self._tell()

    # ---- in the server's thread -------------------------------------------------------------------------

    def _join(self, peer: SessionPeer, joining: Join) -> None:
        with self._changed:
            if joining.node not in self._nodes:
                self._lost_one = self._begun = False  # Spark has replaced a lost task
        super()._join(peer, joining)

    def _admitted(self, index: int, name: str, joining: Join) -> AgentHandle:
        # One host per attempt: the controller may bar this one, but not its successor.
        return super()._admitted(index, f"{name}-task{index}-{next(self._numbers)}", joining)


class _ElasticLauncher(SparkLauncher):
    """Starts each worker in the task of its host, and fails the tasks of failed workers. Implements LaunchEvents."""

    _driver: _Attempts

    def __init__(self, driver: _Attempts, job: SparkJob) -> None:
        super().__init__(driver, job)
        self._closing = False
        self._agents_of: dict[int, TaskAgent] = {}  # by worker

    def start(self, workers: Sequence[WorkerSpec], events: LaunchEvents) -> None:
        self.output, self.started, self._exited = events.output, events.started, events.exited
        self._agents_of |= {worker.worker: self._driver.agent(worker.slot.hostname) for worker in workers}
        super().start(workers, self)

    def exited(self, ended: Exited) -> None:
        self._exited(ended)
        agent = self._agents_of[ended.worker]
        # A task that left normally fails too, so that Spark starts it elsewhere.
        if (ended.code or agent.leaving) and not self._closing:
            agent.dismiss(ended.code or 1)

    def close(self) -> None:
        self._closing = True
        super().close()
