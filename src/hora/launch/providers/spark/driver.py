"""The driver's side of a stage: runs it on Spark, waits for its tasks, and accepts the agents that they start.

The tasks (`task`) authenticate with the stage's secret before any of their messages is read. On this machine they read
it from this process's memory; elsewhere it travels with Spark's task. Only the launchers know what the tasks run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from hora.errors import JobFailedError, StartTimeoutError
from hora.launch.agent.protocol import Join, Quit
from hora.launch.controller.agents import Agents
from hora.launch.controller.launcher import AgentHandle
from hora.launch.limits import SILENCE_S, SPARK_END_S
from hora.launch.providers.spark.cluster import allocates_dynamically, count_slots, driver_addresses, is_local
from hora.launch.providers.spark.task import SparkTask
from hora.net.keys import HeldSecret
from hora.net.messages import pack
from hora.net.session import SessionPeer
from hora.net.wire import new_secret

_numbers = itertools.count()
_changing_environment = threading.Lock()  # the SparkContext's, which stages that start together share
T = TypeVar("T", bound="TaskAgents")

_POLL_S = 0.25
_NOTICE_AFTER_S = 5.0
_LEAVE_LIMIT_S = 10.0
LOST_TASK = "the executor was lost or the task was killed"

_log = logging.getLogger("hora.launch")


class SparkStage:
    """A running Spark job. `error` is why it failed, once `ended` is set; None if it succeeded."""

    def __init__(
        self,
        context: Any,
        num_tasks: int,
        body: Callable[[int], None],
        *,
        group: str,
        about: str = "",
        barrier: bool = True,
    ) -> None:
        self.context = context
        self._about = about or group
        # Spark refuses barrier stages under dynamic allocation. Ordinary tasks suffice: the start timeout covers slots
        # that never appear.
        self._barrier = barrier and not allocates_dynamically(context)
        self._num_tasks = num_tasks
        self._body = body
        self.group = f"{group}.{next(_numbers)}"
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def start(self) -> None:
        from pyspark import InheritableThread

        # Inherits the caller's local properties (such as its scheduler pool), which a plain thread would lose.
        self._thread = InheritableThread(target=self._run)
        self._thread.name, self._thread.daemon = self.group, True
        self._thread.start()

    def cancel(self) -> None:
        """Kill the running tasks and wait until Spark has freed their slots."""
        if not self.ended.is_set():
            self.context.cancelJobGroup(self.group)
        if not self.ended.wait(SPARK_END_S):
            raise TimeoutError(
                f"Spark did not end the job group {self.group} within {SPARK_END_S:g} s of cancelling it"
            )
        self._thread.join(SPARK_END_S)

    def is_waiting(self) -> bool:
        """Return whether no task of the stage runs yet, because the slots are taken by other jobs."""
        return next(self._active_stages(), None) is None and not self.ended.is_set()

    def on_leaving_executors(self) -> dict[int, int]:
        """Return the tasks on executors that Spark is decommissioning, with their attempt numbers."""
        from py4j.protocol import Py4JError

        try:
            scala_context, found = self.context._jsc.sc(), {}
            leaving = scala_context.taskScheduler().getExecutorDecommissionState
            for number, stage in self._active_stages():
                tasks = scala_context.statusStore().taskList(number, stage.currentAttemptId, 100 * self._num_tasks)
                for task in map(tasks.apply, range(tasks.size())):
                    if task.status() == "RUNNING" and leaving(task.executorId()).isDefined():
                        found[int(task.index())] = int(task.attempt())
            return found
        except Py4JError:  # some platforms let Python call Spark's public methods only
            return {}

    def _active_stages(self) -> Iterator[tuple[int, Any]]:
        """Yield the number and the state of each stage with a running task."""
        tracker = self.context.statusTracker()
        for job in tracker.getJobIdsForGroup(self.group):
            info = tracker.getJobInfo(job)
            for number in info.stageIds if info else ():
                stage = tracker.getStageInfo(number)
                if stage is not None and stage.numActiveTasks:
                    yield number, stage

    def failure_text(self) -> str:
        """Return Spark's reason for the failure in a few lines, without the Java stack."""
        text = str(self.error)
        found = re.search(r"(?:Job aborted|Job \d+ cancelled).*?(?=\n\s+at |\nDriver stacktrace|\Z)", text, re.DOTALL)
        hint = ""
        if "No module named 'hora'" in text:
            hint = (
                "\nInstall hora on every node, for the Python that runs Spark's workers: it is "
                f"{self.context.pythonExec!r}, and PYSPARK_PYTHON chooses another (here runs {sys.executable})."
            )
        return (found.group(0) if found else text)[:4000].strip() + hint

    def cancellation(self, limit_s: float) -> str:
        """Return the line in which Spark says that it has cancelled the job, if it has within this time."""
        self.ended.wait(limit_s)
        found = re.search(r"Job \d+ cancelled[^\n]*", str(self.error or ""))
        return found[0].strip() if found else ""

    def _run(self) -> None:
        try:
            about = f"{self._about}: {self._num_tasks} processes"
            self.context.setJobGroup(self.group, about, interruptOnCancel=True)
            rdd = self.context.parallelize(range(self._num_tasks), self._num_tasks)
            stage = rdd.barrier() if self._barrier else rdd
            tasks = stage.mapPartitions(functools.partial(_call_for_each, self._body))
            # Spark keeps a set of Python workers per requested environment. So the next job gets workers with a warm
            # process beside them (`warm_pool`), however many other workers UDFs have used.
            with _changing_environment:
                environment = self.context.environment
                self.context.environment = {**environment, "HORA_SPARK_WORKER": "1"}
                try:
                    tasks._jrdd  # noqa: B018 - computed once, and with it the kind of Python worker
                finally:
                    self.context.environment = environment
            with _named_stage(self.context, f"{self._about}: ranks 0 to {self._num_tasks - 1}"):
                tasks.collect()
        except BaseException as error:  # whatever it is belongs to the thread that waits for the job
            self.error = error
        finally:
            self.ended.set()


@contextlib.contextmanager
def _named_stage(context: Any, name: str) -> Iterator[None]:
    """Give stages of this thread a name in Spark's pages, which pyspark would name after a line of ours."""
    from pyspark.traceback_utils import SCCallSiteSync

    with SCCallSiteSync(context):  # nested ones leave the outermost one's name
        context._jsc.setCallSite(name)
        yield


def _call_for_each(body: Callable[[int], None], partition: Iterable[int]) -> Iterator[None]:
    """Call the body with each number of a partition. Spark runs this."""
    for index in partition:
        body(index)
    return iter(())


class TaskAgent(AgentHandle):
    """The agent of a Spark task, which starts one worker.

    `task`: its partition. `host`: the hash of its host. `gpus`: the addresses of the GPUs that Spark gave it.
    """

    lost_exit_code = 137

    def __init__(self, name: str, *, task: int, host: str, gpus: Sequence[str] = ()) -> None:
        super().__init__(name)
        self.task, self.host, self.gpus = task, host, tuple(gpus)
        self.dismissed = False
        self._has_fork_server = True  # the task may have a warm process beside it

    @property
    def address(self) -> str:
        """The address from which the task has connected."""
        return "unknown" if self.peer is None else self.peer.host

    def dismiss(self, status: int) -> None:
        """Tell the task to end its process, if it still runs, and to return to Spark; a non-zero status fails it."""
        self.dismissed = True
        self.send(Quit(status))

    def _why_ended(self, status: int, *, joined: bool) -> str:
        return f"its Spark task ({self.task}) ended: {LOST_TASK}"


class TaskAgents(Agents):
    """The agents of the `num_tasks` tasks of a stage that Spark manages. On exit its slots are free.

    `return_s`: how long a disconnected task may take to reconnect.
    """

    def __init__(self, num_tasks: int, *, bind_address: str, address: str, return_s: float = 0.0) -> None:
        self._arrived: dict[str, TaskAgent] = {}  # all agents so far, by name
        self._copies: dict[int, list[tuple[SessionPeer, Join]]] = {}  # further attempts at tasks that still run
        self._lost_one = False  # a task ended before its end was requested
        self._begun = False  # placement is done: a task that ends is not replaced
        self._over = False
        self.bind_address = bind_address
        self.secret = new_secret()
        self.stage: SparkStage | None = None  # in a task: it cannot see its own
        where = (bind_address, 0)
        super().__init__(where, self.secret, num_nodes=num_tasks, silence_limit_s=SILENCE_S, return_s=return_s)
        self._own_address = address
        self._closing = contextlib.ExitStack()
        self._closing.callback(self.dismiss, 0)

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_: object) -> None:
        with self._closing:
            self.release()

    def tasks(self) -> list[TaskAgent]:
        """Return the agents that are connected, in the order of their arrival."""
        with self._changed:
            return [self._arrived[agent.name] for agent in self._nodes.values() if agent.peer is not None]

    def agent(self, hostname: str) -> TaskAgent:
        agent = self._arrived[hostname]
        if agent.ended:  # nothing can be started there
            agent = TaskAgent(hostname, task=agent.task, host=agent.host)
            agent.lost(agent.lost_exit_code)
        return agent

    def meet(self, num_tasks: int, go_on: Callable[[], bool]) -> list[TaskAgent] | None:
        """Wait until this many tasks have arrived; return all that have.

        None if the stage ends first, or if `go_on`, which is polled several times a second, returns False.
        """
        while True:
            with self._changed:
                # In slices: on some platforms Ctrl-C cannot interrupt a wait without a limit.
                if self._changed.wait_for(lambda: len(self.tasks()) >= num_tasks, _POLL_S):
                    self._begun = True
                    return self.tasks()
            if (self.stage is not None and self.stage.ended.is_set()) or not go_on():
                return None

    def meet_in_time(
        self, num_tasks: int, limit_s: float, *, least: int | None = None, wait_for_slots: bool = False
    ) -> list[TaskAgent]:
        """Wait until this many tasks have arrived, or `least` at the end of the time limit; return all that have.

        `wait_for_slots`: the limit begins when Spark starts the stage. Raises JobFailedError if the stage ends first,
        StartTimeoutError if too few tasks arrive.
        """
        began = started = time.monotonic()
        noticed = False

        def go_on() -> bool:
            nonlocal started, noticed
            now = time.monotonic()
            if not (wait_for_slots and self._others_have_the_slots(num_tasks)):
                return now - started <= limit_s
            started = now
            if now - began > _NOTICE_AFTER_S and not noticed and self.stage is not None:
                noticed = True
                _log.warning("waiting for %d free Spark task slots (job group %s)", num_tasks, self.stage.group)
            return True

        tasks = self.meet(num_tasks, go_on)
        if tasks is not None:
            return tasks
        if self.stage is not None and self.stage.ended.is_set():
            raise JobFailedError(
                f"Spark job has failed before its {num_tasks} processes started: {self.stage.failure_text()}"
            )
        if least is not None and len(arrived := self.tasks()) >= least:
            return arrived
        needs = "" if least is None else f", and the job needs {least} tasks"
        raise StartTimeoutError(
            f"Timed out waiting for Spark tasks to start. Tasks {self.missing()} of {num_tasks} had not reached "
            f"{self.address} after {limit_s:g} s{needs}. Check that the cluster has {num_tasks} free task slots and "
            "that executors can reach the driver and one another, or raise start_timeout "
            "(HOROVOD_SPARK_START_TIMEOUT)."
        )

    def _others_have_the_slots(self, num_tasks: int) -> bool:
        """Return whether there are enough slots and other jobs hold them."""
        if self.stage is None or self._nodes or not self.stage.is_waiting():
            return False
        return count_slots(self.stage.context) >= num_tasks

    def missing(self) -> list[int]:
        with self._changed:
            return [task for task in range(self._num_nodes) if task not in self._nodes]

    def release(self) -> None:
        """Free the slots: tasks normally end on their own, and Spark kills the others. Idempotent."""
        self._over, incomplete = True, bool(self.missing())
        for agent in self.tasks():
            agent.dismiss(0)
        # After the loss of a task Spark would repeat the stage for nothing.
        if self.stage is not None and (incomplete or self._lost_one or not self.stage.ended.wait(_LEAVE_LIMIT_S)):
            self.stage.cancel()

    # ---- in the server's thread -------------------------------------------------------------------------

    def _join(self, peer: SessionPeer, joining: Join) -> None:
        if joining.node in self._nodes:
            # Speculation has started a copy. Spark kills the first attempt as soon as the copy returns, so it waits.
            self._copies.setdefault(joining.node, []).append((peer, joining))
        elif self._begun or self._over:
            # Spark repeats a stage that lost an executor. This job is over, so end the repetition.
            peer.send(*pack(Quit(0)))
        else:
            super()._join(peer, joining)

    def _admitted(self, index: int, name: str, joining: Join) -> AgentHandle:
        agent = TaskAgent(self._new_name(name, index), task=index, host=name, gpus=joining.gpus)
        self._names.add(agent.name)
        self._arrived[agent.name] = agent
        return agent

    def closed(self, peer: SessionPeer) -> None:
        with self._changed:
            lost = [agent for agent in self.tasks() if agent.peer is peer and not agent.dismissed]
            self._lost_one = self._lost_one or bool(lost)
        task = peer.number
        super().closed(peer)
        if task not in self._nodes:
            for copy in self._copies.pop(task, ()):
                if copy[0].open:
                    self._join(*copy)


class StageDriver(TaskAgents):
    """`TaskAgents` with a stage of its own, for the driver of a classic SparkContext."""

    stage: SparkStage

    def __init__(
        self,
        context: Any,
        num_tasks: int,
        *,
        group: str,
        stream_output: bool = True,
        about: str = "",
        barrier: bool = True,
        return_s: float = 0.0,
    ) -> None:
        bind_address, address = driver_addresses(context)
        super().__init__(num_tasks, bind_address=bind_address, address=address, return_s=return_s)
        with contextlib.ExitStack() as undo:
            undo.push(self._closing)
            held = HeldSecret(self.secret) if is_local(context) else None
            if held is not None:
                undo.callback(held.close)
            task = SparkTask(
                address=address,
                port=self.port,
                secret="" if held else self.secret.hex(),
                secret_file=held.path if held else "",
                stream_output=stream_output,
                # In local mode the executor's log is the driver's terminal, which already shows the output.
                keep_output=not is_local(context),
            )
            self.stage = SparkStage(context, num_tasks, task, group=group, about=about, barrier=barrier)
            # In the caller's thread, whose local properties (its scheduler pool) the stage inherits.
            self.stage.start()
            self._closing = undo.pop_all()
