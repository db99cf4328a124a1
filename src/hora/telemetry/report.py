"""`hora.report`: a training's own numbers, on their way to the live page and to MLflow, TensorBoard or W&B.

The training thread appends a tuple, and a thread delivers once a second. A server that is away costs one line, and no
exception of a destination reaches the training.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import SupportsFloat

from hora.config import reporting
from hora.platforms.detect import detect_world
from hora.telemetry.destinations import Destination, Point, Wanted, active_mlflow_run, open_destination, parse
from hora.telemetry.meters import meter, numbers_of

_EVERY_S = 1.0
_AGAIN_S = 10.0  # after a failure
_LAST_S = 60.0  # for the last delivery
_MAX_POINTS = 20_000

_log = logging.getLogger("hora")


class _Line:
    """One destination, and its place in the outbox: what it has not received yet."""

    def __init__(self, wanted: Wanted, destination: Destination) -> None:
        self.wanted, self._destination = wanted, destination
        self._points: deque[Point] = deque(maxlen=_MAX_POINTS)
        self._files: deque[Path] = deque(maxlen=100)
        self._again_at = 0.0
        self._failed = False

    def add(self, points: Iterable[Point], files: Iterable[Path]) -> None:
        self._points.extend(points)
        self._files.extend(files)

    def deliver(self, *, last: bool = False) -> None:
        if not (self._points or self._files) or (time.monotonic() < self._again_at and not last):
            return
        points = list(self._points)
        try:
            if points:
                self._destination.log(points)
            self._points.clear()
            while self._files:
                self._destination.add_file(self._files[0])
                self._files.popleft()
            self._failed = False
        except Exception as error:  # of other packages, whatever it is: the training goes on
            self._again_at = time.monotonic() + _AGAIN_S
            if not self._failed:
                text = (str(error).strip() or repr(error)).splitlines()[0]
                _log.warning("%s: nothing arrives there, and the training goes on: %s", self.wanted.kind, text)
            self._failed = True

    def close(self, *, failed: bool) -> None:
        self.deliver(last=True)
        if self.num_left:
            _log.warning("%s: %d reports were not delivered", self.wanted.kind, self.num_left)
            return
        try:
            self._destination.close(failed=failed)
        except Exception as error:
            _log.warning("%s: the run could not be ended: %s", self.wanted.kind, error)

    @property
    def num_left(self) -> int:
        return len(self._points) + len(self._files)


class Outbox:
    """The reports of this process. `add` is called by the training; everything else happens in a thread."""

    def __init__(self) -> None:
        self._wanted: tuple[Wanted, ...] | None = None  # None: not asked yet
        self._each_rank: bool | None = None
        self._run_id = ""
        self._points: deque[tuple[int, float, Mapping[str, SupportsFloat]]] = deque(maxlen=_MAX_POINTS)
        self._files: deque[Path] = deque(maxlen=100)
        self._lines: list[_Line] | None = None
        self._count = 0
        self._wake, self._ending = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._delivering = threading.Lock()

    def choose(self, to: str | Sequence[str] | None, each_rank: bool | None) -> None:
        """Set the destinations. Raises ValueError for an unknown one."""
        if to is not None:
            self._wanted = parse(to if isinstance(to, str) else ",".join(to), "hora.report(to=…)")
        if each_rank is not None:
            self._each_rank = each_rank

    def add(self, metrics: Mapping[str, SupportsFloat], step: int | None = None, files: Iterable[Path] = ()) -> None:
        """Take a report, if it has a destination besides the page."""
        if not self._is_wanted():
            return
        if metrics:
            self._count += 1
            step = step if step is not None else meter.num_steps or self._count
            # Another step's value may be written into the same tensor before the thread has read it.
            kept = {
                name: value.detach().clone() if hasattr(value, "detach") else value for name, value in metrics.items()
            }
            self._points.append((step, time.time(), kept))
        self._files.extend(files)
        if self._thread is None:
            import concurrent.futures.thread  # noqa: F401 - MLflow needs it, and it cannot be imported at exit

            self._thread = threading.Thread(target=self._run, name="hora-report", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def _is_wanted(self) -> bool:
        if self._wanted is None:
            settings = reporting()
            self._run_id = settings.run_id
            if settings.to is not None:
                self._wanted = parse(settings.to, "HORA_REPORT")
        if self._each_rank is None:
            self._each_rank = reporting().each_rank
        if not self._run_id:
            self._run_id = active_mlflow_run()
        if self._wanted is None and self._run_id:
            self._wanted = (Wanted("mlflow"),)
        return bool(self._wanted)

    def _run(self) -> None:
        while not self._ending.is_set():
            self._deliver()  # the first one at once: packages take seconds to import
            self._wake.wait(_EVERY_S)

    def _deliver(self) -> None:
        with self._delivering:
            points = [self._points.popleft() for _ in range(len(self._points))]
            files = [self._files.popleft() for _ in range(len(self._files))]
            rank = detect_world().rank  # of now: an elastic job gives ranks anew
            if rank > 0 and not self._each_rank:
                return
            if self._lines is None and (points or files):
                self._lines = list(self._open(max(rank, 0)))
            numbers = [Point(step, at, found) for step, at, values in points if (found := numbers_of(values))]
            for line in self._lines or ():
                line.add(numbers, files)
                line.deliver()

    def _open(self, rank: int) -> Iterable[_Line]:
        for wanted in self._wanted or ():
            if self._each_rank:
                yield _Line(wanted, open_destination(wanted, rank=rank, run_id=self._run_id, nested=True))
            # Rank 0 speaks for the job: also in its run, if there is one.
            if not self._each_rank or (rank == 0 and wanted.kind == "mlflow" and self._run_id):
                yield _Line(wanted, open_destination(wanted, rank=rank, run_id=self._run_id))

    def close(self, *, failed: bool | None = None) -> None:
        """Deliver what is left, for some seconds at most. Idempotent."""
        if self._thread is None or self._ending.is_set():
            return
        failed = hasattr(sys, "last_type") if failed is None else failed
        self._ending.set()
        self._wake.set()
        last = threading.Thread(target=self._finish, args=(failed,), name="hora-report-end", daemon=True)
        last.start()
        last.join(_LAST_S)
        if last.is_alive():
            _log.warning("the last reports were not delivered within %g s", _LAST_S)

    def _finish(self, failed: bool) -> None:
        self._deliver()
        for line in self._lines or ():
            line.close(failed=failed)


outbox = Outbox()
"""The outbox of this process."""


# Threads and connections belong to the parent.
os.register_at_fork(after_in_child=outbox.__init__)  # type: ignore[misc]


def report(
    *,
    total_steps: int | None = None,
    step: int | None = None,
    to: str | Sequence[str] | None = None,
    each_rank: bool | None = None,
    files: str | Path | Sequence[str | Path] = (),
    **metrics: SupportsFloat,
) -> None:
    """Report figures of your training: `hora.report(loss=loss, accuracy=0.9)`.

    Cheap, on any rank, at any time. The figures appear on the live page and in the verdict. They also go to the
    destinations of `to` or of the variable HORA_REPORT, from rank 0, and to the MLflow run that was active where the
    job was started. A destination that does not answer costs one line, and the training goes on.

    Args:
        total_steps: The number of optimizer steps of this training, passed once; the page then shows the time left.
        step: To which step the figures belong; by default the number of steps so far.
        to: "mlflow", "tensorboard", "wandb", several of them, or "none", from now on. After a colon, where: an
            experiment of MLflow, a folder, a project of Weights & Biases.
        each_rank: Whether each rank reports, in a run or folder of its own; by default HORA_REPORT_RANKS=all says so.
        files: A file or folder, or several, to keep with the run: a model, a picture.
        metrics: Numbers by name; tensors too.

    Raises:
        ValueError: `to` names an unknown destination.
        FileNotFoundError: One of the files does not exist.
    """
    if total_steps is not None:
        meter.total_steps = int(total_steps)
    if to is not None or each_rank is not None:
        outbox.choose(to, each_rank)
    paths = [Path(path).absolute() for path in ([files] if isinstance(files, (str, Path)) else files)]
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"hora.report(files=…): there is no {path}")
    meter.report(metrics)
    outbox.add(metrics, step, paths)


def finish(*, failed: bool) -> None:
    """Deliver the last reports of this process."""
    outbox.close(failed=failed)
