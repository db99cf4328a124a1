"""Workers on a Spark cluster: each is a Spark job of one task, so that it ends alone. Spark is the cluster manager.

A worker is `scheduling` until Spark grants its slot, which is free again as soon as the worker ends. On classic Spark
an agent in the task starts the worker for this process. The cluster may be unable to reach a Spark Connect client:
there the task starts the worker itself, and output and state that the client does not get live arrive when the worker
has ended. Importing this module does not import pyspark.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hora.errors import JobFailedError
from hora.launch.agent.protocol import Exited
from hora.launch.controller.launcher import AgentHandle, HostLauncher
from hora.launch.environment import variables
from hora.launch.job import LaunchEvents, WorkerSpec
from hora.launch.providers.spark.cluster import (
    GPU_VARIABLE,
    active_cluster,
    check_protection,
    count_slots,
    forwarded_variables,
    is_connect,
    is_local,
    require_slots,
    server_host,
)
from hora.launch.providers.spark.connect import ClientLogSink, Invitation, LiveLog, Query, rows
from hora.launch.providers.spark.task import gpu_addresses, python_path
from hora.launch.providers.spark.tasks import TASKS_PYTHON, SparkTasks
from hora.net.sockets import source_address
from hora.workers.backend import GRACE_S, Record, WorkerBackend, order_file, worker_spec
from hora.workers.capacity import CapacityError

_CLOSE_LIMIT_S = GRACE_S + 45.0
_TERMINATED, _FAILED, _LOST = 143, 255, 137


def spark_cluster(backend: str) -> Any | None:
    """Return the SparkContext, or the Connect session, on whose cluster workers run; None for this machine.

    `auto` selects Spark if this process has a session on a cluster. A `local[n]` master has only this machine.
    """
    found = active_cluster()
    if found is None and backend == "spark":
        raise ValueError("backend='spark' needs an active SparkSession in this process, and there is none")
    if found is not None and backend == "auto" and is_local(found):
        return None
    return found


class SparkTaskBackend(WorkerBackend):
    """The tasks of a Spark cluster. They end with the processes that a worker leaves behind."""

    def __init__(self, cluster: Any, events: LaunchEvents) -> None:
        self._cluster, self._events = cluster, events
        self._is_connect = is_connect(cluster)
        self._conf = cluster.conf if self._is_connect else cluster.getConf()
        self._slots = 0
        self._held: set[str] = set()
        self._workers: dict[int, _Worker] = {}

    def probe(self, n: int) -> None:
        if not self._is_connect:
            with contextlib.suppress(ValueError):  # `reserve` says it, worker by worker
                require_slots(self._cluster, len(self._held) + n)
        elif not self._held:  # counting takes a slot itself
            self._slots = count_slots(self._cluster)

    def reserve(self, worker: str, request: Mapping[str, Any]) -> None:
        for what, wanted, setting, default in (
            ("CPU cores", request["cpu"], "spark.task.cpus", "1"),
            ("GPUs", request["nvidia_gpu"], "spark.task.resource.gpu.amount", "0"),
        ):
            if wanted > (has := float(self._conf.get(setting, default))):
                raise CapacityError(f"{wanted:g} {what} were requested, but a Spark task here has {has:g} ({setting})")
        slots = self._slots if self._is_connect else count_slots(self._cluster)
        if len(self._held) >= slots:
            raise CapacityError(f"a Spark task slot was requested, but {slots - len(self._held)} of {slots} are free")
        self._held.add(worker)

    def start(self, workers: Sequence[Record]) -> None:
        check_protection(self._cluster)
        self._workers = {number: worker for number, worker in self._workers.items() if worker.thread.is_alive()}
        kind = _QueryWorker if self._is_connect else _StageWorker
        for worker in workers:
            try:
                self._workers[worker.number] = kind(self._cluster, worker, self._events)
            except OSError as error:  # no descriptor is left, for example
                self._events.exited(Exited(worker.number, _FAILED, str(error)))

    def terminate(self, numbers: Iterable[int]) -> None:
        for number in self._workers.keys() & set(numbers):
            self._workers[number].stop()

    def release(self, worker: str) -> None:
        self._held.discard(worker)

    def close(self) -> None:
        self.terminate(self._workers)
        for worker in self._workers.values():
            worker.thread.join(_CLOSE_LIMIT_S)


class _Worker:
    """A worker, seen from here: a thread waits for its end and reports it to the session."""

    def __init__(self, worker: Record, events: LaunchEvents, name: str) -> None:
        self._record, self._events = worker, events
        # Here and now: executors need not have the file, and it may change before there is a slot.
        script = worker.request.get("script")
        self._source = Path(script).read_text() if script else None
        self._stopped = threading.Event()
        self.thread = threading.Thread(target=self._report, name=name, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _files(self) -> dict[str, bytes]:
        return order_file(self._record.request, cores=(), source=self._source)

    def _report(self) -> None:
        number = self._record.number
        ended = Exited(number, _FAILED, "the Spark task of this worker gave no answer")
        try:
            ended = self._run()
        except InterruptedError as stop:
            ended = Exited(number, _TERMINATED, str(stop))
        except (JobFailedError, OSError) as error:
            ended = Exited(number, _FAILED, str(error))
        finally:
            self._events.exited(ended)

    def _run(self) -> Exited:
        """Run the worker to its end, and free its slot. Raises InterruptedError if it was stopped without a process."""
        raise NotImplementedError


class _OneWorkerEvents:
    """LaunchEvents of a single worker; `wait` returns its exit."""

    def __init__(
        self, output: Callable[[int, str, bytes], None], started: Callable[[int], None] = lambda worker: None
    ) -> None:
        self.output, self.started = output, started
        self._exits: queue.SimpleQueue[Exited] = queue.SimpleQueue()
        self.exited = self._exits.put
        self.wait = self._exits.get


class _StageWorker(_Worker):
    """A worker of classic Spark."""

    def __init__(self, context: Any, worker: Record, events: LaunchEvents) -> None:
        # In the caller's thread, whose local properties (its scheduler pool) the stage inherits.
        self._tasks = SparkTasks.of_stage(context, 1, group="hora-workers")
        self._stage = self._tasks.running_stage
        self._agent: AgentHandle | None = None
        super().__init__(worker, events, self._stage.group)

    def stop(self) -> None:
        super().stop()
        if self._agent is not None:
            self._agent.terminate([self._record.number], grace_s=GRACE_S)

    def _run(self) -> Exited:
        with self._tasks:
            tasks = self._tasks.meet(1, lambda: not self._stopped.is_set())
            if self._stopped.is_set():
                raise InterruptedError("it was stopped before it started")
            if tasks is None:
                raise JobFailedError(self._stage.failure_text())
            process = _OneWorkerEvents(self._events.output, self._events.started)
            self._agent = tasks[0]
            self._agent.look_after(process)
            self._agent.start([self._spec(self._agent)])
            if self._stopped.is_set():  # meanwhile
                self.stop()
            return process.wait()

    def _spec(self, task: AgentHandle) -> WorkerSpec:
        worker = self._record
        worker.ip_address = task.address
        own = {
            "CDSW_IP_ADDRESS": task.address,
            "CDSW_MASTER_IP": self._tasks.address,
            "CML_MASTER_IP": self._tasks.address,
            "CUDA_VISIBLE_DEVICES": ",".join(task.gpus),
        }
        env = {**forwarded_variables(), **worker.variables, **own, **worker.request["env"]}
        env |= {"MASTER_ADDR": task.address, GPU_VARIABLE: ",".join(task.gpus)}
        spec = worker_spec(worker.number, env, self._files())
        return replace(spec, argv=(TASKS_PYTHON, *spec.argv[1:]))


class _QueryWorker(_Worker):
    """A worker through Spark Connect."""

    def __init__(self, session: Any, worker: Record, events: LaunchEvents) -> None:
        self._session = session
        super().__init__(worker, events, f"hora-worker-{worker.number}")

    def _run(self) -> Exited:
        number = self._record.number
        with LiveLog(server_host(self._session), partial(self._events.output, number), self._called) as log:
            task = self._task(log.invitation)
            query = Query(self._session, task, num_tasks=1, name="hora-workers", barrier=False)
            found = query.run(self._raise_if_stopped)
            log.show(found)
        if "exit" not in found:
            raise JobFailedError("the Spark task of this worker gave no answer")
        return Exited(number, *json.loads(found["exit"]))

    def _called(self, host: str) -> None:
        """Handle the task's call from `host`. Runs in the server's thread."""
        self._record.ip_address = host
        self._events.started(self._record.number)

    def _raise_if_stopped(self) -> None:
        if self._stopped.is_set():
            raise InterruptedError

    def _task(self, log: Invitation) -> Callable[[Iterable[Any]], Iterator[Any]]:
        """Return the body of the query: it starts the worker's process, supervises it and returns its exit code."""
        number, files, own_env = self._record.number, self._files(), dict(self._record.request["env"])
        masters = dict.fromkeys(("CDSW_MASTER_IP", "CML_MASTER_IP"), log.address or "unknown")
        env = {**forwarded_variables(), **self._record.variables, **masters}

        def run(batches: Iterable[Any]) -> Iterator[Any]:
            from pyspark import TaskContext

            for _ in batches:
                pass
            context = TaskContext.get()
            assert context is not None, "a Spark task without its context"
            if context.attemptNumber():  # Spark tries again; a worker runs once
                lost = (_LOST, "its Spark task ended: the executor was lost or the task was killed")
                yield from rows("exit", json.dumps(lost).encode())
                return
            here = {
                "CDSW_IP_ADDRESS": source_address(log.address or "127.0.0.1"),
                "CUDA_VISIBLE_DEVICES": ",".join(gpu_addresses()),
                "PYTHONPATH": python_path(),
            }
            home = ClientLogSink(log)
            process = _OneWorkerEvents(lambda worker, stream, data: home.write(stream, data))
            launcher = HostLauncher()
            try:
                launcher.start([worker_spec(number, {**variables(), **env, **here, **own_env}, files)], process)
                ended = process.wait()
            finally:
                launcher.close()
            yield from rows("exit", json.dumps((ended.code, ended.reason)).encode())
            for kind, data in home.close().items():
                yield from rows(kind, data)

        return run
