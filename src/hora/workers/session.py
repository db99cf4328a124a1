"""Worker session: owns its workers, on this machine or on Spark, from launch to end."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hora.launch.agent.protocol import Exited
from hora.launch.controller.output import LogFile, OutputWriter
from hora.launch.job import OutputOptions
from hora.platforms.horovod import variables_of
from hora.workers.backend import (
    GRACE_S,
    ORDER_VARIABLE,
    TERMINAL,
    LocalBackend,
    Record,
    WorkerBackend,
    new_id,
    session_variables,
)
from hora.workers.capacity import CapacityError, measure
from hora.world import World

_MASTER_IP = "127.0.0.1"
_STOP_SLACK_S = 10.0
_CHECK_S = 1.0  # how often a wait asks whether its caller still waits
# Variables that describe this process's own job; workers must not inherit them.
_NOT_INHERITED = (
    *variables_of(World()),
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "HORA_SECRET_FILE",
    "HORA_LIFELINE",
    "HORA_SCRATCH",
    ORDER_VARIABLE,
    "HORA_JOB",
    "HORA_WORKER",
)


class WorkerSession:
    """Workers of one master. Thread-safe. Workers inherit `environment`."""

    def __init__(
        self, environment: Mapping[str, str], *, address: str, key: str, output: OutputOptions | None = None
    ) -> None:
        self.id = environment.get("CDSW_ENGINE_ID") or new_id()
        inherited = {name: value for name, value in environment.items() if name not in _NOT_INHERITED}
        self._user = inherited.get("USER", "user")
        self._address, self._key = address, key
        self._records: dict[str, Record] = {}
        self._by_number: dict[int, Record] = {}
        self._holders: dict[object, set[str]] = {}  # jobs -> the workers on whose addresses their ranks run
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._output = OutputWriter(output or OutputOptions(), {})
        self._local = LocalBackend(measure(environment), inherited, self)
        self._spark: list[tuple[object, WorkerBackend]] = []  # by cluster; the last one is in use

    def launch(self, n: int, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Start `n` workers and return one dict for each, in order. That of a rejected one has `message` and no `id`.

        If cores are scarce, workers share them and `message` says so, unless the request is `strict` or
        `all_or_nothing`. With `all_or_nothing` no worker starts in that case, after waiting up to `wait_s` seconds for
        room.
        """
        backend = self._backend(request)
        backend.probe(n)
        together, deadline = request.get("all_or_nothing"), time.monotonic() + float(request.get("wait_s", 0.0))
        engines, launched = [new_id() for _ in range(n)], list[Record]()
        with self._changed:
            try:
                while True:
                    given = request if together or request.get("strict") else backend.shared(n, request)
                    refused = _reserve(engines, given, backend)
                    if not (refused and together):
                        break
                    for engine in engines:
                        backend.release(engine)
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        why = f"not launched, because not all fit: {next(iter(refused.values()))}"
                        refused = {engine: refused.get(engine, why) for engine in engines}
                        break
                    self._changed.wait(left_s)
                answers: list[dict[str, Any]] = []
                for index, engine in enumerate(engines):
                    if engine in refused:
                        answers.append({"engineId": engine, "index": index, "message": refused[engine]})
                    else:
                        launched.append(self._admit(engine, index, given, backend))
                        answers.append(launched[-1].to_dict(time.time()))
                if launched:
                    backend.start(launched)
            except BaseException:
                for engine in engines:
                    backend.release(engine)
                for record in launched:
                    del self._records[record.id], self._by_number[record.number]
                    if record.log is not None:
                        record.log.discard()
                raise
        return answers

    def workers(self) -> list[dict[str, Any]]:
        """Return all workers of this session in launch order."""
        with self._changed:
            now = time.time()
            return [record.to_dict(now) for record in self._records.values()]

    def wait(
        self,
        ids: Iterable[str],
        *,
        for_completion: bool,
        timeout_s: float,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """Wait until every worker has completed, or runs, or until the wait is `abandoned`. `timeout_s` 0: no limit."""
        wanted, good = list(ids), "succeeded" if for_completion else "running"
        settled = TERMINAL | {good}

        def all_settled() -> bool:
            found = (self._records.get(worker) for worker in wanted)
            return all(record is None or record.status in settled for record in found)

        deadline = time.monotonic() + timeout_s if timeout_s else float("inf")
        with self._changed:
            while not all_settled() and (left_s := deadline - time.monotonic()) > 0 and not abandoned():
                self._changed.wait(min(left_s, _CHECK_S))
            return self._sorted(wanted, good)

    def hold(self, ids: Iterable[str], holder: object, *, abandoned: Callable[[], bool]) -> list[str]:
        """Wait until one of these workers ends, or is about to, and return all that do.

        `stop` waits for the holder. The holder reports the end of its ranks by holding fewer workers, or none
        (`release`).
        """
        with self._changed:
            self._holders[holder] = set(ids)
            self._changed.notify_all()
            while not (ending := [worker for worker in self._holders.get(holder, ()) if self._is_ending(worker)]):
                if abandoned():
                    break
                self._changed.wait(_CHECK_S)
            if abandoned():
                self._holders.pop(holder, None)
            return ending

    def release(self, holder: object) -> None:
        """Record that the ranks of this holder have ended. Ignored if it holds nothing."""
        if holder not in self._holders:  # most callers: they need not wait for the lock
            return
        with self._changed:
            self._holders.pop(holder, None)
            self._changed.notify_all()

    def _is_ending(self, worker: str) -> bool:
        record = self._records.get(worker)
        return record is None or record.stopping or record.ended

    def stop(self, ids: Iterable[str] | None) -> list[tuple[str, int]]:
        """End these workers (None: all) and the ranks at their addresses; return pairs of id and HTTP-like status."""
        with self._changed:
            chosen = list(self._records) if ids is None else list(ids)
            found = [self._records[worker] for worker in chosen if worker in self._records]
            running = [record for record in found if not record.ended]
            for record in running:
                record.stopping = True
            for backend in {id(record.backend): record.backend for record in running}.values():
                backend.terminate([record.number for record in running])
            self._changed.notify_all()

            def all_ended() -> bool:
                held: set[str] = set().union(*self._holders.values())
                return all(record.ended and record.id not in held for record in running)

            self._changed.wait_for(all_ended, GRACE_S + _STOP_SLACK_S)
            return [(worker, 204 if worker in self._records else 404) for worker in chosen]

    def tail(self, worker: str) -> str:
        with self._changed:
            return self._records[worker].tail.text if worker in self._records else ""

    def close(self) -> None:
        for _, backend in self._spark:
            backend.close()
        self._local.close()
        self._output.close()

    # What the backend reports, on its thread.

    def output(self, worker: int, stream: str, data: bytes) -> None:
        record = self._by_number[worker]
        record.tail.add(data)
        if record.log is not None:
            record.log.write(data)
        self._output.feed(worker, stream, data)

    def started(self, worker: int) -> None:
        with self._changed:
            record = self._by_number[worker]
            record.status, record.running_at = "running", time.time()
            self._changed.notify_all()

    def exited(self, ended: Exited) -> None:
        self._output.end(ended.worker)
        with self._changed:
            record = self._by_number[ended.worker]
            if record.log is not None:
                record.log.close()
            record.status = "stopped" if record.stopping else "succeeded" if ended.code == 0 else "failed"
            record.exit_code, record.finished_at = ended.code, time.time()
            record.message = ended.reason or record.message
            record.backend.release(record.id)
            record.backend.terminate([ended.worker])  # what it left running, as the end of a container would
            self._changed.notify_all()

    # Inside.

    def _backend(self, request: Mapping[str, Any]) -> WorkerBackend:
        """Return the backend for these workers. ValueError if Spark was requested and there is no session."""
        wanted = request.get("backend", "auto")
        if wanted == "local" or (wanted == "auto" and "pyspark" not in sys.modules):
            return self._local
        # Local workers start faster without it.
        from hora.workers.spark_backend import SparkTaskBackend, spark_cluster

        cluster = spark_cluster(wanted)
        if cluster is None:
            return self._local
        with self._changed:
            if not self._spark or self._spark[-1][0] is not cluster:
                self._spark.append((cluster, SparkTaskBackend(cluster, self)))
            return self._spark[-1][1]

    def _admit(self, engine: str, index: int, request: Mapping[str, Any], backend: WorkerBackend) -> Record:
        number, log = next(self._numbers), None
        if request.get("log_dir"):
            try:
                log = LogFile(Path(request["log_dir"]) / f"{engine}.log")
            except OSError as error:
                raise ValueError(f"log_dir={request['log_dir']!r} cannot be written: {error.strerror}") from error
        record = Record(
            id=engine,
            number=number,
            index=index,
            request=request,
            backend=backend,
            log=log,
            ip_address=f"127.{number // 62500}.{1 + number // 250 % 250}.{1 + number % 250}",
            message=request.get("note", ""),
        )
        record.variables = {
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": str(max(1, int(request["cpu"]))),
            "CDSW_MASTER_ID": self.id,
            "CDSW_MASTER_IP": _MASTER_IP,
            "CML_MASTER_IP": _MASTER_IP,
            "CDSW_ENGINE_ID": engine,
            **session_variables(record.ip_address, record.app_port, self._user, self._address, self._key),
        }
        self._records[engine] = self._by_number[number] = record
        self._output.set_ranks({number: engine})
        return record

    def _sorted(self, wanted: Iterable[str], good: str) -> dict[str, Any]:
        now = time.time()
        found: dict[str, list[dict[str, Any]]] = {"workers": [], "failures": []}
        for worker in wanted:
            record = self._records.get(worker)
            if record is None:
                unknown = {"id": worker, "status": "unknown", "message": "no such worker in this session"}
                found["failures"].append(unknown)
            else:
                found["workers" if record.status == good else "failures"].append(record.to_dict(now))
        return found


def _reserve(engines: Iterable[str], request: Mapping[str, Any], backend: WorkerBackend) -> dict[str, str]:
    """Reserve resources for each of these workers; return why those were refused for which there is no room."""
    refused: dict[str, str] = {}
    for engine in engines:
        try:
            backend.reserve(engine, request)
        except CapacityError as refusal:
            refused[engine] = str(refusal)
    return refused
