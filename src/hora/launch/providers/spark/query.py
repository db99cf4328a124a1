"""A query of a Connect client whose tasks are ours: it is run by a thread, can be interrupted, and its rows are what
came home.

`connect` runs jobs by it, the workers API a worker. Rows are chunks of bytes by kind: an answer may be larger than a
message.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hora.errors import JobFailedError

__all__ = ["Query", "rows", "server_host"]

_SCHEMA = "kind string, number long, chunk binary"
_CHUNK_BYTES = 256 * 1024  # of a row: Spark puts several into one message of 4 MiB
_POLL_S = 0.2
_CANCEL_LIMIT_S = 30.0
_numbers = itertools.count()

Body = Callable[[Iterable[Any]], Iterator[Any]]


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
            self._ended.wait(_CANCEL_LIMIT_S)
            raise
        thread.join(_CANCEL_LIMIT_S)
        if self._error is not None:
            raise JobFailedError(f"Spark job has failed: {str(self._error)[:4000]}") from self._error
        return _joined(self._found)

    def interrupt(self) -> None:
        """Have Spark kill the tasks and take back their slots. Does not wait."""
        with contextlib.suppress(Exception):  # the server may be what is gone
            self._session.interruptTag(self.tag)

    def _collect(self) -> None:
        try:
            self._session.addTag(self.tag)
            frame = self._session.range(0, self._num_tasks, 1, self._num_tasks)
            given = {"barrier": True} if self._barrier else {}
            self._found = frame.mapInArrow(self._body, _SCHEMA, **given).collect()
        except BaseException as error:  # whatever it is belongs to the thread that waits for the query
            self._error = error
        finally:
            self._ended.set()


def rows(kind: str, data: bytes) -> Iterator[Any]:
    """In a task: these bytes as rows for the client."""
    import pyarrow

    for number, begin in enumerate(range(0, max(len(data), 1), _CHUNK_BYTES)):
        chunk = data[begin : begin + _CHUNK_BYTES]
        yield pyarrow.RecordBatch.from_pydict(
            {
                "kind": [kind],
                "number": pyarrow.array([number], pyarrow.int64()),
                "chunk": pyarrow.array([chunk], pyarrow.binary()),
            }
        )


def _joined(found: list[Any]) -> dict[str, bytes]:
    parts: dict[str, list[tuple[int, bytes]]] = {}
    for row in found:
        parts.setdefault(str(row[0]), []).append((int(row[1]), bytes(row[2])))
    return {kind: b"".join(chunk for _, chunk in sorted(chunks)) for kind, chunks in parts.items()}


def server_host(session: Any) -> str:
    """The host of the Connect server, as the client knows it."""
    return str(session.client.host).strip("[]")
