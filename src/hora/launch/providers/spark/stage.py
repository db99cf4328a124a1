"""One Spark job that holds `num_tasks` task slots at the same time, run from a thread of the driver.

The stage is a barrier stage, so Spark starts all tasks together or none. Spark's own `barrier()` and
`allGather()` are not used: each of them costs a whole second, and the tasks meet through their
authenticated connections anyway. This module knows nothing about ranks; `driver` gives it the body of a task.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hora.launch.providers.spark.cluster import allocates_dynamically, count_slots

__all__ = ["SparkStage"]

_CANCEL_LIMIT_S = 30.0
_numbers = itertools.count()


class SparkStage:
    """A running Spark job. `error` is why it failed, once `ended` is set; None if it succeeded."""

    def __init__(
        self, context: Any, num_tasks: int, body: Callable[[int], None], *, group: str, barrier: bool = True
    ) -> None:
        self._context = context
        # Spark refuses barrier stages where executors come and go. Ordinary tasks do there: the start timeout covers
        # slots that never come.
        self._barrier = barrier and not allocates_dynamically(context)
        self._num_tasks = num_tasks
        self._body = body
        self._cancelled = False
        self.group = f"{group}.{next(_numbers)}"
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self._thread = _thread_for(self._run, name=self.group)

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        """Have Spark kill the tasks that still run and take back their slots; wait until it has."""
        if not self.ended.is_set():
            self._cancelled = True
            self._context.cancelJobGroup(self.group)
        if not self.ended.wait(_CANCEL_LIMIT_S):
            raise TimeoutError(
                f"Spark did not end the job group {self.group} within {_CANCEL_LIMIT_S:g} s of cancelling it"
            )
        self._thread.join(_CANCEL_LIMIT_S)

    def is_waiting(self) -> bool:
        """Return whether no task of the stage runs yet, because the slots are taken by other jobs."""
        tracker = self._context.statusTracker()
        for job in tracker.getJobIdsForGroup(self.group):
            info = tracker.getJobInfo(job)
            stages = [tracker.getStageInfo(stage) for stage in info.stageIds] if info else []
            if any(stage is not None and stage.numActiveTasks for stage in stages):
                return False
        return not self.ended.is_set()

    def on_leaving_executors(self) -> dict[int, int]:
        """Tasks on executors that Spark is decommissioning, with their attempts' numbers."""
        from py4j.protocol import Py4JError

        try:
            scala_context = self._context._jsc.sc()
            scheduler, found = scala_context.taskScheduler(), {}
            for task in self._running_tasks(scala_context):
                if scheduler.getExecutorDecommissionState(task.executorId()).isDefined():
                    found[int(task.index())] = int(task.attempt())
            return found
        except Py4JError:  # some platforms let Python call Spark's public methods only
            return {}

    def _running_tasks(self, scala_context: Any) -> Iterator[Any]:
        tracker = self._context.statusTracker()
        for job in tracker.getJobIdsForGroup(self.group):
            info = tracker.getJobInfo(job)
            for number in info.stageIds if info else ():
                stage = tracker.getStageInfo(number)
                if stage is None or not stage.numActiveTasks:
                    continue
                tasks = scala_context.statusStore().taskList(number, stage.currentAttemptId, 100 * self._num_tasks)
                for index in range(tasks.size()):
                    if tasks.apply(index).status() == "RUNNING":
                        yield tasks.apply(index)

    def count_slots(self) -> int:
        """The cluster's task slots, free or not."""
        return count_slots(self._context)

    def failure_text(self) -> str:
        """Spark's reason for the failure in a few lines, without its Java stack."""
        text = str(self.error)
        found = re.search(r"Job aborted.*?(?=\n\s+at |\nDriver stacktrace|\Z)", text, re.DOTALL)
        hint = ""
        if "No module named 'hora'" in text:
            hint = (
                "\nInstall hora on every node, for the Python that runs Spark's workers: it is "
                f"{self._context.pythonExec!r}, and PYSPARK_PYTHON chooses another (here runs {sys.executable})."
            )
        return (found.group(0) if found else text)[:4000].strip() + hint

    def _run(self) -> None:
        try:
            self._context.setJobGroup(self.group, f"Hora: {self._num_tasks} processes", interruptOnCancel=True)
            rdd = self._context.parallelize(range(self._num_tasks), self._num_tasks)
            stage = rdd.barrier() if self._barrier else rdd
            tasks = stage.mapPartitions(_TaskBody(self._body))
            with _own_workers(self._context):
                tasks._jrdd  # noqa: B018 - computed once, and with it the kind of Python worker
            tasks.collect()
        except BaseException as error:  # whatever it is belongs to the thread that waits for the job
            self.error = error
        finally:
            self.ended.set()


class _TaskBody:
    """Function that Spark runs in a partition: the body, with the partition's number."""

    def __init__(self, body: Callable[[int], None]) -> None:
        self._body = body

    def __call__(self, partition: Iterable[int]) -> Iterator[None]:
        for index in partition:
            self._body(index)
        return iter(())


@contextlib.contextmanager
def _own_workers(context: Any) -> Iterator[None]:
    """Have Spark run what is defined within this in Python workers of their own.

    Spark keeps a set of Python workers for each environment that they ask for. So the next job gets those that have a
    warm process beside them (`warm_pool`), however many others UDFs have had meanwhile.
    """
    environment = context.environment
    context.environment = {**environment, "HORA_SPARK_WORKER": "1"}
    try:
        yield
    finally:
        context.environment = environment


def _thread_for(target: Callable[[], None], *, name: str) -> threading.Thread:
    from pyspark import InheritableThread

    # Inherits the caller's local properties (such as its scheduler pool), which a plain thread would lose.
    thread = InheritableThread(target=target)
    thread.name, thread.daemon = name, True
    return thread
