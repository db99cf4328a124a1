"""Progress display of a training, and loggers (TensorBoard, MLflow). Rank 0 only.

Uses tqdm if it is installed and the output is a terminal or a notebook, otherwise prints lines. `fit` drives it.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hora.config import in_notebook, reporting
from hora.telemetry.destinations import MLflow, Point, TensorBoard, active_mlflow_run

_LINE_EVERY_S = 0.5


def describe(record: Mapping[str, float]) -> str:
    """Format an epoch as one line, without its number."""
    parts = [f"{name} {value:.4f}" for name, value in record.items() if name.startswith(("train_", "valid_"))]
    return "  ".join([*parts, f"lr {record['lr']:.3g}", f"{record['seconds']:.2f} s"])


class Progress:
    """Shows a bar over all epochs in a terminal or notebook, printed lines elsewhere, and nothing unless `visible`.

    Epochs shorter than half a second share a line; the first and the last epoch always have one.
    """

    def __init__(self, epochs: int, num_steps: int, *, visible: bool) -> None:
        self._epochs = epochs
        self._num_steps = num_steps
        self._visible = visible
        self._bar: Any = None
        self._last_line_s = float("-inf")

    def start(self, epoch: int, step: int) -> None:
        """Start at this position: (0, 0), or later after a resume."""
        bar_class = _bar_class() if self._visible else None
        if bar_class is not None:
            done, total = epoch * self._num_steps + step, self._epochs * self._num_steps
            self._bar = bar_class(total=total, initial=done, unit="step", dynamic_ncols=True)
            self._bar.set_description(f"epoch {epoch + 1}/{self._epochs}")

    def step(self) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def finish_epoch(self, epoch: int, record: Mapping[str, float]) -> None:
        """Show the record of a finished epoch."""
        if self._bar is not None:
            self._bar.set_description(f"epoch {epoch + 1}/{self._epochs}", refresh=False)
            self._bar.set_postfix_str(describe(record))
        elif self._visible:
            now = time.monotonic()
            if now - self._last_line_s >= _LINE_EVERY_S or epoch + 1 == self._epochs:
                self._last_line_s = now
                print(f"epoch {epoch + 1:>3}/{self._epochs}  {describe(record)}", flush=True)

    def say(self, text: str) -> None:
        if self._visible:
            print(text, flush=True)

    def close(self) -> None:
        """Close the display, also after an exception within an epoch."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _bar_class() -> Any:
    if not (in_notebook() or sys.stderr.isatty()):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hide tqdm's advice to install widgets
            from tqdm.auto import tqdm
    except ImportError:
        return None
    return tqdm


class Logger(Protocol):
    """Receives an epoch's record; `epoch` counts from 1."""

    def log(self, record: Mapping[str, float], epoch: int) -> None: ...

    def close(self) -> None: ...


class _Log:
    """Epochs as points of a destination of `hora.report`."""

    _destination: TensorBoard | MLflow

    def log(self, record: Mapping[str, float], epoch: int) -> None:
        """Write one value per number of the record, at this epoch."""
        self._destination.log([Point(epoch, time.time(), record)])

    def close(self) -> None:
        """Write what is left; end an MLflow run that was started here."""
        self._destination.close()


class TensorBoardLog(_Log):
    """Event files in `folder`; opened at the first record, so only on the rank that logs."""

    def __init__(self, folder: str | Path) -> None:
        self._destination = TensorBoard(str(folder))


class MLflowLog(_Log):
    """Metrics of the active MLflow run, or of a new one, which `close` ends."""

    _destination: MLflow

    def __init__(self, *, experiment: str | None = None, run_name: str | None = None) -> None:
        self._experiment, self._run_name = experiment or "", run_name or ""
        self._destination = MLflow()

    def log(self, record: Mapping[str, float], epoch: int) -> None:
        """Log all values as metrics of one step."""
        if not self._destination.is_open:
            run_id = active_mlflow_run() or reporting().run_id
            self._destination = MLflow(run_id, experiment=self._experiment, run_name=self._run_name)
        super().log(record, epoch)
