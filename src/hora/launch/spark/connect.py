"""Jobs through Spark Connect: the client sends one barrier stage and waits; its first task is the launcher.

A Connect client has no SparkContext, and the cluster may not be able to reach it. So what the driver does on classic Spark
happens in task 0 (`lead`): it listens for the other tasks, which learn its address and the stage's secret from
`BarrierTaskContext.allGather`, places ranks and runs the job. Values and exceptions come home as the rows of the stage; log
lines too, or live where task 0 can reach the client (`live_log`). Nothing that a user's function does makes a task fail:
Spark would repeat the stage. Called by what users call, with a session instead of a context.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import logging
import os
import tempfile
import threading
import time
import uuid
from typing import Any

import cloudpickle

from hora.config import accept_risk
from hora.errors import JobFailedError
from hora.launch.job import JobResult
from hora.launch.spark.cluster import is_connect
from hora.launch.spark.launcher import SparkJob, run_on_spark
from hora.launch.spark.lead import ConnectTasks
from hora.launch.spark.live_log import LiveLog

__all__ = ["run_on_cluster"]

_INLINE_BYTES = 8 * 2**20  # a larger call travels as an artifact: a plan has to fit into one message
_SCHEMA = "kind string, number long, chunk binary"
_POLL_S = 0.2
_CANCEL_LIMIT_S = 30.0
_SILENCE_S = 60.0
_numbers = itertools.count()

_log = logging.getLogger("hora.launch")


def run_on_cluster(cluster: Any, wanted: SparkJob) -> JobResult:
    """Run the job on the cluster of a SparkContext, or behind a Connect session. However it ends, no slot stays taken."""
    return _run_on_connect(cluster, wanted) if is_connect(cluster) else run_on_spark(cluster, wanted)


def _run_on_connect(session: Any, wanted: SparkJob) -> JobResult:
    _check_protection(session)
    if wanted.watching is not None:
        _log.warning("there is no live page through Spark Connect")
    function, artifact = _call(session, wanted.function)
    with LiveLog(_server_host(session), wanted.output) as log:
        tasks = ConnectTasks(
            num_proc=wanted.num_proc,
            function=function,
            artifact=artifact,
            env=dict(wanted.env),
            prefix=wanted.output.prefix,
            timestamp=wanted.output.timestamp,
            console=wanted.output.console,
            stream_output=wanted.stream_output,
            start_timeout_s=wanted.start_timeout_s,
            bind_gpus=wanted.bind_gpus,
            executable=wanted.executable,
            verbose=wanted.verbose,
            title=wanted.group,
            log=log.invitation,
        )
        stage = _Stage(session, tasks, f"{wanted.group}.connect.{os.getpid()}.{next(_numbers)}")
        rows = stage.run(min(wanted.start_timeout_s, _SILENCE_S), log.heard)
        log.show(rows.get("stdout", b""), rows.get("stderr", b""))
    return _result(rows)


def _call(session: Any, function: bytes) -> tuple[bytes, str]:
    """The call itself, or the name of the artifact that it has become."""
    if len(function) <= _INLINE_BYTES:
        return function, ""
    name = f"hora-{uuid.uuid4().hex}.pkl"
    with tempfile.TemporaryDirectory(prefix="hora-") as folder:
        path = os.path.join(folder, name)
        with open(path, "wb") as file:
            file.write(function)
        session.addArtifacts(path, file=True)
    return b"", name


class _Stage:
    """The one query of a job, run by a thread; Ctrl-C in the caller's interrupts it on the cluster."""

    def __init__(self, session: Any, tasks: ConnectTasks, tag: str) -> None:
        self._session, self._tasks, self._tag = session, tasks, tag
        self._ended = threading.Event()
        self._rows: list[Any] = []
        self._error: BaseException | None = None

    def run(self, start_timeout_s: float, heard: threading.Event) -> dict[str, bytes]:
        """What the stage gave, by kind. `heard`: set once task 0 has called, where it can reach the client.

        Silence for longer than the start timeout is said, and no more: it may be that only the client is out of reach.
        """
        thread = threading.Thread(target=self._collect, name=self._tag, daemon=True)
        thread.start()
        limit, said = time.monotonic() + start_timeout_s, False
        try:
            while not self._ended.wait(_POLL_S):
                if not said and not heard.is_set() and time.monotonic() > limit:
                    said = True
                    _log.warning(
                        "nothing was heard of the first task of %s for %g s: it waits for %d free task slots, or cannot reach "
                        "this client, and its output will be shown at the end",
                        self._tag,
                        start_timeout_s,
                        self._tasks.num_proc,
                    )
        except BaseException:
            with contextlib.suppress(Exception):  # the server may be what is gone
                self._session.interruptTag(self._tag)
            self._ended.wait(_CANCEL_LIMIT_S)
            raise
        thread.join(_CANCEL_LIMIT_S)
        if self._error is not None:
            raise JobFailedError(f"Spark job has failed: {str(self._error)[:4000]}") from self._error
        return _joined(self._rows)

    def _collect(self) -> None:
        try:
            self._session.addTag(self._tag)
            num_proc = self._tasks.num_proc
            frame = self._session.range(0, num_proc, 1, num_proc)
            self._rows = frame.mapInArrow(self._tasks, _SCHEMA, barrier=True).collect()
        except BaseException as error:  # whatever it is belongs to the thread that waits for the job
            self._error = error
        finally:
            self._ended.set()


def _joined(rows: list[Any]) -> dict[str, bytes]:
    parts: dict[str, list[tuple[int, bytes]]] = {}
    for row in rows:
        parts.setdefault(str(row[0]), []).append((int(row[1]), bytes(row[2])))
    return {kind: b"".join(chunk for _, chunk in sorted(found)) for kind, found in parts.items()}


def _result(rows: dict[str, bytes]) -> JobResult:
    if "error" in rows:
        error, cause = cloudpickle.loads(rows["error"])
        raise error from cause
    if "result" not in rows:
        raise JobFailedError("Spark job has failed: its first task has given no result")
    found: JobResult = cloudpickle.loads(rows["result"])
    return found


def _server_host(session: Any) -> str:
    """The host of the Connect server, as the client knows it."""
    return str(session.client.host).strip("[]")


def _check_protection(session: Any) -> None:
    """Say that others may read the stage's secret where they can; ValueError under HORA_STRICT=1."""

    def said(name: str) -> str:
        with contextlib.suppress(Exception):  # some servers keep their settings to themselves
            return str(session.conf.get(name, ""))
        return ""

    host = _server_host(session)
    here = host == "localhost" or _is_loopback(host)
    if said("spark.authenticate").lower() == "true" or (said("spark.master").startswith("local") and here):
        return
    accept_risk(
        f"the Spark cluster behind {host} does not say that it authenticates its own traffic: whoever listens on its "
        "network can read this job's secret there and run code in its processes. Set spark.authenticate=true (and "
        "spark.network.crypto.enabled=true against listeners), or run where the platform protects that network"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
