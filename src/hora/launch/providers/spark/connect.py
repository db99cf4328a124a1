"""Jobs through Spark Connect: the client sends one barrier stage and waits; its first task is the launcher.

A Connect client has no SparkContext, and the cluster may not be able to reach it. So task 0 does what the driver does
on classic Spark: it listens for the other tasks, which get its address and the stage's secret from
`BarrierTaskContext.allGather`, places ranks and runs the job. Values and exceptions are returned as rows of the stage.
A user's error never fails a task, because Spark would repeat the stage.

Log lines are returned too, or sent live if the task can reach the client (`LiveLog`). The client listens only at the
address from which it connects to the Connect server. It accepts only text, from senders with the key that travelled
with the query, and shows it without interpreting it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import logging
import os
import secrets
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import cloudpickle

from hora.errors import JobFailedError
from hora.launch.controller.output import OutputWriter
from hora.launch.job import JobResult
from hora.launch.limits import SILENCE_S, SPARK_END_S
from hora.launch.providers.spark import warm_pool
from hora.launch.providers.spark.cluster import check_protection, is_connect, is_local, listening_address, server_host
from hora.launch.providers.spark.job import SparkJob, preload_of, run_in_tasks
from hora.launch.providers.spark.task import SparkTask, python_path
from hora.launch.providers.spark.tasks import LOST_TASK, SparkTasks
from hora.net.server import Peer, Server
from hora.net.sockets import resolve, source_address
from hora.net.wire import Connection, Credentials, Header, connect, new_secret

_SCHEMA = "kind string, number long, chunk binary"
_CHUNK_BYTES = 256 * 1024  # of a row: Spark puts several into one message of 4 MiB
_POLL_S = 0.2
_CONNECT_LIMIT_S = 2.0
_CANCELLATION_S = 2.0
_KEPT_BYTES = 8 * 2**20  # of each stream, for the end
_numbers = itertools.count()

Body = Callable[[Iterable[Any]], Iterator[Any]]
_INLINE_BYTES = 8 * 2**20  # a larger call travels as an artifact: a plan has to fit into one message

_log = logging.getLogger("hora.launch")


@dataclass(frozen=True, kw_only=True)
class ConnectTasks:
    """The body of the stage. `artifact`: the file with the function, if that is large.

    `keep_output`: see `SparkTask`.
    """

    wanted: SparkJob
    artifact: str
    keep_output: bool
    log: Invitation = field(repr=False)

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        from pyspark import BarrierTaskContext

        for _ in batches:
            pass
        context = BarrierTaskContext.get()
        number = int(context.partitionId())
        preload = preload_of(replace(self.wanted, function=self._function()))
        if preload is not None:
            warm_pool.begin(preload, self.wanted.env, python_path())
        if number:
            SparkTask(**json.loads(next(text for text in context.allGather("") if text)))(number)
            return
        bind, address = listening_address(context.getTaskInfos()[0].address.rpartition(":")[0].strip("[]"))
        with SparkTasks(self.wanted.num_proc, bind_address=bind, address=address) as tasks:
            task = SparkTask(
                address=address,
                port=tasks.port,
                secret=tasks.secret.hex(),
                stream_output=self.wanted.output.console,
                keep_output=self.keep_output,
                preload=preload,
            )
            context.allGather(json.dumps(asdict(task)))
            own = threading.Thread(target=task, args=(0,), name="hora-task-0", daemon=True)
            own.start()
            answer = self._lead(tasks)
        own.join(SPARK_END_S)
        for kind, data in answer:
            yield from rows(kind, data)

    def _lead(self, tasks: SparkTasks) -> list[tuple[str, bytes]]:
        """Run the job, in task 0. Return the rows for the client: the result, or the error with its cause, and unseen
        log lines.
        """
        sink = ClientLogSink(self.log)
        streams: dict[str, Any] = {name: LogStream(sink, name) for name in ("stdout", "stderr")}
        try:
            wanted = replace(self.wanted, function=self._function(), output=replace(self.wanted.output, **streams))
            found = ("result", cloudpickle.dumps(run_in_tasks(tasks, wanted)))
        except BaseException as error:  # it belongs to the client; a task that fails would be repeated
            found = ("error", _pickled(error))
        return [found, *sink.close().items()]

    def _function(self) -> bytes:
        if not self.artifact:
            return self.wanted.function
        from pyspark import SparkFiles

        with open(SparkFiles.get(self.artifact), "rb") as file:
            return file.read()


def _pickled(error: BaseException) -> bytes:
    """Return the pickled error and its cause; as text if they cannot be pickled."""
    with contextlib.suppress(Exception):
        pair = cloudpickle.dumps((error, error.__cause__))
        cloudpickle.loads(pair)
        return bytes(pair)
    return bytes(cloudpickle.dumps((JobFailedError(f"{type(error).__name__}: {error}"), None)))


class Query:
    """`num_tasks` tasks that each call `body`; `barrier`: all at once or none."""

    def __init__(self, session: Any, body: Body, *, num_tasks: int, name: str, barrier: bool) -> None:
        if not hasattr(session, "interruptTag"):
            raise ValueError(
                "processes through Spark Connect need Spark 3.5 or newer: queries of this client can neither be "
                "interrupted nor start all their tasks at once. Run the driver in classic mode (a master instead of "
                "sc://…)"
            )
        self._session, self._body, self._num_tasks, self._barrier = session, body, num_tasks, barrier
        self.tag = f"{name}.connect.{os.getpid()}.{next(_numbers)}"
        self._ended = threading.Event()
        self._found: list[Any] = []
        self._error: BaseException | None = None

    def run(self, watch: Callable[[], None] = lambda: None) -> dict[str, bytes]:
        """Run the query and return its results by kind; `watch`, called often, interrupts it by raising."""
        thread = threading.Thread(target=self._collect, name=self.tag, daemon=True)
        thread.start()
        try:
            while not self._ended.wait(_POLL_S):
                watch()
        except BaseException:
            self.interrupt()
            self._ended.wait(SPARK_END_S)
            raise
        thread.join(SPARK_END_S)
        if self._error is not None:
            raise JobFailedError(f"Spark job has failed: {str(self._error)[:4000]}") from self._error
        by_kind = itertools.groupby(sorted(self._found), key=lambda row: str(row[0]))
        return {kind: b"".join(bytes(row[2]) for row in parts) for kind, parts in by_kind}

    def interrupt(self) -> None:
        """Ask Spark to kill the tasks and free their slots. Does not wait."""
        with contextlib.suppress(Exception):  # the server may be what is gone
            self._session.interruptTag(self.tag)

    def _collect(self) -> None:
        try:
            self._session.addTag(self.tag)
            frame = self._session.range(0, self._num_tasks, 1, self._num_tasks)
            self._found = frame.mapInArrow(self._body, _SCHEMA, barrier=self._barrier).collect()
        except BaseException as error:  # whatever it is belongs to the thread that waits for the query
            self._error = error
        finally:
            self._ended.set()


def rows(kind: str, data: bytes) -> Iterator[Any]:
    """Return these bytes as rows for the client. Runs in a task."""
    import pyarrow

    for number, begin in enumerate(range(0, max(len(data), 1), _CHUNK_BYTES)):
        chunk = data[begin : begin + _CHUNK_BYTES]
        yield pyarrow.RecordBatch.from_pydict({"kind": [kind], "number": [number], "chunk": [chunk]})


def run_on_cluster(cluster: Any, wanted: SparkJob) -> JobResult:
    """Run the job on the cluster of a SparkContext, or behind a Connect session; no slot stays taken."""
    check_protection(cluster)
    if is_connect(cluster):
        return _run_on_connect(cluster, wanted)
    how: dict[str, Any] = {"stream_output": wanted.output.console, "preload": preload_of(wanted)}
    how["resources"] = wanted.resources
    with SparkTasks.of_stage(cluster, wanted.num_proc, group=wanted.title, about=wanted.about, **how) as tasks:
        try:
            return run_in_tasks(tasks, wanted)
        except JobFailedError as error:
            # Tasks that are killed end a little before the job that somebody has cancelled.
            reason = tasks.running_stage.cancellation(_CANCELLATION_S) if LOST_TASK in str(error) else ""
            if not reason:
                raise
            raise JobFailedError(f"Spark job has failed: {reason}", rank=error.rank) from error


def _run_on_connect(session: Any, wanted: SparkJob) -> JobResult:
    watching, env = wanted.watching, wanted.env
    if watching is not None and (watching.page or watching.record or watching.verdict):
        _log.warning("there is no live page through Spark Connect")
    if watching is not None and watching.tracking is not None and watching.tracking.run_id:
        env = {**env, **watching.tracking.variables()}  # the ranks' numbers arrive, a verdict does not
    function, artifact = _call(session, wanted.function)
    # Executors have already prefixed the lines. Lines that are always shown arrive even if the job's console is off.
    writer = OutputWriter(replace(wanted.output, prefix=False, console=True), {})
    with LiveLog(server_host(session), functools.partial(writer.feed, 0)) as log:
        # A plan takes the description of the job, but no streams.
        output = replace(wanted.output, stdout=None, stderr=None)
        tasks = ConnectTasks(
            wanted=replace(wanted, function=function, output=output, env=env, watching=None),
            artifact=artifact,
            # A local server's executors write to this terminal directly, so their output needs no forwarding.
            keep_output=not is_local(session),
            log=log.invitation,
        )
        query = Query(session, tasks, num_tasks=wanted.num_proc, name=wanted.title, barrier=True)
        limit_s = min(wanted.start_timeout_s, SILENCE_S)
        found = query.run(_Watch(log, query.tag, wanted.num_proc, limit_s))
        log.show(found)
    return _result(found)


def _call(session: Any, function: bytes) -> tuple[bytes, str]:
    """Return the call, or the name of its artifact."""
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
    """Watches a running query. Silence is only logged: perhaps only the client is unreachable."""

    def __init__(self, log: LiveLog, tag: str, num_proc: int, limit_s: float) -> None:
        self._log, self._tag, self._num_proc, self._limit_s = log, tag, num_proc, limit_s
        self._until: float | None = time.monotonic() + limit_s

    def __call__(self) -> None:
        if self._log.calls > 1:  # our tasks never fail, so Spark had its own reason
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
    return cloudpickle.loads(rows["result"])


@dataclass(frozen=True)
class Invitation:
    """Address at which the client listens; empty if it does not."""

    address: str
    port: int
    job: str
    key: bytes = field(repr=False)


class LiveLog:
    """The client's side. `calls`: how often a first task has connected; a second call means that Spark repeated the
    stage.

    In the server's thread, `write` gets the bytes of the streams `stdout` and `stderr`, and `on_call` the address from
    which a task connects.
    """

    def __init__(
        self, server_host: str, write: Callable[[str, bytes], None], on_call: Callable[[str], None] = lambda host: None
    ) -> None:
        self.calls, self._write, self._on_call = 0, write, on_call
        self._server = Server(self, name="hora-connect-log")
        address, port = "", 0
        with contextlib.suppress(OSError):
            own = source_address((resolve(server_host) or [server_host])[0])
            address, port = own, self._server.listen((own, 0))
        self.invitation = Invitation(address, port, f"log-{secrets.token_hex(8)}", new_secret())

    def __enter__(self) -> LiveLog:
        self._server.start(Credentials(self.invitation.key, self.invitation.job))
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def show(self, rows: Mapping[str, bytes]) -> None:
        """Lines that came with the rows."""
        for name in ("stdout", "stderr"):
            if rows.get(name):
                self._write(name, rows[name])

    # ---- in the server's thread -------------------------------------------------------------------------

    def message(self, peer: Peer, header: Header, payload: bytes) -> None:
        if header["kind"] == "here":
            self.calls += 1
            self._on_call(peer.host)
        elif header["kind"] == "output":
            self._write("stderr" if header["stream"] == "stderr" else "stdout", payload)

    def closed(self, peer: Peer) -> None:
        return None


class ClientLogSink:
    """The first task's side: sends lines to the client, or keeps them."""

    def __init__(self, invitation: Invitation) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._connection: Connection | None = None
        if invitation.address:
            with contextlib.suppress(OSError):
                key = Credentials(invitation.key, invitation.job)
                self._connection = connect((invitation.address, invitation.port), key, timeout_s=_CONNECT_LIMIT_S)
                self._connection.send({"kind": "here"})

    def write(self, stream: str, data: bytes) -> None:
        with self._lock:
            if self._connection is not None:
                try:
                    self._connection.send({"kind": "output", "stream": stream}, data)
                    return
                except OSError:
                    self._connection = None
            self._kept[stream] += data
            del self._kept[stream][:-_KEPT_BYTES]

    def close(self) -> dict[str, bytes]:
        """Close the log and return the lines that the client has not received."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            return {stream: bytes(data) for stream, data in self._kept.items() if data}


class LogStream(io.RawIOBase):
    """One of its streams, as a file."""

    def __init__(self, sink: ClientLogSink, name: str) -> None:
        self._sink, self._name = sink, name

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._sink.write(self._name, bytes(data))
        return len(data)
