"""Workers through Spark Connect: each is the single task of a query, which starts the worker and returns its exit code.

A worker's slot is free as soon as it ends; stopping a worker interrupts its query. If the task can reach this client,
its output and its running state arrive live, otherwise when it has ended.
"""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hora.errors import JobFailedError
from hora.launch.agent.protocol import Exited
from hora.launch.controller.launcher import HostLauncher
from hora.launch.job import LaunchEvents, OutputOptions, WorkerSpec
from hora.launch.processes import variables
from hora.launch.providers.spark.cluster import count_slots, forwarded_variables
from hora.launch.providers.spark.connect import Query, check_protection, rows, server_host
from hora.launch.providers.spark.live_log import ClientLogSink, Invitation, LiveLog, LogStream
from hora.launch.providers.spark.task import gpu_addresses
from hora.net.sockets import source_address
from hora.workers.backend import GRACE_S, PlannedWorker, order_file, worker_spec
from hora.workers.spark_backend import TaskSlots

_CLOSE_LIMIT_S = GRACE_S + 45.0
_TERMINATED, _FAILED, _LOST = 143, 255, 137


class ConnectBackend(TaskSlots):
    """See `backend.WorkerBackend`. Calls are serialised by the session."""

    def __init__(self, session: Any, events: LaunchEvents) -> None:
        super().__init__()
        self._session, self._events = session, events
        self._slots = 0
        self._workers: dict[int, _ConnectWorker] = {}

    def settle(self, n: int) -> None:
        if not self._held:  # counting takes a slot itself
            self._slots = count_slots(self._session)

    def reserve(self, worker: str, request: Mapping[str, Any]) -> None:
        self._take(worker, request, self._session.conf, self._slots)

    def start(self, planned: Sequence[PlannedWorker]) -> None:
        check_protection(self._session)
        self._workers = {number: worker for number, worker in self._workers.items() if not worker.over}
        for worker in planned:
            self._workers[worker.number] = _ConnectWorker(self._session, worker, self._events)

    def terminate(self, numbers: Iterable[int], *, grace_s: float) -> None:
        for number in numbers:
            if number in self._workers:
                self._workers[number].stop()

    def close(self) -> None:
        for worker in self._workers.values():
            worker.stop()
        for worker in self._workers.values():
            worker.join()


class _ConnectWorker:
    """Client side of a worker: the thread that waits for its query."""

    def __init__(self, session: Any, planned: PlannedWorker, events: LaunchEvents) -> None:
        self._planned, self._events = planned, events
        stdout, stderr = (io.BufferedWriter(LogStream(self, name)) for name in ("stdout", "stderr"))
        self._log = LiveLog(server_host(session), OutputOptions(stdout=stdout, stderr=stderr), self._called)
        script = planned.request.get("script")
        task = WorkerTask(
            number=planned.number,
            env={
                **forwarded_variables(),
                **planned.variables,
                "CDSW_MASTER_IP": self._log.invitation.address or "unknown",
                "CML_MASTER_IP": self._log.invitation.address or "unknown",
            },
            own_env=dict(planned.request["env"]),
            files=order_file(planned.request, cores=(), source=Path(script).read_text() if script else None),
            log=self._log.invitation,
        )
        self._query = Query(session, task, num_tasks=1, name="hora-workers", barrier=False)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self._query.tag, daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        self._stopped.set()

    def join(self) -> None:
        self._thread.join(_CLOSE_LIMIT_S)

    def write(self, stream: str, data: bytes) -> None:
        self._events.output(self._planned.number, stream, data)

    def _called(self, host: str) -> None:
        """Handle the task's call from `host`. Runs in the server's thread."""
        self._planned.record.ip_address = host
        self._events.started(self._planned.number)

    def _watch(self) -> None:
        if self._stopped.is_set():
            raise InterruptedError

    def _run(self) -> None:
        number = self._planned.number
        ended = Exited(worker=number, code=_FAILED, reason="the Spark task of this worker gave no answer")
        try:
            with self._log:
                found = self._query.run(self._watch)
                self._log.show(found)
            if "exit" in found:
                answer = json.loads(found["exit"])
                ended = Exited(worker=number, code=int(answer["code"]), reason=str(answer["reason"]))
        except InterruptedError:
            ended = Exited(worker=number, code=_TERMINATED)
        except (JobFailedError, OSError) as error:
            ended = Exited(worker=number, code=_FAILED, reason=str(error))
        finally:
            self._events.exited(ended)


@dataclass(frozen=True, kw_only=True)
class WorkerTask:
    """Body of the query: starts the worker's process, supervises it and returns its exit code."""

    number: int
    env: Mapping[str, str] = field(repr=False)
    own_env: Mapping[str, str] = field(repr=False)
    files: Mapping[str, bytes] = field(repr=False)
    log: Invitation = field(repr=False)

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        for _ in batches:
            pass
        context = TaskContext.get()
        assert context is not None, "a Spark task without its context"
        if context.attemptNumber():  # Spark tries again; a worker runs once
            lost = {"code": _LOST, "reason": "its Spark task ended: the executor was lost or the task was killed"}
            yield from rows("exit", json.dumps(lost).encode())
            return
        home = ClientLogSink(self.log)
        watched = _Process(home)
        launcher = HostLauncher()
        try:
            launcher.start([self._spec()], watched)
            watched.ended.wait()
        finally:
            launcher.close()
        yield from rows("exit", json.dumps({"code": watched.code, "reason": watched.reason}).encode())
        for kind, data in home.close().items():
            yield from rows(kind, data)

    def _spec(self) -> WorkerSpec:
        own = {
            "CDSW_IP_ADDRESS": source_address(self.log.address or "127.0.0.1"),
            "CUDA_VISIBLE_DEVICES": ",".join(gpu_addresses()),
            # Files that Spark shipped are on this interpreter's path, not in its environment.
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        return worker_spec(self.number, {**variables(), **self.env, **own, **self.own_env}, self.files)


class _Process:
    """LaunchEvents of the one process of a task."""

    def __init__(self, home: ClientLogSink) -> None:
        self._home = home
        self.ended = threading.Event()
        self.code, self.reason = _FAILED, ""

    def output(self, worker: int, stream: str, data: bytes) -> None:
        self._home.write(stream, data)

    def started(self, worker: int) -> None:
        return None

    def exited(self, ended: Exited) -> None:
        self.code, self.reason = ended.code, ended.reason
        self.ended.set()
