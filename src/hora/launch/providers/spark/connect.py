"""Jobs through Spark Connect: the client sends one barrier stage and waits; its first task is the launcher.

A Connect client has no SparkContext, and the cluster may not be able to reach it. So what the driver does on classic
Spark happens in task 0 (`lead`): it listens for the other tasks, which learn its address and the stage's secret from
`BarrierTaskContext.allGather`, places ranks and runs the job. Values and exceptions are returned as the rows of the
stage; log lines too, or live where task 0 can reach the client (`live_log`). Nothing that a user's function does makes
a task fail: Spark would repeat the stage. Called by what users call, with a session instead of a context.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import tempfile
import time
import uuid
from typing import Any

import cloudpickle

from hora.config import accept_risk
from hora.errors import JobFailedError
from hora.launch.controller.policy import modules_to_preload
from hora.launch.job import JobResult
from hora.launch.providers.spark.cluster import is_connect, is_local
from hora.launch.providers.spark.launcher import SparkJob, run_on_spark
from hora.launch.providers.spark.lead import ConnectTasks
from hora.launch.providers.spark.live_log import LiveLog
from hora.launch.providers.spark.query import Query, server_host

__all__ = ["check_protection", "run_on_cluster"]

_INLINE_BYTES = 8 * 2**20  # a larger call travels as an artifact: a plan has to fit into one message
_SILENCE_S = 60.0

_log = logging.getLogger("hora.launch")


def run_on_cluster(cluster: Any, wanted: SparkJob) -> JobResult:
    """Run the job on the cluster of a SparkContext, or behind a Connect session; no slot stays taken."""
    return _run_on_connect(cluster, wanted) if is_connect(cluster) else run_on_spark(cluster, wanted)


def _run_on_connect(session: Any, wanted: SparkJob) -> JobResult:
    check_protection(session)
    if wanted.watching is not None:
        _log.warning("there is no live page through Spark Connect")
    function, artifact = _call(session, wanted.function)
    with LiveLog(server_host(session), wanted.output) as log:
        tasks = ConnectTasks(
            num_proc=wanted.num_proc,
            function=function,
            artifact=artifact,
            preload=modules_to_preload(wanted.function),
            env=dict(wanted.env),
            prefix=wanted.output.prefix,
            timestamp=wanted.output.timestamp,
            console=wanted.output.console,
            stream_output=wanted.stream_output,
            # Where the server runs in this process, its executor's log is this terminal, which has its say already.
            keep_output=not is_local(session),
            start_timeout_s=wanted.start_timeout_s,
            bind_gpus=wanted.bind_gpus,
            executable=wanted.executable,
            verbose=wanted.verbose,
            title=wanted.group,
            log=log.invitation,
        )
        query = Query(session, tasks, num_tasks=wanted.num_proc, name=wanted.group, barrier=True)
        limit_s = min(wanted.start_timeout_s, _SILENCE_S)
        found = query.run(_Watch(log, query.tag, wanted.num_proc, limit_s))
        log.show(found)
    return _result(found)


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


class _Watch:
    """Watches a running query. Silence is logged, no more: perhaps only the client is out of reach."""

    def __init__(self, log: LiveLog, tag: str, num_proc: int, limit_s: float) -> None:
        self._log, self._tag, self._num_proc, self._limit_s = log, tag, num_proc, limit_s
        self._until: float | None = time.monotonic() + limit_s

    def __call__(self) -> None:
        if self._log.calls > 1:  # nothing of ours fails, so Spark has had a reason of its own
            raise JobFailedError(
                f"Spark has lost an executor of {self._tag} or killed one of its tasks, and began it anew: it was "
                "ended instead"
            )
        if self._until is not None and not self._log.calls and time.monotonic() > self._until:
            self._until = None
            _log.warning(
                "nothing was heard of the first task of %s for %g s: it waits for %d free task slots, or cannot reach "
                "this client, and its output will be shown at the end",
                self._tag,
                self._limit_s,
                self._num_proc,
            )


def _result(rows: dict[str, bytes]) -> JobResult:
    if "error" in rows:
        error, cause = cloudpickle.loads(rows["error"])
        raise error from cause
    if "result" not in rows:
        raise JobFailedError("Spark job has failed: its first task has given no result")
    found: JobResult = cloudpickle.loads(rows["result"])
    return found


def check_protection(session: Any) -> None:
    """Say that others may read the stage's secret where they can; ValueError under HORA_STRICT=1."""

    def setting(name: str) -> str:
        with contextlib.suppress(Exception):  # some servers keep their settings to themselves
            return str(session.conf.get(name, ""))
        return ""

    host = server_host(session)
    here = host == "localhost" or _is_loopback(host)
    if setting("spark.authenticate").lower() == "true" or (setting("spark.master").startswith("local") and here):
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
