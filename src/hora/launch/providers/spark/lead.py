"""Body of the tasks of a Connect job's barrier stage. Task 0 leads: it is the launcher, as the driver is on classic
Spark.

`ConnectTasks` travels with the query and is called by Spark in each task. The others learn from `allGather`, which goes
through Spark's own channel, where task 0 listens, and the stage's secret; then they are tasks like any other (`task`).
"""

from __future__ import annotations

import contextlib
import io
import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from hora.launch.controller.loop import run_job
from hora.launch.job import Job, JobResult, OutputOptions
from hora.launch.providers.spark import warm_pool
from hora.launch.providers.spark.cluster import listening_address
from hora.launch.providers.spark.driver import TaskAgents
from hora.launch.providers.spark.launcher import SparkLauncher, meet_all
from hora.launch.providers.spark.live_log import ClientLogSink, Invitation, LogStream
from hora.launch.providers.spark.placement import place_tasks
from hora.launch.providers.spark.query import rows
from hora.launch.providers.spark.task import SparkTask, python_path

__all__ = ["ConnectTasks"]

_TASK_LIMIT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class ConnectTasks:
    """The body of the stage: what to run, and how its output looks.

    `artifact`: the file that has the call, if it is large. `preload`: what to load before ranks are forked; None if
    they have to be started afresh. `keep_output`: see `SparkTask`.
    """

    num_proc: int
    function: bytes = field(repr=False)
    artifact: str
    preload: tuple[str, ...] | None
    env: Mapping[str, str] = field(repr=False)
    prefix: bool
    timestamp: bool
    console: bool
    stream_output: bool
    keep_output: bool
    start_timeout_s: float
    bind_gpus: bool
    executable: str | None
    verbose: bool
    title: str
    log: Invitation = field(repr=False)

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        from pyspark import BarrierTaskContext

        for _ in batches:
            pass
        context = BarrierTaskContext.get()
        number = int(context.partitionId())
        if self.preload is not None and not self.executable:
            warm_pool.begin(self.preload, self.env, python_path())
        if number:
            facts = next(text for text in context.allGather("") if text)
            self._task(facts)(number)
            return
        lead = _Lead(self, context.getTaskInfos()[0].address.rpartition(":")[0].strip("[]"))
        with lead.tasks:
            context.allGather(lead.facts)
            own = threading.Thread(target=self._task(lead.facts), args=(0,), name="hora-task-0", daemon=True)
            own.start()
            answer = lead.answer()
        own.join(_TASK_LIMIT_S)
        for kind, data in answer:
            yield from rows(kind, data)

    def _task(self, text: str) -> SparkTask:
        """Return the task that `_Lead.facts` describe."""
        facts = json.loads(text)
        return SparkTask(
            address=facts["address"],
            port=facts["port"],
            secret=bytes.fromhex(facts["secret"]),
            secret_file="",
            stream_output=self.stream_output,
            keep_output=self.keep_output,
        )


class _Lead:
    """Task 0's other half: the launcher of the job. `facts`: for the other tasks, as JSON."""

    def __init__(self, tasks: ConnectTasks, host: str) -> None:
        self._wanted = tasks
        bind, address = listening_address(host)
        self.tasks = TaskAgents(tasks.num_proc, bind_address=bind, address=address)
        self.facts = json.dumps({"address": address, "port": self.tasks.port, "secret": self.tasks.secret.hex()})

    def answer(self) -> list[tuple[str, bytes]]:
        """The rows for the client: the result, or the error with its cause; and lines that it has not seen."""
        home = ClientLogSink(self._wanted.log)
        try:
            result = self._run(home)
            found = ("result", cloudpickle.dumps(result))
        except BaseException as error:  # it belongs to the client; a task that fails would be repeated
            found = ("error", _pickled(error))
        return [found, *home.close().items()]

    def _run(self, home: ClientLogSink) -> JobResult:
        wanted = self._wanted
        places = meet_all(self.tasks, wanted.num_proc, wanted.start_timeout_s)
        placements = place_tasks(places)
        launcher = SparkLauncher(self.tasks, placements, bind_gpus=wanted.bind_gpus, executable=wanted.executable)
        output = OutputOptions(
            prefix=wanted.prefix,
            timestamp=wanted.timestamp,
            console=wanted.console,
            stdout=io.BufferedWriter(LogStream(home, "stdout")),
            stderr=io.BufferedWriter(LogStream(home, "stderr")),
        )
        job = Job(
            slots=tuple(placement.slot for placement in placements),
            function=self._function(),
            env=wanted.env,
            output=output,
            start_timeout_s=wanted.start_timeout_s,
            verbose=wanted.verbose,
            title=wanted.title,
        )
        return run_job(job, launcher)

    def _function(self) -> bytes:
        if not self._wanted.artifact:
            return self._wanted.function
        from pyspark import SparkFiles

        with open(SparkFiles.get(self._wanted.artifact), "rb") as file:
            return file.read()


def _pickled(error: BaseException) -> bytes:
    """The error and its cause; as a text where they cannot travel."""
    with contextlib.suppress(Exception):
        pair = cloudpickle.dumps((error, error.__cause__))
        cloudpickle.loads(pair)
        return bytes(pair)
    from hora.errors import JobFailedError

    return bytes(cloudpickle.dumps((JobFailedError(f"{type(error).__name__}: {error}"), None)))
