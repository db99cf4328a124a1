"""Body of a Spark task: it starts the process of one rank, looks after it and ends it.

The task itself only looks after its rank. It does not run the user's function, because Spark reuses its Python
workers: what a training does to modules, threads, devices and the environment must not reach the next job.
It starts its process through the launcher for hosts, so that killing the task (or its executor, or the driver)
ends the process as well. Spark calls `SparkTask`; the driver's end of the connection is `tasks`.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hora.launch.controller.host import SupervisorProcess
from hora.launch.controller.launcher import HostLauncher
from hora.launch.environment import first_variables, variables
from hora.launch.job import WorkerExit, WorkerSpec
from hora.launch.providers.spark import standby
from hora.launch.slots import Slot
from hora.launch.tail import Tail
from hora.net.connection import Connection, connect
from hora.net.secret_file import read_held_secret
from hora.net.session import ClientSession
from hora.net.wire import Credentials, Header

__all__ = ["SparkTask", "gpu_addresses", "host_hash", "python_path"]

_CONNECT_LIMIT_S = 60.0
_TAIL_BYTES = 64 * 1024
_UNSENT_BYTES = 4 * 1024 * 1024  # of output that the driver has not taken; what comes then is lost


@dataclass(frozen=True, kw_only=True)
class SparkTask:
    """A task's whole knowledge, carried in the closure that Spark ships: where the driver listens, and the secret.

    `secret_file`: where to read the secret instead, if the driver is on this machine: Spark shows its closures around.
    `stream_output`: send the rank's output to the driver as it comes, instead of only its end when it has failed.
    `keep_output`: have all of it in the executor's own log as well (the stderr page of Spark's UI). `return_s`: the
    rank runs on for so long when the connection to the driver breaks.
    """

    address: str
    port: int
    job: str
    secret: bytes = field(repr=False)
    secret_file: str
    stream_output: bool
    keep_output: bool
    return_s: float = 0.0

    def __call__(self, task: int) -> None:
        secret = read_held_secret(self.secret_file) if self.secret_file else self.secret
        credentials = Credentials(secret, self.job)

        def reach(limit_s: float) -> Connection:
            return connect((self.address, self.port), credentials, timeout_s=limit_s)

        try:
            connection = ClientSession(reach(_CONNECT_LIMIT_S), reach, limit_s=self.return_s)
        except OSError as error:
            raise RuntimeError(
                f"task {task} on {socket.gethostname()} cannot reach the driver at "
                f"{self.address}:{self.port} ({error}); "
                "set spark.driver.host to an address of the driver that executors can reach"
            ) from error
        try:
            _TaskAgent(connection, self).serve(task)
        finally:
            connection.close()


class _TaskAgent:
    """Obeys the driver until it says leave or is gone. Implements LaunchEvents for its launcher."""

    def __init__(self, connection: ClientSession, task: SparkTask) -> None:
        self._connection, self._task = connection, task
        self._launcher: HostLauncher | None = None
        self._lost_bytes = 0
        self._tails: dict[str, Tail] = {}

    def serve(self, task: int) -> None:
        self._send({"kind": "here", "task": task, "host": host_hash(), "gpus": gpu_addresses()})
        try:
            while True:
                header, payload = self._connection.receive()
                if header["kind"] == "start":
                    self._start(self._worker(header, payload))
                elif header["kind"] == "terminate" and self._launcher is not None:
                    self._launcher.terminate([header["worker"]], grace_s=header["grace_s"])
                elif header["kind"] == "fail":
                    raise RuntimeError(f"the rank of task {task} ended with exit code {header['code']}")
                elif header["kind"] == "leave":
                    return
        except (EOFError, OSError):
            return  # the driver is gone or has given up: only the process is left to end
        finally:
            if self._launcher is not None:
                self._launcher.close()

    def _start(self, worker: WorkerSpec) -> None:
        if self._launcher is None:
            self._launcher = HostLauncher(supervisor=self._warm_supervisor(worker))
        self._launcher.start([worker], self)

    def _warm_supervisor(self, worker: WorkerSpec) -> SupervisorProcess | None:
        """One whose workers are forks, where they can be."""
        if worker.preload is None or worker.argv[0] != sys.executable:
            return None
        return standby.supervisor(worker.preload, worker.env)

    def _worker(self, header: Header, payload: bytes) -> WorkerSpec:
        private = json.loads(payload)
        executable = header["executable"]
        inherited = first_variables()
        if not executable:
            inherited["PYTHONPATH"] = python_path()
        return WorkerSpec(
            worker=header["worker"],
            slot=Slot(**header["slot"]),
            argv=(executable or sys.executable, *header["arguments"]),
            env=inherited | private["env"],
            private_files={name: bytes.fromhex(data) for name, data in private["files"].items()},
            grace_s=header["grace_s"],
            preload=None if header["preload"] is None else tuple(header["preload"]),
        )

    def output(self, worker: int, stream: str, data: bytes) -> None:
        if self._task.keep_output:
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
        if self._task.stream_output:
            if not self._connection.connected and self._connection.unsent_bytes > _UNSENT_BYTES:
                self._lost_bytes += len(data)
                return
            if self._lost_bytes:
                data = b"\n[hora: %d bytes of output were lost with the connection]\n" % self._lost_bytes + data
                self._lost_bytes = 0
            self._send({"kind": "output", "worker": worker, "stream": stream}, data)
            return
        self._tails.setdefault(stream, Tail(_TAIL_BYTES)).add(data)

    def started(self, worker: int) -> None:
        self._send({"kind": "started", "worker": worker})

    def exited(self, ended: WorkerExit) -> None:
        if ended.code:
            for stream, tail in self._tails.items():
                self._send({"kind": "output", "worker": ended.worker, "stream": stream}, bytes(tail))
        self._tails.clear()
        self._send({"kind": "exited", **vars(ended)})

    def _send(self, header: Mapping[str, Any], payload: bytes = b"") -> None:
        self._connection.send(dict(header), payload)


def python_path() -> str:
    """PYTHONPATH for ranks: files that Spark shipped (--py-files) are on sys.path, not in the environment."""
    return os.pathsep.join(path for path in sys.path if path)


def host_hash(salt: str | None = None) -> str:
    """A name for the place whose processes can share memory: the host, its namespaces and, on YARN, the container."""
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("ipc", "mnt", "net", "uts") if _has_namespace(kind)]
    facts = [socket.gethostname(), *spaces, variables().get("CONTAINER_ID", ""), *([salt] if salt else [])]
    return f"{socket.gethostname().split('.')[0]}-{hashlib.sha256('|'.join(facts).encode()).hexdigest()[:32]}"


def _has_namespace(kind: str) -> bool:
    return Path(f"/proc/self/ns/{kind}").is_symlink()


def gpu_addresses() -> list[str]:
    """In a task: the GPUs that Spark gave it."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "a Spark task without its context"
    resources = context.resources() or {}
    return [str(address) for address in resources["gpu"].addresses] if "gpu" in resources else []
