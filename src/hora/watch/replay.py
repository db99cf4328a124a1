"""`hora view`: shows a recorded run or a timeline in the page of a live one, without its controls."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hora.logs import printable
from hora.watch.address import Page, open_page
from hora.watch.model import Run
from hora.watch.recording import read_run
from hora.watch.server import PageServer


def open_recording(path: str | Path, *, listen: str = "") -> tuple[PageServer, Page]:
    """Serve a recording or a timeline. Raises ValueError if the file is neither."""
    timeline = read_timeline(path) if is_timeline(path) else None
    run = read_run(path) if timeline is None else Run({"title": Path(path).name, "began": timeline["began"]})
    title = str(run.facts.get("title", "") or Path(path).name)
    sock, access, page = open_page(listen, printable(title[:200]))
    server = PageServer(run, access, timeline=timeline)
    server.start([sock])
    return server, page


MAX_BYTES = 512 * 2**20
_MAX_SPANS = 60_000
_MAX_TENSORS = 2_000
_NEGOTIATE = "NEGOTIATE_"
_LAST_US = 1e17  # microseconds


def is_timeline(path: str | Path) -> bool:
    """Return whether the file starts like a timeline; a recording does not."""
    with Path(path).open("rb") as file:
        return file.read(64).lstrip()[:1] in (b"[", b"{")


def read_timeline(path: str | Path) -> dict[str, Any]:
    """Read `tensors`: name and spans [begin, end, name index, depth] in microseconds.

    `late`: by rank, how often it came last and the total time that the first ranks had waited. Raises ValueError if the
    file is not a timeline.
    """
    with Path(path).open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path} is longer than {MAX_BYTES >> 20} MB; Perfetto (ui.perfetto.dev) can show it")
    reading = _Reading()
    try:
        for event in _events(data):
            reading.add(event)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is neither a recorded run nor a timeline: {error}") from None
    if not reading.spans:
        raise ValueError(f"{path} is neither a recorded run nor a timeline with tensors in it")
    return reading.found()


def _events(data: bytes) -> Iterable[Mapping[str, Any]]:
    """Return the events of a file that may be truncated: Horovod's has no end if the job was killed."""
    text = data.decode(errors="replace").strip()
    try:
        events = json.loads(text)
    except json.JSONDecodeError:
        whole_lines = text.rstrip(",").rpartition("\n")[0].rstrip().rstrip(",")
        try:
            events = json.loads(text.rstrip(",") + "]")
        except json.JSONDecodeError:
            events = json.loads(whole_lines + "]")
    return events["traceEvents"] if isinstance(events, dict) else events


class _Reading:
    """Processes the events in order."""

    def __init__(self) -> None:
        self.spans: dict[int, list[tuple[float, float, int, int]]] = defaultdict(list)
        self._names: dict[int, str] = {}
        self._kinds: dict[str, int] = {}
        self._open: dict[int, list[tuple[str, float]]] = defaultdict(list)
        self._arrivals: dict[int, dict[int, float]] = defaultdict(dict)
        self._last: dict[int, list[float]] = defaultdict(list)  # by rank: how long the first rank had waited
        self._num_spans = self._num_left_out = 0
        self._began_us = 0.0

    def add(self, event: Mapping[str, Any]) -> None:
        phase, pid = event["ph"], int(event.get("pid", 0))
        if phase == "M":
            arguments = event.get("args", {})
            if event.get("name") == "process_name" and "name" in arguments:
                self._names[pid] = str(arguments["name"])[:300]
            self._began_us = _number(arguments.get("start_time_since_epoch_in_micros", self._began_us))
        elif phase == "B":
            self._open[pid].append((str(event["name"])[:100], _number(event["ts"])))
        elif phase == "X" and str(event.get("name", "")).isdecimal():
            self._arrivals[pid].setdefault(int(event["name"]), _number(event["ts"]))
        elif phase == "E" and self._open[pid]:
            self._end(pid, _number(event["ts"]))

    def _end(self, pid: int, at: float) -> None:
        name, began = self._open[pid].pop()
        if name.startswith(_NEGOTIATE):
            arrivals = self._arrivals.pop(pid, {})
            if len(arrivals) > 1:
                last = max(arrivals, key=lambda rank: arrivals[rank])
                self._last[last].append(arrivals[last] - min(arrivals.values()))
        if self._num_spans >= _MAX_SPANS or (pid not in self.spans and len(self.spans) >= _MAX_TENSORS):
            self._num_left_out += 1
            return
        self._num_spans += 1
        kind = self._kinds.setdefault(name, len(self._kinds))
        self.spans[pid].append((began, at, kind, len(self._open[pid])))

    def found(self) -> dict[str, Any]:
        return {
            "began": self._began_us / 1e6,
            "kinds": list(self._kinds),
            "tensors": [[self._names.get(pid, f"tensor {pid}"), sorted(spans)] for pid, spans in self.spans.items()],
            "late": [[rank, len(waits), round(sum(waits))] for rank, waits in sorted(self._last.items())],
            "num_left_out": self._num_left_out,
        }


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or abs(number) > _LAST_US:
        raise ValueError(f"{number:g} is not a valid time")
    return number
