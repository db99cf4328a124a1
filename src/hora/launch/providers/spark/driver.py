"""The driver's side of a stage: has Spark run it, waits for its tasks, and exchanges messages with them.

It listens for the stage's tasks (`task`), which prove that they hold the stage's secret before a byte of theirs is
read. Where they run on this machine they read it from this process's memory; elsewhere it travels with Spark's task.
What they shall run is known to the launchers alone.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from hora.launch.providers.spark.cluster import check_protection, driver_addresses, is_local
from hora.launch.providers.spark.placement import TaskPlace
from hora.launch.providers.spark.stage import SparkStage
from hora.launch.providers.spark.task import SparkTask
from hora.net.secret_file import HeldSecret
from hora.net.server import Server
from hora.net.session import SessionPeer, Sessions
from hora.net.wire import Credentials, Header, new_secret

__all__ = ["StageDriver", "TaskConnections"]

T = TypeVar("T", bound="TaskConnections")

_POLL_S = 0.25
_LEAVE_LIMIT_S = 10.0


class Stage(Protocol):
    """Holder of the tasks' slots: a Spark job, seen from where the tasks meet."""

    ended: threading.Event
    group: str

    def cancel(self) -> None: ...

    def failure_text(self) -> str: ...


class TaskConnections:
    """The connections to the `num_tasks` tasks of a stage that Spark looks after itself. Left, its slots are free.

    `on_message(task, header, payload)` gets the tasks' messages after "here". A connection that ends is reported as the
    message `{"kind": "gone"}`. Both are called in the server's thread. `return_s`: how long a task that was cut off may
    take to come back.
    """

    def __init__(self, num_tasks: int, *, bind_address: str, address: str, job: str, return_s: float = 0.0) -> None:
        self._num_tasks = num_tasks
        self._arrived = threading.Condition()
        self._places: dict[int, TaskPlace] = {}
        self._peers: dict[int, SessionPeer] = {}
        self._dismissed: set[int] = set()
        self._lost_one = False  # a task ended before its end was requested
        self.on_message: Callable[[int, Header, bytes], None] = _ignore
        self.bind_address, self.address = bind_address, address
        self.secret = new_secret()
        self.stage: Stage = _Unseen()
        sessions = Sessions(self, limit_s=return_s)
        self._server = Server(sessions, name="hora-spark-tasks")
        sessions.serve(self._server)
        with contextlib.ExitStack() as undo:
            undo.callback(self._server.close)
            self.port = self._server.listen((bind_address, 0))
            self._server.start(Credentials(self.secret, job))
            self._closing = undo.pop_all()

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_: object) -> None:
        with self._closing:
            self.release()

    def meet(self, num_tasks: int, go_on: Callable[[], bool]) -> list[TaskPlace] | None:
        """Wait until this many tasks have arrived; the places of all that have.

        None if the stage ends before, or when `go_on`, which is polled several times a second, returns False.
        """
        while True:
            with self._arrived:
                # In slices: a wait without an end would not see Ctrl-C on every platform.
                if self._arrived.wait_for(lambda: len(self._places) >= num_tasks, _POLL_S):
                    return list(self._places.values())
            if self.stage.ended.is_set() or not go_on():
                return None

    def num_arrived(self) -> int:
        with self._arrived:
            return len(self._places)

    def connected(self) -> set[int]:
        with self._arrived:
            return set(self._peers)

    def host_of(self, task: int) -> str:
        """The address from which a task has called."""
        with self._arrived:
            peer = self._peers.get(task)
            return "unknown" if peer is None else peer.host

    def missing(self) -> list[int]:
        with self._arrived:
            return [task for task in range(self._num_tasks) if task not in self._places]

    def send(self, task: int, header: Header, payload: bytes = b"") -> None:
        self._server.call(lambda: self._send(task, header, payload))

    def dismiss(self, task: int) -> None:
        """Have a task end its process, if it still runs, and return to Spark."""
        self._server.call(lambda: self._dismiss([task]))

    def release(self) -> None:
        """Give the slots back: the tasks end on their own as a rule, and Spark kills those that do not. Idempotent."""
        self._server.call(lambda: self._dismiss(list(self._peers)))
        if isinstance(self.stage, _Unseen):
            return
        # After the loss of a task Spark would repeat the stage, which is of no use.
        if self.missing() or self._lost_one or not self.stage.ended.wait(_LEAVE_LIMIT_S):
            self.stage.cancel()

    # ---- in the server's thread -------------------------------------------------------------------------

    def message(self, peer: SessionPeer, header: Header, payload: bytes) -> None:
        if header["kind"] == "here":
            self._register(peer, header)
        else:
            self.on_message(peer.number, header, payload)

    def closed(self, peer: SessionPeer) -> None:
        if self._peers.get(peer.number) is not peer:
            return
        with self._arrived:
            del self._peers[peer.number]
            if self.on_message is _ignore:  # nothing runs yet: Spark repeats the stage, and the task comes again
                del self._places[peer.number]
            self._lost_one = self._lost_one or peer.number not in self._dismissed
        self.on_message(peer.number, {"kind": "gone"}, b"")

    def _register(self, peer: SessionPeer, header: Header) -> None:
        task = int(header["task"])
        with self._arrived:
            if task in self._places:
                # Spark repeats a stage that lost an executor; this one's job is over, so the repetition has to go.
                peer.send({"kind": "leave"})
                return
            peer.number, peer.name = task, f"Spark task {task}"
            self._peers[task] = peer
            self._places[task] = TaskPlace(task=task, host=str(header["host"]), gpus=tuple(map(str, header["gpus"])))
            self._arrived.notify_all()

    def _dismiss(self, tasks: Sequence[int]) -> None:
        self._dismissed.update(tasks)
        for task in tasks:
            self._send(task, {"kind": "leave"}, b"")

    def _send(self, task: int, header: Header, payload: bytes) -> None:
        if task in self._peers:
            self._peers[task].send(header, payload)


class StageDriver(TaskConnections):
    """The same with the stage itself, which runs at once, from the driver of a classic SparkContext."""

    stage: SparkStage

    def __init__(
        self,
        context: Any,
        num_tasks: int,
        *,
        group: str,
        stream_output: bool = True,
        barrier: bool = True,
        return_s: float = 0.0,
    ) -> None:
        check_protection(context)
        bind_address, address = driver_addresses(context)
        job = f"spark-{secrets.token_hex(8)}"
        super().__init__(num_tasks, bind_address=bind_address, address=address, job=job, return_s=return_s)
        with contextlib.ExitStack() as undo:
            undo.push(self._closing)
            held = HeldSecret(self.secret) if is_local(context) else None
            if held is not None:
                undo.callback(held.close)
            task = SparkTask(
                address=address,
                port=self.port,
                job=job,
                secret=b"" if held else self.secret,
                secret_file=held.path if held else "",
                stream_output=stream_output,
                # In local mode the executor's log is the driver's own terminal, which has its say already.
                keep_output=not is_local(context),
                return_s=return_s,
            )
            self.stage = SparkStage(context, num_tasks, task, group=group, barrier=barrier)
            # In the caller's thread, whose local properties (its scheduler pool) the stage inherits.
            self.stage.start()
            self._closing = undo.pop_all()


class _Unseen:
    """A stage that the meeting point is a task of: it can neither be watched nor cancelled from there."""

    group = ""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def cancel(self) -> None:
        return None

    def failure_text(self) -> str:
        return "Spark has ended the stage"


def _ignore(task: int, header: Header, payload: bytes) -> None:
    return None
