"""The driver's side of the tasks of a stage: who has arrived, where they run, and messages to and from them.

`SparkTasks` listens for `spark_task` supervisors, which prove that they hold the stage's secret before a
byte of theirs is read. It does not know Spark; `spark.py` puts stage, tasks and launcher together.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from hora.launch.spark.placement import TaskPlace
from hora.launch.spark.task import SparkTask
from hora.net.server import Peer, Server
from hora.net.wire import Credentials, Header, new_secret

__all__ = ["SparkTasks"]

_POLL_S = 0.05


class SparkTasks:
    """The connections to `num_tasks` tasks. `on_message(task, header, payload)` gets what they say after
    "here".

    A connection that ends is told as the message `{"kind": "gone"}`. Both are called in the server's
    thread.
    """

    def __init__(self, num_tasks: int, *, bind_address: str) -> None:
        self._num_tasks = num_tasks
        self._arrived = threading.Condition()
        self._places: dict[int, TaskPlace] = {}
        self._peers: dict[int, Peer] = {}
        self._dismissed = False
        self.lost_one = False  # a task ended before it was told to
        self._secret = new_secret()
        self._job = f"spark-{secrets.token_hex(8)}"
        self.on_message: Callable[[int, Header, bytes], None] = _ignore
        self._server = Server(self, name="hora-spark-tasks")
        self.port = self._server.listen((bind_address, 0))
        self._server.start(Credentials(self._secret, self._job))

    @property
    def secret(self) -> bytes:
        return self._secret

    def body(self, address: str, *, stream_output: bool, keep_output: bool) -> SparkTask:
        """What Spark has to run in each task."""
        return SparkTask(
            address=address,
            port=self.port,
            job=self._job,
            secret=self._secret,
            stream_output=stream_output,
            keep_output=keep_output,
        )

    def num_arrived(self) -> int:
        with self._arrived:
            return len(self._places)

    def connected(self) -> set[int]:
        with self._arrived:
            return set(self._peers)

    def missing(self) -> list[int]:
        with self._arrived:
            return [task for task in range(self._num_tasks) if task not in self._places]

    def wait(self, limit_s: float) -> list[TaskPlace] | None:
        """The places of all tasks, or None if some are missing after the time limit."""
        deadline = time.monotonic() + limit_s
        with self._arrived:
            while len(self._places) < self._num_tasks:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                # In slices: a wait without an end would not see Ctrl-C on every platform.
                self._arrived.wait(min(remaining, _POLL_S))
            return list(self._places.values())

    def send(self, task: int, header: Header, payload: bytes = b"") -> None:
        self._server.call(lambda: self._send(task, header, payload))

    def dismiss(self) -> None:
        """Have every task end its process, if it still runs, and return to Spark."""
        self._server.call(self._dismiss)

    def close(self) -> None:
        self._server.close()

    # ---- in the server's thread -------------------------------------------------------------------------

    def message(self, peer: Peer, header: Header, payload: bytes) -> None:
        if header["kind"] == "here":
            self._register(peer, header)
        else:
            self.on_message(peer.number, header, payload)

    def closed(self, peer: Peer) -> None:
        if self._peers.get(peer.number) is not peer:
            return
        with self._arrived:
            del self._peers[peer.number]
            if self.on_message is _ignore:  # nothing runs yet: Spark repeats the stage, and the task comes again
                del self._places[peer.number]
            self.lost_one = self.lost_one or not self._dismissed
        self.on_message(peer.number, {"kind": "gone"}, b"")

    def _register(self, peer: Peer, header: Header) -> None:
        task = int(header["task"])
        with self._arrived:
            if task in self._places:
                # Spark repeats a stage that lost an executor; this one's job is over, so the repetition has
                # to go.
                peer.send({"kind": "leave"})
                return
            peer.number, peer.name = task, f"Spark task {task}"
            self._peers[task] = peer
            self._places[task] = TaskPlace(task=task, host=str(header["host"]), gpus=tuple(map(str, header["gpus"])))
            self._arrived.notify_all()

    def _dismiss(self) -> None:
        self._dismissed = True
        for peer in self._peers.values():
            peer.send({"kind": "leave"})

    def _send(self, task: int, header: Header, payload: bytes) -> None:
        if task in self._peers:
            self._peers[task].send(header, payload)


def _ignore(task: int, header: Header, payload: bytes) -> Any:
    return None
