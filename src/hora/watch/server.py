"""HTTP server of the page: one thread with an event loop, a run, and a bounded number of viewers.

Any thread may add entries (`feed`); the server's thread processes them, so the run needs no lock. Once a second,
changes are encoded once for all viewers. A viewer that does not keep up is dropped; its page reconnects and starts with
the full state. Connections without the token have the limits of every server (`hora.net`) and get no data of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hora.net import sockets
from hora.net.acceptor import TaskServer
from hora.watch import view
from hora.watch.http import (
    MAX_HEAD_BYTES,
    Access,
    Answer,
    BadRequest,
    HttpRequest,
    encoded,
    finish,
    read_request,
    site_files,
    write,
)
from hora.watch.model import Entry, Run

MAX_VIEWERS = 32
_TICK_S = 1.0
_HEARTBEAT_S = 15.0
_LINGER_S = 1.0
_MAX_BACKLOG = 16  # messages a viewer may be behind
_MAX_WAITING_ENTRIES = 50_000

# Actions of the page on a job, with the request's arguments.
_ACTIONS: Mapping[str, Callable[[Any, Mapping[str, Any]], None]] = {
    "stacks": lambda job, given: job.stacks(),
    "profile": lambda job, given: job.profile(int(given["rank"]), min(max(float(given["seconds"]), 0.1), 60.0)),
    "stop": lambda job, given: job.stop(commit=bool(given.get("commit", False))),
    "remove": lambda job, given: job.remove(int(given["rank"])),
}

_log = logging.getLogger("hora.watch")


class PageServer:
    """Serves a run or a `timeline`. `dashboard`: the job's, whose methods must not block; None for a recorded run."""

    def __init__(
        self, run: Run, access: Access, *, dashboard: Any = None, timeline: Mapping[str, Any] | None = None
    ) -> None:
        self.run, self._access, self._dashboard, self._timeline = run, access, dashboard, timeline
        self._waiting: deque[Entry] = deque(maxlen=_MAX_WAITING_ENTRIES)
        self._viewers: dict[asyncio.Queue[bytes | None], None] = {}
        self._has_complained = False
        self._sent = _Sent()
        self._new_stacks = False
        self._tasks = TaskServer(self._connected, name="hora-dashboard")
        self._files = site_files()

    # ---- from other threads -------------------------------------------------------------------------------

    def start(self, sockets: Iterable[socket.socket]) -> None:
        loop = self._tasks.loop
        loop.set_exception_handler(lambda _, context: self._complain(context.get("exception")))
        loop.call_later(_TICK_S, self._tick_again)
        self._tasks.start(sockets)

    def feed(self, entry: Entry) -> None:
        """Add an entry. Never blocks."""
        self._waiting.append(entry)
        if entry.kind in ("end", "stack", "profile", "world"):  # the rest is processed once a second
            self._tasks.call(self._apply_waiting)

    def close(self) -> None:
        """Send the last state to the viewers, then stop."""

        async def finish() -> None:
            self._tick()
            for viewer in list(self._viewers):
                _put(viewer, None)
            limit = time.monotonic() + _LINGER_S
            while self._tasks.connections and time.monotonic() < limit:
                await asyncio.sleep(0.02)
            self._tasks.loop.stop()

        if self._tasks.thread.is_alive():
            with contextlib.suppress(RuntimeError):
                asyncio.run_coroutine_threadsafe(finish(), self._tasks.loop)
            self._tasks.thread.join(_LINGER_S + 5.0)

    def join(self) -> None:
        """Wait until the server ends: `hora view` runs until it is interrupted."""
        while self._tasks.thread.is_alive():
            self._tasks.thread.join(0.5)

    # ---- the loop -----------------------------------------------------------------------------------------

    def _tick_again(self) -> None:
        self._tasks.loop.call_later(_TICK_S, self._tick_again)
        try:
            self._tick()
        except Exception:  # a stale page is better than none
            _log.exception("the live page could not be updated")

    def _apply_waiting(self) -> None:
        while self._waiting:
            entry = self._waiting.popleft()
            try:
                self.run.apply(entry)
            except ValueError as error:
                _log.warning("the live page ignores an invalid entry: %s", error)
                continue
            self._new_stacks = self._new_stacks or entry.kind in ("stack", "profile")
            if self._dashboard is not None:
                self._dashboard.record(entry)

    def _tick(self) -> None:
        self._apply_waiting()
        if self._dashboard is not None:
            if self.run.outcome is None:
                self.run.look(time.time())
            self._dashboard.look(self.run)
        if not self._viewers:
            return
        news = self._sent.news(self.run)
        if self._new_stacks:
            self._new_stacks = False
            news["stacks"] = view.stacks(self.run)
        if news:
            data = _line(news)
            for viewer in list(self._viewers):
                if not _put(viewer, data):
                    del self._viewers[viewer]  # too slow: its connection ends, and the page reconnects

    # ---- connections --------------------------------------------------------------------------------------

    async def _connected(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock, limit=MAX_HEAD_BYTES)
        try:
            try:
                request = await read_request(reader)
                answer = None if request is None else await self._answer(sock, request, reader, writer)
            except BadRequest as error:
                answer = Answer.error(400, error)
            if answer is not None:
                await write(writer, encoded(answer, self._access.headers()))
            await finish(writer)
        except (OSError, TimeoutError, asyncio.TimeoutError, asyncio.CancelledError):
            pass  # it closed, was too slow, or was ended
        except Exception as error:
            self._complain(error)
        finally:
            writer.transport.abort()  # drop unsent data

    def _complain(self, error: object) -> None:
        """Log an unexpected error once, in full: a client that can cause one must not fill the job's log."""
        if not self._has_complained and isinstance(error, Exception):
            self._has_complained = True
            _log.error("the live page failed to answer a request (logged once)", exc_info=error)

    async def _answer(
        self, sock: socket.socket, request: HttpRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Answer | None:
        """Return the answer to a request; None if it was a stream, which has ended."""
        refusal = self._access.check_place(request.headers)
        if refusal is None and request.path in self._files and request.method in ("GET", "HEAD"):
            return self._files[request.path]
        if refusal is None and request.path.startswith("/open/") and request.method == "GET":
            return self._access.opened(request.path, sockets.user_at(sock))
        refusal = refusal or self._access.check_token(request.headers)
        if refusal is not None:
            return refusal
        self._tasks.identified(sock)
        if request.path == "/api/stream" and request.method == "GET":
            return await self._stream(reader, writer)
        return self._respond(request)

    def _respond(self, request: HttpRequest) -> Answer:
        self._apply_waiting()
        if request.method == "GET":
            if request.path == "/api/run":
                return _json(self._everything())
            if request.path == "/metrics":
                return Answer(view.metrics(self.run).encode(errors="replace"), view.METRICS_TYPE)
            if request.path == "/api/timeline" and self._timeline is not None:
                return _json(self._timeline)
            if request.path == "/api/bundle" and self._dashboard is not None:
                return Answer(self._dashboard.bundle(), "application/zip")
        elif request.method == "POST" and request.path.startswith("/api/"):
            return self._act(request.path.removeprefix("/api/"), request.body)
        return Answer.error(404, "not found")

    def _act(self, action: str, body: bytes) -> Answer:
        if self._dashboard is None or self.run.outcome is not None:
            return Answer.error(409, "the job is over: no action is possible")
        if action not in _ACTIONS:
            return Answer.error(404, "there is no such action")
        try:
            _ACTIONS[action](self._dashboard, json.loads(body or b"{}", parse_constant=_refuse))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            return Answer.error(400, f"this cannot be done: {error}")
        return _json({"done": action})

    def _everything(self) -> dict[str, Any]:
        live = self._dashboard is not None
        may = [*_ACTIONS, "bundle"] if live else []
        return {**view.everything(self.run), "may": may, "live": live, "timeline": self._timeline is not None}

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Answer | None:
        if len(self._viewers) >= MAX_VIEWERS:
            return Answer.error(503, f"{MAX_VIEWERS} pages already show this job: close one of them")
        self._tick()  # so that the next update starts where this snapshot ends
        viewer: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_BACKLOG)
        self._sent.news(self.run)  # the new page gets all of it in the snapshot
        first = Answer(_line({"everything": self._everything()}), "application/x-ndjson")
        self._viewers[viewer] = None
        try:
            await write(writer, encoded(first, self._access.headers(), endless=True))
            await self._pass_on(viewer, reader, writer)
        finally:
            self._viewers.pop(viewer, None)
        return None

    async def _pass_on(
        self, viewer: asyncio.Queue[bytes | None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        gone = asyncio.ensure_future(reader.read(1))  # ends when the viewer closes its page
        gone.add_done_callback(lambda _: _put(viewer, None))
        try:
            while viewer in self._viewers and not gone.done():
                try:
                    data = await asyncio.wait_for(viewer.get(), _HEARTBEAT_S)
                except (TimeoutError, asyncio.TimeoutError):
                    data = b"\n"
                if data is None:
                    return
                await write(writer, data)
        finally:
            gone.cancel()


class _Sent:
    """State that the viewers already have, to send only changes."""

    def __init__(self) -> None:
        self._head = ""
        self._bins = (-1, 0)  # epoch, number of bins
        self._names: tuple[Any, ...] = ()
        self._line = self._event = 0

    def news(self, run: Run) -> dict[str, Any]:
        news: dict[str, Any] = {}
        now = view.head(run)
        key = view.as_json({**now, "now": 0})
        if key != self._head:
            self._head, news["head"] = key, now
        grid = run.grid
        names = (grid.ranks, grid.metrics)
        same = self._bins[0] == grid.epoch and names == self._names
        first = max(self._bins[1] - 3, 0) if same else 0
        if grid.num_used > self._bins[1] or not same or "head" in news:
            news["columns"] = view.columns(run, first)
        self._bins, self._names = (grid.epoch, grid.num_used), names
        if run.num_lines > self._line:
            news["lines"] = view.later(run.lines, self._line)
        if run.num_events > self._event:
            news["events"] = view.later(run.events, self._event)
        self._line, self._event = run.num_lines, run.num_events
        return news


def _put(viewer: asyncio.Queue[bytes | None], data: bytes | None) -> bool:
    try:
        viewer.put_nowait(data)
        return True
    except asyncio.QueueFull:
        return False


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _line(value: Any) -> bytes:
    return view.as_json(value).encode() + b"\n"


def _json(value: Any) -> Answer:
    return Answer(_line(value), "application/json")
