"""Elastic jobs on Spark: every attempt of a Spark task is a host with one slot.

A failed worker fails its task; Spark retries the task (at most `spark.task.maxFailures` times), perhaps on another
executor, and the new attempt is a new host for the elastic controller. Lost and new executors work the same way; ranks
on an executor that Spark decommissions commit and leave first. The stage is an ordinary one: in a barrier stage one
failure would end all tasks.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from hora.launch.controller.hosts import ElasticSpec
from hora.launch.controller.launcher import HostLauncher
from hora.launch.controller.loop import run_job
from hora.launch.controller.policy import Limits
from hora.launch.job import JobResult, WorkerSpec
from hora.launch.providers.spark.cluster import check_protection, decommissions, seconds_of
from hora.launch.providers.spark.job import SparkJob, in_task, preload_of
from hora.launch.providers.spark.tasks import SparkTasks
from hora.launch.slots import place_ranks


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
    how: dict[str, Any] = {"stream_output": wanted.output.console, "preload": preload_of(wanted)}
    how |= {"return_s": limits.lost_s, "least": min_num_proc, "resources": wanted.resources}
    with SparkTasks.of_stage(context, max_num_proc, group=wanted.title, about=wanted.about, **how) as tasks:
        tasks.meet_in_time(limits.num_proc, wanted.start_timeout_s, least=min_num_proc)
        agents, hosts = tasks.agents, tasks.hosts()
        slots = tuple(place_ranks([host.hostname for host in hosts]))
        job = replace(wanted, slots=slots, env={**wanted.env, **limits.worker_env()})
        spec = ElasticSpec(limits=limits, hosts=tuple(hosts), script=agents)
        if decommissions(context):
            threading.Thread(target=tasks.watch_leaving, name="hora-decommissioning", daemon=True).start()

        def route(one: WorkerSpec) -> tuple[str, WorkerSpec]:
            own = agents.agent(one.slot.hostname)
            return own.name, in_task(one, job, own, [own])

        launcher = HostLauncher(
            agents=agents, listen=tasks.address, bind=tasks.bind_address, route=route, ended=tasks.worker_ended
        )
        result = run_job(job, launcher, spec)
        return replace(result, results=tuple(value for value in result.results if value is not None))
