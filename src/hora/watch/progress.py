"""One line that changes while a job runs: its ranks, its step, the reported figures, the time left.

Below a notebook's cell it is plain HTML, which Jupyter and Databricks show; in a terminal it is the last line, which
other lines displace. Elsewhere there is none.
"""

from __future__ import annotations

import contextlib
import html
import shutil
import sys
import threading
from collections.abc import Iterator
from typing import Any

from hora.config import in_notebook
from hora.logs import printable
from hora.watch.model import Run

_MAX_METRICS = 6
_CLEARED = "\r\x1b[K"


def has_place() -> bool:
    """Return whether this process's output is a notebook or a terminal."""
    try:
        return in_notebook() or (sys.stderr is not None and sys.stderr.isatty())
    except ValueError:  # a closed stream
        return False


def describe(run: Run) -> str:
    """Return the line of a run, live or over."""
    step, total = run.progress()
    ranks = f"{len(run.places)} ranks" if len(run.places) != 1 else "1 rank"
    kind, state = run.state()
    parts = [ranks] if run.places else []
    if run.outcome is not None:
        parts.insert(0, f"{state} after {_duration(run.now - run.began)}")
    elif kind != "training":
        parts.insert(0, state)
    if step:
        parts.append(f"step {step:,} of {total:,}" if total else f"step {step:,}")
    step_s = run.usual_step_s()
    if step_s and run.outcome is None:
        parts.append(f"{1 / step_s:.3g} steps/s")
    metrics = list(run.latest_metrics().items())[:_MAX_METRICS]
    parts += [f"{name} {value:.4g}" for name, value in metrics]
    left_s = run.time_left_s()
    if left_s is not None:
        parts.append(f"{_duration(left_s)} left")
    return printable(", ".join(parts))


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


class ProgressLine:
    """The line of one job, at the place where the job was started. `url`: of its page; empty if it has none."""

    def __init__(self, title: str, url: str = "") -> None:
        self._title, self._url = title, url
        self._text = ""
        self._lock = threading.Lock()
        self._handle: Any = None
        if in_notebook():
            from IPython.display import HTML, display

            self._handle = display(HTML(self._html("starting")), display_id=True)

    def show(self, run: Run) -> None:
        """Show the run as it is now; skipped while somebody else writes to the terminal."""
        text = describe(run)
        if text == self._text or not self._lock.acquire(blocking=False):
            return
        try:
            self._write(text, last=run.outcome is not None)
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Make room for other lines, which the body writes."""
        if self._handle is not None:
            yield
            return
        with self._lock:
            if self._text:
                self._print(_CLEARED)
                self._text = ""
            yield

    def _write(self, text: str, *, last: bool) -> None:
        self._text = text
        if self._handle is not None:
            from IPython.display import HTML

            self._handle.update(HTML(self._html(text)))
            return
        room = shutil.get_terminal_size().columns - 1
        line = f"hora: {self._title}: {text}" if self._title else f"hora: {text}"
        if len(line) > room:
            line = line[: room - 1] + "…"
        self._print(_CLEARED + line + ("\n" if last else ""))
        if last:
            self._text = ""

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed terminal
            sys.stderr.write(text)
            sys.stderr.flush()

    def _html(self, text: str) -> str:
        # No styles beyond this: Databricks removes most of them.
        title = f"<b>{html.escape(printable(self._title))}</b>: " if self._title else ""
        link = (
            f' <a href="{html.escape(self._url)}" target="_blank" rel="noopener">see it live</a>' if self._url else ""
        )
        return f"<div>{title}{html.escape(text)}{link}</div>"
