"""The machines on which a session's workers run: this one (`LocalBackend`), or those of Spark (`spark_backend`)."""

from __future__ import annotations

import json
import os
import secrets
import string
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from hora.launch.controller.launcher import HostLauncher
from hora.launch.controller.output import LogFile
from hora.launch.job import LaunchEvents, WorkerSpec
from hora.launch.processes import module_command
from hora.launch.slots import place_ranks
from hora.launch.tail import Tail
from hora.workers.capacity import Capacity, GpuClaims

TERMINAL = frozenset(("succeeded", "failed", "stopped", "timedout"))
_ALPHABET = string.ascii_lowercase + string.digits
_TAIL_LINES = 20
ORDER_VARIABLE = "HORA_WORKER_ORDER_FILE"  # names the file in which a worker's process finds what to do
GRACE_S = 5.0  # between SIGTERM and SIGKILL


def new_id() -> str:
    """Return a new worker id: 16 lower-case letters and digits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(16))


def session_variables(ip: str, port: int, user: str, address: str, key: str) -> dict[str, str]:
    """Return the variables that scripts read in a session and in its workers. `address`: of the session's gateway."""
    return {
        "CDSW_IP_ADDRESS": ip,
        "CDSW_APP_PORT": str(port),
        "CDSW_READONLY_PORT": str(port + 1),
        "CDSW_PUBLIC_PORT": str(port + 2),
        "CDSW_DOMAIN": "localhost",
        "CDSW_PROJECT": os.path.basename(os.getcwd()) or "project",
        "CDSW_CREATOR": user,
        "CDSW_ENGINE_TYPE": "python3",
        **dict.fromkeys(("CDSW_API_URL", "CDSW_PROJECT_URL", "CDSW_ENGINE_URL"), f"unix:{address}"),
        "CDSW_API_KEY": key,
    }


def _iso(moment: float | None) -> str | None:
    if moment is None:
        return None
    text = datetime.fromtimestamp(moment, timezone.utc).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


@dataclass
class Record:
    """A worker: what was requested, and what has become of it."""

    id: str
    number: int  # its name in launch events
    index: int
    request: Mapping[str, Any] = field(repr=False)
    backend: WorkerBackend = field(repr=False)
    log: LogFile | None = field(repr=False)
    ip_address: str
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)  # of its environment
    created_at: float = field(default_factory=time.time)
    status: str = "scheduling"
    stopping: bool = False
    running_at: float | None = None
    finished_at: float | None = None
    exit_code: int | None = None
    message: str = ""
    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them
    tail: Tail = field(default_factory=Tail, repr=False)  # the end of its output

    @property
    def ended(self) -> bool:
        return self.status in TERMINAL

    @property
    def app_port(self) -> int:
        return 8100 + self.number % 15000 * 3

    def to_dict(self, now: float) -> dict[str, Any]:
        begun = self.running_at
        # Web applications listen on 127.0.0.1, as the original tells them to, not on the worker's own loopback address.
        host = "127.0.0.1" if self.ip_address.startswith("127.") else self.ip_address
        return {
            "id": self.id,
            "index": self.index,
            "name": self.request.get("name") or f"worker-{self.number}",
            "status": self.status,
            "ip_address": self.ip_address if self.status == "running" or self.ended else "unknown",
            "app_url": f"http://{host}:{self.app_port}/",
            "created_at": _iso(self.created_at),
            "running_at": _iso(self.running_at),
            "finished_at": _iso(self.finished_at),
            "duration": 0.0 if begun is None else (self.finished_at or now) - begun,
            **{name: self.request[name] for name in ("cpu", "memory", "nvidia_gpu")},
            "gpus": list(self.gpus),
            "exit_code": self.exit_code,
            "message": self.message,
            "log_tail": self.tail.text.splitlines()[-_TAIL_LINES:],
        }


class WorkerBackend:
    """Base: runs workers and reports their exits as `LaunchEvents`. The session serialises its calls."""

    def probe(self, n: int) -> None:
        """Wait until the backend knows whether `n` more workers fit. Call it without the session's lock."""

    def shared(self, n: int, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the request that `n` workers can have: a share of scarce cores comes with a `note` that says so."""
        return request

    def reserve(self, worker: str, request: Mapping[str, Any]) -> None:
        """Reserve resources for this worker. Raises Refused if they do not fit."""

    def start(self, workers: Sequence[Record]) -> None:
        """Start reserved workers without waiting for them."""

    def terminate(self, numbers: Iterable[int]) -> None:
        """Send SIGTERM to these workers and to what ended ones left behind, SIGKILL after GRACE_S. Does not wait."""

    def release(self, worker: str) -> None:
        """Free a worker's reservation."""

    def close(self) -> None:
        """End everything."""


def order_file(request: Mapping[str, Any], *, cores: Sequence[int], source: str | None = None) -> dict[str, bytes]:
    """Return the private file that tells a worker's process (`main`) what to run. `source`: the script's text."""
    order = {
        "code": request.get("code") or "",
        "script": request.get("script") or "",
        "source": source,
        "cores": list(cores),
        "memory_gib": request["memory"],
    }
    return {ORDER_VARIABLE: json.dumps(order).encode()}


(_ALONE,) = place_ranks(["localhost"])  # a world of its own


def worker_spec(
    number: int, env: Mapping[str, str], files: Mapping[str, bytes], *, cwd: str | None = None
) -> WorkerSpec:
    """Return what starts a worker's process."""
    argv = module_command(sys.executable, "hora.workers.main")
    return WorkerSpec(worker=number, slot=_ALONE, argv=argv, env=env, cwd=cwd, private_files=files)


class LocalBackend(WorkerBackend):
    """This machine. `environment` is what workers inherit."""

    def __init__(self, capacity: Capacity, environment: Mapping[str, str], events: LaunchEvents) -> None:
        self._capacity, self._environment, self._events = capacity, dict(environment), events
        self._claims = GpuClaims()
        self._launcher = HostLauncher()

    def shared(self, n: int, request: Mapping[str, Any]) -> Mapping[str, Any]:
        wanted, there_are, free = request["cpu"], len(self._capacity.cores), self._capacity.free_cores
        if not n * wanted > free + 1e-9:
            return request
        share = self._capacity.fair_share(n, wanted)
        note = (
            f"{n} workers with {wanted:g} CPU cores each were requested, but {max(free, 0):g} of {there_are} are free: "
            f"each has {share:g}, and shares them (strict=True refuses instead)"
        )
        return {**request, "cpu": share, "share_cores": True, "note": note}

    def reserve(self, worker: str, request: Mapping[str, Any]) -> None:
        try:
            self._capacity = self._capacity.grant(worker, request, self._claims.claim)
        finally:
            self._claims.keep(self._capacity.used_gpus())

    def start(self, workers: Sequence[Record]) -> None:
        self._launcher.start([self._spec(worker) for worker in workers], self._events)

    def terminate(self, numbers: Iterable[int]) -> None:
        self._launcher.terminate(numbers, grace_s=GRACE_S)

    def release(self, worker: str) -> None:
        self._capacity = self._capacity.release(worker)
        self._claims.keep(self._capacity.used_gpus())

    def close(self) -> None:
        self._launcher.close()
        self._claims.keep(())

    def _spec(self, worker: Record) -> WorkerSpec:
        grant = self._capacity.grants[worker.id]
        worker.gpus = grant.gpus
        own = {"CUDA_VISIBLE_DEVICES": ",".join(grant.gpus), "HORA_WORKER": str(worker.number)}
        env = {**self._environment, **worker.variables, **own, **worker.request["env"]}
        return worker_spec(worker.number, env, order_file(worker.request, cores=grant.cores), cwd=os.getcwd())
