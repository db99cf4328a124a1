"""Where a run's numbers go besides the screen.

TensorBoard and MLflow, when installed. `fit` calls them on rank 0 only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Logger", "MLflowLog", "TensorBoardLog"]


class Logger(Protocol):
    """Receives an epoch's record; `epoch` counts from 1."""

    def log(self, record: Mapping[str, float], epoch: int) -> None: ...

    def close(self) -> None: ...


class TensorBoardLog:
    """Event files in `folder`; opened at the first record, so only on the rank that logs."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = str(folder)
        self._writer: Any = None

    def log(self, record: Mapping[str, float], epoch: int) -> None:
        """One scalar per value."""
        if self._writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ValueError("TensorBoardLog needs tensorboard: pip install tensorboard") from error
            self._writer = SummaryWriter(self._folder)
        for name, value in record.items():
            # train_loss and valid_loss belong into one chart group each
            self._writer.add_scalar(name.replace("_", "/", 1), value, epoch)

    def close(self) -> None:
        """Flush the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MLflowLog:
    """Metrics of the active MLflow run, or of a new one, which `close` ends."""

    def __init__(self, *, experiment: str | None = None, run_name: str | None = None) -> None:
        self._experiment = experiment
        self._run_name = run_name
        self._mlflow: Any = None
        self._owns_run = False

    def log(self, record: Mapping[str, float], epoch: int) -> None:
        """All values as metrics of one step."""
        if self._mlflow is None:
            self._start()
        self._mlflow.log_metrics(dict(record), step=epoch)

    def close(self) -> None:
        """End the run if it was started here."""
        if self._owns_run:
            self._mlflow.end_run()
        self._mlflow, self._owns_run = None, False

    def _start(self) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise ValueError("MLflowLog needs mlflow: pip install mlflow") from error
        self._mlflow = mlflow
        if mlflow.active_run() is None:
            if self._experiment is not None:
                mlflow.set_experiment(self._experiment)
            mlflow.start_run(run_name=self._run_name)
            self._owns_run = True
