"""Destinations of a training's numbers besides the live page: an MLflow run, TensorBoard's files, Weights & Biases.

A destination may block and may fail; `report` calls it from a thread of its own. Packages are imported when the first
number arrives.
"""

from __future__ import annotations

import re
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hora.spelling import did_you_mean

KINDS = ("mlflow", "tensorboard", "wandb")
_NOTHING = ("", "0", "none")
_REACHED_S = 5.0
_BATCH = 1000  # metrics in one request, MLflow's limit
_INVALID = re.compile(r"[^\w./: -]", re.ASCII)  # MLflow rejects a whole batch for one such name


class Wanted(NamedTuple):
    """A destination by its kind, and `where`: an experiment of MLflow, a folder, a project."""

    kind: str
    where: str = ""


class Point(NamedTuple):
    """Values that belong to one step, and the time at which they were reported."""

    step: int
    at: float
    values: Mapping[str, float]


class Destination(Protocol):
    """Receives points in order. Any exception means that they have not arrived."""

    def log(self, points: Sequence[Point]) -> None: ...

    def add_file(self, path: Path) -> None:
        """Keep a copy of a file or folder with the run."""

    def close(self, *, failed: bool = False) -> None:
        """Write what is left. `failed`: the training has ended with an error."""


def parse(text: str, source: str) -> tuple[Wanted, ...]:
    """Return the destinations in a list such as "mlflow,tensorboard:runs/x". ValueError: one is unknown."""
    found = []
    for word in (word.strip() for word in text.split(",")):
        kind, _, where = word.partition(":")
        if kind in _NOTHING:
            continue
        if kind not in KINDS:
            raise ValueError(
                f"{source} takes {', '.join(KINDS)} or none, each perhaps with :WHERE, but it is {text!r}"
                f"{did_you_mean(kind, KINDS)}"
            )
        found.append(Wanted(kind, where))
    return tuple(found)


def open_destination(wanted: Wanted, *, rank: int, run_id: str = "", nested: bool = False) -> Destination:
    """Return a destination for this rank's numbers.

    Args:
        wanted: Which one.
        rank: The rank of this process.
        run_id: The MLflow run of the job, if there is one.
        nested: In a place of its own for each rank.
    """
    if wanted.kind == "mlflow":
        return MLflow(run_id, experiment=wanted.where, run_name=f"rank {rank}" if nested else "", nested=nested)
    folder = f"{wanted.where}/rank.{rank}" if nested and wanted.where else wanted.where
    if wanted.kind == "tensorboard":
        return TensorBoard(folder or (f"runs/rank.{rank}" if nested else "runs"))
    return WeightsAndBiases(wanted.where, name=f"rank {rank}" if nested else "")


class TensorBoard:
    """Event files in a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._writer: Any = None

    def log(self, points: Sequence[Point]) -> None:
        if self._writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ValueError("TensorBoard's files need tensorboard: pip install tensorboard") from error
            self._writer = SummaryWriter(self._folder)
        for point in points:
            for name, value in point.values.items():
                # train_loss and valid_loss each form a chart group
                self._writer.add_scalar(name.replace("_", "/", 1), value, point.step, point.at)
        self._writer.flush()

    def add_file(self, path: Path) -> None:
        target = Path(self._folder) / path.name
        if path.is_dir():
            shutil.copytree(path, target, dirs_exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)

    def close(self, *, failed: bool = False) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MLflow:
    """A run of MLflow: the given one, or a new one, which `close` ends. `nested`: a new run within the given one."""

    def __init__(self, run_id: str = "", *, experiment: str = "", run_name: str = "", nested: bool = False) -> None:
        self._given, self._experiment, self._name, self._nested = run_id, experiment, run_name, nested
        self._client: Any = None
        self._run_id = ""

    @property
    def is_open(self) -> bool:
        return self._client is not None

    def log(self, points: Sequence[Point]) -> None:
        client = self._connected()
        from mlflow.entities import Metric

        metrics = [
            Metric(_INVALID.sub("_", name)[:250], value, int(point.at * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for first in range(0, len(metrics), _BATCH):
            client.log_batch(self._run_id, metrics=metrics[first : first + _BATCH])

    def add_file(self, path: Path) -> None:
        client = self._connected()
        if path.is_dir():
            client.log_artifacts(self._run_id, str(path), path.name)
        else:
            client.log_artifact(self._run_id, str(path))

    def close(self, *, failed: bool = False) -> None:
        if self._client is not None and self._run_id != self._given:
            self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")
        self._client = None

    def _connected(self) -> Any:
        if self._client is None:
            client = mlflow_client()
            self._run_id = self._given if self._given and not self._nested else self._new_run(client)
            self._client = client
        return self._client

    def _new_run(self, client: Any) -> str:
        if self._nested and self._given:
            experiment, tags = client.get_run(self._given).info.experiment_id, {"mlflow.parentRunId": self._given}
        else:
            experiment, tags = experiment_id(client, self._experiment), {}
        return str(client.create_run(experiment, tags=tags, run_name=self._name or None).info.run_id)


def mlflow_client() -> Any:
    """Return a client of the tracking server that MLflow's variables name. OSError: it does not answer."""
    try:
        import mlflow
    except ImportError as error:
        raise ValueError("reports to MLflow need its package: pip install mlflow-skinny (or mlflow)") from error
    uri = mlflow.get_tracking_uri()
    _reach(uri)
    return mlflow.MlflowClient(uri)


def _reach(uri: str) -> None:
    """Raise OSError if nothing listens there. MLflow itself would try for minutes before it says so."""
    import urllib.parse
    import urllib.request  # not above: every rank imports this module

    parts = urllib.parse.urlsplit(uri)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(parts.hostname):
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), timeout=_REACHED_S).close()
    except OSError as error:
        raise ConnectionError(f"the tracking server at {parts.hostname}:{port} cannot be reached: {error}") from None


def experiment_id(client: Any, name: str = "") -> str:
    """Return the id of this experiment, which is created if needed; without a name, the one that MLflow would use."""
    if name:
        found = client.get_experiment_by_name(name)
        return str(client.create_experiment(name) if found is None else found.experiment_id)
    from mlflow.tracking.fluent import _get_experiment_id  # MLFLOW_EXPERIMENT_NAME, a notebook's experiment, …

    return str(_get_experiment_id())


def active_mlflow_run() -> str:
    """Return the id of the MLflow run that is active in this thread; empty if there is none. Imports nothing."""
    mlflow = sys.modules.get("mlflow")
    active = getattr(mlflow, "active_run", None)  # absent while it is being imported
    run = active() if active is not None else None
    return "" if run is None else str(run.info.run_id)


class WeightsAndBiases:
    """The active run of `wandb`, or a new one of this project, which `close` ends."""

    def __init__(self, project: str = "", *, name: str = "") -> None:
        self._project, self._name = project, name
        self._run: Any = None
        self._is_own = False

    def log(self, points: Sequence[Point]) -> None:
        run = self._begun()
        for point in points:
            # As a value: wandb drops points whose `step=` is not the greatest, and epochs and steps count differently.
            run.log({**point.values, "step": point.step})

    def add_file(self, path: Path) -> None:
        run = self._begun()
        for file in path.rglob("*") if path.is_dir() else [path]:
            if file.is_file():
                run.save(str(file), base_path=str(path.parent), policy="now")

    def close(self, *, failed: bool = False) -> None:
        if self._is_own:
            self._run.finish(exit_code=int(failed))
        self._run, self._is_own = None, False

    def _begun(self) -> Any:
        if self._run is None:
            try:
                import wandb
            except ImportError as error:
                raise ValueError("reports to Weights & Biases need its package: pip install wandb") from error
            self._run = wandb.run
            if self._run is None:
                self._run = wandb.init(project=self._project or None, name=self._name or None)
                self._is_own = True
            self._run.define_metric("*", step_metric="step")
        return self._run
