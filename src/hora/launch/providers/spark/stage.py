"""A Spark job whose tasks each call a function: started, watched and ended by the driver of a classic SparkContext."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hora.launch.limits import SPARK_END_S
from hora.launch.providers.spark.cluster import allocates_dynamically

_numbers = itertools.count()
_changing_environment = threading.Lock()  # the SparkContext's, which stages that start together share


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
        resources: Any = None,
    ) -> None:
        self.context = context
        self._about = about or group
        # Spark refuses barrier stages under dynamic allocation. Ordinary tasks suffice: the start timeout covers slots
        # that never appear.
        self._barrier = barrier and not allocates_dynamically(context)
        self._num_tasks = num_tasks
        self.resources = resources
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
            if self.resources is not None:
                rdd = rdd.withResources(self.resources)
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
