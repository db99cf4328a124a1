"""The timeline: per-tensor events as a Chrome trace that rank 0 writes.

Open the file in `chrome://tracing` or Perfetto. It is a JSON array that is valid at any time: each write replaces the
closing bracket. Each "process" of the trace is a tensor. The engine's `Recorder` calls this module, which is
independent of requests.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hora.files import new_file

_END = b"\n]\n"
_CLOSE_LIMIT_S = 1.0

_log = logging.getLogger("hora.events")


class Timeline:
    """One trace file. Thread-safe. A full disk ends the trace, not the training."""

    def __init__(self, path: str, *, mark_cycles: bool = False) -> None:
        self.path = path
        self.mark_cycles = mark_cycles
        self._lock = threading.Lock()
        self._pids: dict[str, int] = {}
        self._negotiating: set[str] = set()
        self._started = time.perf_counter()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = os.fdopen(new_file(path, mode=0o666), "wb", buffering=0)
        self._body_end = 0
        epoch = int(time.time() * 1e6)
        with self._writing() as events:
            self._describe(0, {"start_time_since_epoch_in_micros": epoch}, events)

    def arrived(self, names: Iterable[str], operation: str, member: int) -> None:
        """Record that a rank has announced these tensors."""
        with self._writing() as events:
            for name in names:
                pid = self._pid(name, events)
                if name not in self._negotiating:
                    self._negotiating.add(name)
                    events.append(self._event("B", pid, f"NEGOTIATE_{operation}"))
                events.append(self._event("X", pid, str(member)) | {"dur": 0})

    @contextlib.contextmanager
    def running(self, names: Sequence[str], what: Sequence[str], facts: Sequence[dict[str, str]]) -> Iterator[None]:
        """Record that every rank has announced these tensors, and activities in the body, each inside the one before.

        `facts` (dtype, shape) of each tensor belong to the outermost activity's end.
        """
        with self._writing() as events:
            for name in names:
                pid = self._pid(name, events)
                if name in self._negotiating:
                    self._negotiating.discard(name)
                    events.append(self._event("E", pid))
                events += [self._event("B", pid, one) for one in what]
        yield
        with self._writing() as events:
            for name, of_tensor in zip(names, facts, strict=True):
                ends = [self._event("E", self._pid(name, events)) for _ in what]
                if ends:
                    ends[-1]["args"] = of_tensor
                events += ends

    def cycle(self) -> None:
        """Record the start of a negotiation round (only with `mark_cycles`)."""
        if self.mark_cycles:
            with self._writing() as events:
                events.append({"ph": "i", "name": "CYCLE_START", "ts": self._now(), "s": "g"})

    def close(self) -> None:
        if not self._lock.acquire(timeout=_CLOSE_LIMIT_S):
            return  # a signal interrupted this thread while writing; the file is valid already
        try:
            self._file.close()
        finally:
            self._lock.release()

    def _now(self) -> int:
        return int((time.perf_counter() - self._started) * 1e6)

    def _event(self, phase: str, pid: int, name: str | None = None) -> dict[str, Any]:
        event: dict[str, Any] = {"ph": phase, "ts": self._now(), "pid": pid}
        if name is not None:
            event["name"] = name
        return event

    def _pid(self, name: str, events: list[dict[str, Any]]) -> int:
        pid = self._pids.get(name)
        if pid is None:
            pid = self._pids[name] = len(self._pids) + 1
            self._describe(pid, {"name": name}, events)
        return pid

    def _describe(self, pid: int, facts: dict[str, Any], events: list[dict[str, Any]]) -> None:
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": facts})
        events.append({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}})

    @contextlib.contextmanager
    def _writing(self) -> Iterator[list[dict[str, Any]]]:
        """Collect events and write them."""
        with self._lock:
            events: list[dict[str, Any]] = []
            yield events
            self._write(events)

    def _write(self, events: list[dict[str, Any]]) -> None:
        if not events or self._file.closed:
            return
        body = (b",\n" if self._body_end else b"[\n") + ",\n".join(map(json.dumps, events)).encode()
        try:
            self._put(body + _END)
            self._body_end += len(body)
        except OSError as error:
            _log.error(
                "cannot write the timeline %s: %s. It ends here; the training continues", self.path, error.strerror
            )
            self._cut()

    def _put(self, data: bytes) -> None:
        """Write from the end of the body on."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._file.fileno(), data[done:], self._body_end + done)

    def _cut(self) -> None:
        """Leave a valid file: the closing bracket overwrites the old one, which needs no space."""
        with self._file, contextlib.suppress(OSError):
            if self._body_end:
                self._put(_END)
                self._file.truncate(self._body_end + len(_END))
