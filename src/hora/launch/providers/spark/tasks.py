"""The tasks of a Spark stage as hosts: a `Provider` whose agents are started by Spark.

The tasks (`task`) run the plain agent, which authenticates with the stage's secret. On this machine they read it from
this process's memory; elsewhere it travels with Spark's task.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hora.errors import JobFailedError, StartTimeoutError
from hora.launch.agent.protocol import Exited
from hora.launch.controller.agents import Agents
from hora.launch.controller.launcher import AgentHandle
from hora.launch.limits import SILENCE_S
from hora.launch.providers.base import Order, StartError
from hora.launch.providers.spark.cluster import count_slots, driver_addresses, is_local
from hora.launch.providers.spark.stage import SparkStage
from hora.launch.providers.spark.task import SparkTask
from hora.launch.slots import HostInfo
from hora.net.keys import HeldSecret
from hora.net.wire import new_secret

TASKS_PYTHON = ""  # as a worker's program: the Python of its task, and not the driver's
_POLL_S = 0.25
_LOOK_S = 1.0
_NOTICE_AFTER_S = 5.0
_LEAVE_LIMIT_S = 10.0
LOST_TASK = "the executor was lost or the task was killed"

_log = logging.getLogger("hora.launch")


class TaskAgent(AgentHandle):
    """The agent of a Spark task, which starts one worker. `number`: the task's; `host`: the hash of its host."""

    lost_exit_code = 137
    forks_one = True  # the task may have a warm process beside it

    def _why_ended(self, status: int, *, joined: bool) -> str:
        return f"its Spark task ({self.number}) ended: {LOST_TASK}"


def _same(host: str, task: int) -> str:
    return host


def _attempts() -> Callable[[str, int], str]:
    """Return a function that names attempts of tasks: the job may bar one as a host, but not its successor."""
    numbers = itertools.count()
    return lambda host, task: f"{host}-task{task}-{next(numbers)}"


class SparkTasks:
    """The `num_tasks` tasks of a stage: see `providers.base.Provider`. At the end of its block their slots are free.

    `return_s`: how long a disconnected task may take to reconnect. `least`: of an elastic job, in which Spark replaces
    lost tasks, the number that it needs: if all are leaving, so many stay until the others' tasks have started.
    """

    def __init__(
        self, num_tasks: int, *, bind_address: str, address: str, return_s: float = 0.0, least: int | None = None
    ) -> None:
        self.bind_address, self.address, self.secret = bind_address, address, new_secret()
        self.agents = Agents(
            (bind_address, 0),
            self.secret,
            num_nodes=num_tasks,
            silence_limit_s=SILENCE_S,
            return_s=return_s,
            handle=TaskAgent,
            copies=True,  # speculation: Spark kills the first attempt as soon as the copy returns, so that waits
            executable=TASKS_PYTHON,
            least=least or 0,
            advertised=address,
            named=_attempts() if least is not None else _same,
        )
        self.port = self.agents.port
        self.stage: SparkStage | None = None  # in a task: it cannot see its own
        self._num_tasks, self._least = num_tasks, least
        self._left: set[tuple[int, int]] = set()  # attempts that were told to leave
        self._closing = contextlib.ExitStack()
        self._closing.callback(self.agents.dismiss, 0)

    @classmethod
    def of_stage(
        cls,
        context: Any,
        num_tasks: int,
        *,
        group: str,
        about: str = "",
        stream_output: bool = True,
        preload: tuple[str, ...] | None = None,
        return_s: float = 0.0,
        least: int | None = None,
        resources: Any = None,
    ) -> SparkTasks:
        """Start a stage of a classic SparkContext; an ordinary one if `least` is given, as in a barrier stage one
        failure ends all tasks. `resources`: the ResourceProfile of the tasks.
        """
        bind_address, address = driver_addresses(context)
        tasks = cls(num_tasks, bind_address=bind_address, address=address, return_s=return_s, least=least)
        with contextlib.ExitStack() as undo:
            undo.push(tasks._closing)
            held = HeldSecret(tasks.secret) if is_local(context) else None
            if held is not None:
                undo.callback(held.close)
            task = SparkTask(
                address=address,
                port=tasks.port,
                secret="" if held else tasks.secret.hex(),
                secret_file=held.path if held else "",
                stream_output=stream_output,
                # In local mode the executor's log is the driver's terminal, which already shows the output.
                keep_output=not is_local(context),
                preload=preload,
            )
            how: dict[str, Any] = {"group": group, "about": about, "barrier": least is None, "resources": resources}
            tasks.stage = SparkStage(context, num_tasks, task, **how)
            # In the caller's thread, whose local properties (its scheduler pool) the stage inherits.
            tasks.stage.start()
            tasks._closing = undo.pop_all()
        return tasks

    @property
    def running_stage(self) -> SparkStage:
        assert self.stage is not None, "a task does not see its own stage"
        return self.stage

    def __enter__(self) -> SparkTasks:
        return self

    def __exit__(self, *_: object) -> None:
        with self._closing:
            self.close()

    # ---- a provider ---------------------------------------------------------------------------------------

    def hosts(self) -> Sequence[HostInfo]:
        """Return the tasks that have arrived: each is a host with one slot."""
        return self.agents.hosts()

    def start(self, host: str, order: Order) -> None:
        raise StartError("Spark starts its tasks")

    def ended(self, host: str, why: str) -> None: ...

    def close(self) -> None:
        """Free the slots: tasks normally end on their own, and Spark kills the others. Idempotent."""
        self.agents.full = True
        incomplete = bool(self.agents.missing())
        for agent in self.agents.connected():
            agent.dismiss(0)
        # After the loss of a task Spark would repeat the stage for nothing.
        if self.stage is not None and (incomplete or not self.stage.ended.wait(_LEAVE_LIMIT_S)):
            self.stage.cancel()

    # ---- arrivals -----------------------------------------------------------------------------------------

    def meet(self, num_tasks: int, go_on: Callable[[], bool]) -> list[AgentHandle] | None:
        """Wait until this many tasks have arrived; return all that have.

        None if the stage ends first, or if `go_on`, which is polled several times a second, returns False.
        """
        while True:
            # In slices: on some platforms Ctrl-C cannot interrupt a wait without a limit.
            if self.agents.wait_for_number(num_tasks, _POLL_S):
                # From now on Spark replaces no task, or repeats the stage for nothing.
                self.agents.full = self._least is None
                return self.agents.connected()
            if (self.stage is not None and self.stage.ended.is_set()) or not go_on():
                return None

    def meet_in_time(
        self, num_tasks: int, limit_s: float, *, least: int | None = None, wait_for_slots: bool = False
    ) -> list[AgentHandle]:
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
        if least is not None and len(arrived := self.agents.connected()) >= least:
            return arrived
        needs = "" if least is None else f", and the job needs {least} tasks"
        raise StartTimeoutError(
            f"Timed out waiting for Spark tasks to start. Tasks {self.agents.missing()} of {num_tasks} had not reached "
            f"{self.address} after {limit_s:g} s{needs}. Check that the cluster has {num_tasks} free task slots and "
            "that executors can reach the driver and one another, or raise start_timeout "
            "(HOROVOD_SPARK_START_TIMEOUT)."
        )

    def _others_have_the_slots(self, num_tasks: int) -> bool:
        """Return whether there are enough slots and other jobs hold them."""
        if self.stage is None or self.agents.connected() or not self.stage.is_waiting():
            return False
        return count_slots(self.stage.context, self.stage.resources) >= num_tasks

    # ---- elastic jobs -------------------------------------------------------------------------------------

    def worker_ended(self, name: str, ended: Exited) -> None:
        """Fail the task of a worker that has failed, or had to leave, so that Spark starts it elsewhere."""
        agent = self.agents.agent(name)
        if ended.code or agent.leaving:
            agent.dismiss(ended.code or 1)

    def watch_leaving(self) -> None:
        """Until the stage ends, watch for executors that Spark decommissions, and tell their ranks to leave."""
        assert self.stage is not None
        while not self.stage.ended.wait(_LOOK_S):
            self._leave(self.stage.on_leaving_executors())

    def _leave(self, attempts: Mapping[int, int]) -> None:
        new = set(attempts.items()) - self._left
        self._left |= new
        tasks = sorted(task for task, _ in new)
        for agent in self.agents.connected():
            agent.leaving = agent.leaving or agent.number in tasks
        if new:
            _log.warning("Spark decommissions executors: the ranks of tasks %s commit and leave", tasks)
            self.agents.tell_hosts()
