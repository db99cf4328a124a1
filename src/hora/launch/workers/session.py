"""A session: owns workers of this machine, from launch to end.

It grants them cores, memory and GPUs, starts them under the launcher's supervisor (so that none outlives the session,
whatever happens to it), shows their output with their ids in front, and knows how each of them ended. Every worker has
an IP address of its own inside the loopback network. Callers: `api` in this process, `gateway` for others.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, cast

from hora.launch.host import Host, local_supervisor_command
from hora.launch.output import Output
from hora.launch.spec import OutputOptions, Slot, WorkerExit, WorkerSpec
from hora.launch.workers.capacity import Capacity, Refused
from hora.launch.workers.record import Record, new_id

__all__ = ["Session"]

_GRACE_S = 5.0
_MASTER_IP = "127.0.0.1"


class Session:
    """Workers of one master. Thread-safe. `environment` is what workers inherit."""

    def __init__(
        self,
        capacity: Capacity,
        environment: Mapping[str, str],
        *,
        address: str,
        key: str,
        output: OutputOptions | None = None,
    ) -> None:
        self.id = new_id()
        self._capacity = capacity
        self._environment = dict(environment)
        self._address, self._key = address, key
        self._records: dict[str, Record] = {}
        self._by_number: dict[int, Record] = {}
        self._stopping: set[str] = set()
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._output = Output(output or OutputOptions(), {})
        self._logs: dict[int, IO[bytes]] = {}
        self._host: Host | None = None

    def launch(self, n: int, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Start `n` workers; one dict for each, in order. What does not fit is a dict without `id`, with `message`."""
        answers: list[dict[str, Any]] = []
        specs: list[WorkerSpec] = []
        with self._changed:
            before = self._capacity
            for index in range(n):
                number, engine = next(self._numbers), new_id()
                try:
                    self._capacity = self._capacity.grant(
                        engine, cpu=request["cpu"], memory_gib=request["memory"], num_gpus=request["nvidia_gpu"]
                    )
                except Refused as refusal:
                    answers.append({"engineId": engine, "index": index, "message": str(refusal)})
                    continue
                record = self._record(engine, number, index, request)
                specs.append(self._spec(record, number, request))
                answers.append(record.to_dict(time.time()))
            if request.get("all_or_nothing") and len(specs) < n:
                self._undo(before, specs)
                return [
                    answer
                    if "message" in answer and "id" not in answer
                    else {
                        "engineId": answer["id"],
                        "index": answer["index"],
                        "message": "not launched, because others were refused",
                    }
                    for answer in answers
                ]
            if specs:
                self._start(specs)
        return answers

    def workers(self) -> list[dict[str, Any]]:
        """Every worker of this session, in the order of their launch."""
        with self._changed:
            now = time.time()
            return [record.to_dict(now) for record in self._records.values()]

    def wait(self, ids: Iterable[str], *, for_completion: bool, timeout_s: float) -> dict[str, Any]:
        """Wait until every worker has completed, or runs; `timeout_s` 0 waits for ever."""
        wanted = list(ids)
        good: tuple[str, ...] = ("succeeded",)
        bad: tuple[str, ...] = ("failed", "stopped", "timedout")
        if not for_completion:
            good, bad = ("running",), (*bad, "succeeded")
        settled = {*good, *bad}

        def all_settled() -> bool:
            found = (self._records.get(worker) for worker in wanted)
            return all(record is None or record.status in settled for record in found)

        with self._changed:
            self._changed.wait_for(all_settled, timeout_s or None)
            now = time.time()
            workers: list[dict[str, Any]] = []
            failures: list[dict[str, Any]] = []
            for worker in wanted:
                record = self._records.get(worker)
                if record is None:
                    failures.append({"id": worker, "status": "unknown", "message": "no such worker in this session"})
                else:
                    (workers if record.status in good else failures).append(record.to_dict(now))
        return {"workers": workers, "failures": failures}

    def stop(self, ids: Iterable[str] | None) -> list[tuple[str, int]]:
        """End these workers, or all that run; pairs of id and an HTTP-like status. Returns when they have ended."""
        with self._changed:
            chosen = list(self._records) if ids is None else list(ids)
            running = [worker for worker in chosen if worker in self._records and not self._records[worker].ended]
            self._stopping.update(running)
            numbers = [number for number, record in self._by_number.items() if record.id in running]
            if self._host is not None and numbers:
                self._host.terminate(numbers, grace_s=_GRACE_S)
            self._changed.wait_for(lambda: all(self._records[worker].ended for worker in running), 2 * _GRACE_S + 5.0)
            return [(worker, 204 if worker in self._records else 404) for worker in chosen]

    def tail(self, worker: str) -> str:
        """The end of a worker's output."""
        with self._changed:
            record = self._records.get(worker)
        number = next((number for number, other in self._by_number.items() if other is record), None)
        return "" if number is None else self._output.tail(number)

    def close(self) -> None:
        """End every worker."""
        if self._host is not None:
            self._host.finish(grace_s=_GRACE_S)
            self._host.wait(_GRACE_S + 15.0)
            self._host = None
        self._output.close()

    # What the host reports, on its thread.

    def output(self, worker: int, stream: str, data: bytes) -> None:
        record = self._by_number[worker]
        record.remember(data)
        if worker in self._logs:
            self._logs[worker].write(data)
        self._output.feed(worker, stream, data)

    def started(self, worker: int) -> None:
        with self._changed:
            record = self._by_number[worker]
            record.status, record.running_at = "running", time.time()
            self._changed.notify_all()

    def exited(self, ended: WorkerExit) -> None:
        self._output.end(ended.worker)
        if ended.worker in self._logs:
            self._logs.pop(ended.worker).close()
        with self._changed:
            record = self._by_number[ended.worker]
            stopped = record.id in self._stopping
            record.status = "stopped" if stopped else "succeeded" if ended.code == 0 else "failed"
            record.exit_code, record.finished_at = ended.code, time.time()
            record.message = ended.reason
            self._capacity = self._capacity.release(record.id)
            self._changed.notify_all()

    # Inside.

    def _record(self, engine: str, number: int, index: int, request: Mapping[str, Any]) -> Record:
        record = Record(
            id=engine,
            index=index,
            name=request.get("name") or f"worker-{number}",
            ip_address=f"127.0.{1 + number // 250}.{1 + number % 250}",
            cpu=request["cpu"],
            memory=request["memory"],
            nvidia_gpu=request["nvidia_gpu"],
            created_at=time.time(),
            app_port=8080 + number,
        )
        self._records[engine] = record
        self._by_number[number] = record
        self._output.set_ranks(cast(Mapping[int, int], {number: engine}))  # lines are tagged with the id
        if request.get("log_dir"):
            folder = Path(request["log_dir"])
            folder.mkdir(parents=True, exist_ok=True)
            self._logs[number] = open(folder / f"{engine}.log", "wb", buffering=0)  # noqa: SIM115 - closed when it ends
        return record

    def _undo(self, before: Capacity, specs: list[WorkerSpec]) -> None:
        self._capacity = before
        for spec in specs:
            del self._records[self._by_number.pop(spec.worker).id]

    def _start(self, specs: list[WorkerSpec]) -> None:
        if self._host is None:
            self._host = Host("localhost", local_supervisor_command(), self)
        self._host.start(specs)

    def _spec(self, record: Record, number: int, request: Mapping[str, Any]) -> WorkerSpec:
        grant = self._capacity.grants[record.id]
        order = {
            "code": request.get("code") or "",
            "script": request.get("script") or "",
            "cores": list(grant.cores),
            "memory_gib": grant.memory_gib,
        }
        return WorkerSpec(
            worker=number,
            slot=Slot(hostname="localhost", rank=0, size=1, local_rank=0, local_size=1),
            argv=(sys.executable, "-m", "hora.launch.workers.code"),
            env={**self._environment, **self._variables(record, grant.gpus), **request["env"]},
            cwd=os.getcwd(),
            secret=json.dumps(order).encode(),
            grace_s=_GRACE_S,
        )

    def _variables(self, record: Record, gpus: tuple[str, ...]) -> dict[str, str]:
        return {
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": str(max(1, int(record.cpu))),
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            "CDSW_ENGINE_ID": record.id,
            "CDSW_MASTER_ID": self.id,
            "CDSW_MASTER_IP": _MASTER_IP,
            "CML_MASTER_IP": _MASTER_IP,
            "CDSW_IP_ADDRESS": record.ip_address,
            "CDSW_APP_PORT": str(record.app_port),
            "CDSW_READONLY_PORT": str(record.app_port + 1000),
            "CDSW_PUBLIC_PORT": str(record.app_port + 2000),
            "CDSW_DOMAIN": "localhost",
            "CDSW_PROJECT": os.path.basename(os.getcwd()) or "project",
            "CDSW_CREATOR": self._environment.get("USER", "user"),
            "CDSW_ENGINE_TYPE": "python3",
            "CDSW_API_URL": f"unix:{self._address}",
            "CDSW_API_KEY": self._key,
            "CDSW_PROJECT_URL": f"unix:{self._address}",
            "CDSW_ENGINE_URL": f"unix:{self._address}",
        }


def warn_refused(answers: list[dict[str, Any]]) -> None:
    """Say it aloud: a refused launch looks like a success until somebody reads `id`."""
    refused = [answer["message"] for answer in answers if "id" not in answer]
    if refused:
        warnings.warn(f"{len(refused)} of {len(answers)} workers were not launched: {refused[0]}", stacklevel=3)
