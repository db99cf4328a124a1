"""The MLflow run of a job, as its launcher sees it: the ranks' access to it, the job's parameters, the verdict.

The ranks' numbers do not pass through here: rank 0 sends them to the server itself (`hora.telemetry.report`). A server
that does not answer never ends or delays a job for longer than the limits below.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Any

from hora.telemetry.destinations import Wanted, active_mlflow_run, experiment_id, mlflow_client, parse
from hora.version import version

_BEGIN_S = _END_S = 60.0  # a server that cannot be reached is noticed sooner
_GIT_S = 5.0
# What MLflow and Databricks read about the server and the user's access to it. They reach the ranks over the
# authenticated connections of their agents, in the order that starts them.
_ACCESS = ("MLFLOW_", "DATABRICKS_HOST", "DATABRICKS_TOKEN", "DATABRICKS_CLIENT_", "WANDB_")
_STATUS = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}

_log = logging.getLogger("hora.watch")


class Tracking:
    """A job's run. `run_id`: the run that is active in the launcher; empty: one is created, and ended with the job."""

    def __init__(self, run_id: str, wanted: str, experiment: str, environ: Mapping[str, str]) -> None:
        self.run_id, self._owns = run_id, not run_id
        self._wanted, self._experiment, self._environ = wanted, experiment, environ
        self._client: Any = None
        self._beginning: threading.Thread | None = None

    @classmethod
    def wanted(cls, environ: Mapping[str, str]) -> Tracking | None:
        """Return the tracking that HORA_REPORT or an active MLflow run asks for. ValueError: HORA_REPORT is invalid."""
        text = environ.get("HORA_REPORT", "")
        to = parse(text, "HORA_REPORT")
        given = environ.get("MLFLOW_RUN_ID") or active_mlflow_run()
        if not text and given:
            text, to = "mlflow", (Wanted("mlflow"),)
        one = next((one for one in to if one.kind == "mlflow"), None)
        return None if one is None else cls(given, text, one.where, environ)

    def variables(self) -> dict[str, str]:
        """Return the ranks' variables: where to report, and what the tracking server asks of them."""
        found = {name: value for name, value in self._environ.items() if name.startswith(_ACCESS)}
        found["HORA_REPORT"] = self._wanted
        with contextlib.suppress(ImportError):
            import mlflow

            uri = str(mlflow.get_tracking_uri())
            found["MLFLOW_TRACKING_URI"] = uri
            if uri.startswith("databricks"):
                found |= self._databricks_access(uri) | {"MLFLOW_TRACKING_URI": "databricks"}
        if self.run_id:
            found["MLFLOW_RUN_ID"] = self.run_id
        return found

    def begin(self, title: str, parameters: Mapping[str, object]) -> None:
        """Create the run if there is none, and log the job's parameters."""
        if self._owns:
            self._limited(lambda: self._create(title), _BEGIN_S, "began without a run of its own")
        self._beginning = threading.Thread(
            target=self._tell, args=(lambda: self._describe(parameters),), name="hora-tracking", daemon=True
        )
        self._beginning.start()

    def end(self, outcome: str, text: str, verdict: str) -> None:
        """Add the verdict, as text and JSON, and end the run if it was created here."""
        if self._beginning is not None:
            self._beginning.join(_END_S)
        if self._client is not None:
            self._limited(lambda: self._conclude(outcome, text, verdict), _END_S, "has no verdict there")

    def _databricks_access(self, uri: str) -> dict[str, str]:
        """Return host and token of the workspace, unless the ranks have them from the environment anyway."""
        if uri == "databricks" and {"DATABRICKS_HOST", "DATABRICKS_TOKEN"} <= self._environ.keys():
            return {}
        if "DATABRICKS_RUNTIME_VERSION" in self._environ:  # a notebook: its context belongs to this thread
            return _databricks_access(uri)
        found: dict[str, str] = {}  # the SDK calls a workspace that is away for five minutes
        self._limited(lambda: found.update(_databricks_access(uri)), _BEGIN_S, "has no access to the workspace")
        return {**found}

    def _create(self, title: str) -> None:
        client = mlflow_client()
        self.run_id = client.create_run(experiment_id(client, self._experiment), run_name=title).info.run_id
        self._client = client

    def _describe(self, parameters: Mapping[str, object]) -> None:
        from mlflow.entities import Param, RunTag

        client = self._client or mlflow_client()
        if not self.run_id:
            return
        known = client.get_run(self.run_id).data
        values = {"hora.version": version(), "hora.python": platform.python_version(), **parameters}
        # Parameters cannot change: those of the first job of a run stay.
        new = [Param(name, str(value)[:500]) for name, value in values.items() if name not in known.params]
        commit = _git_commit() if "mlflow.source.git.commit" not in known.tags else ""
        tags = [RunTag("mlflow.source.git.commit", commit)] if commit else []
        if new or tags:
            client.log_batch(self.run_id, params=new, tags=tags)
        self._client = client

    def _conclude(self, outcome: str, text: str, verdict: str) -> None:
        self._client.log_text(self.run_id, verdict, "verdict.json")
        self._client.log_text(self.run_id, text + "\n", "verdict.txt")
        if self._owns:
            self._client.set_terminated(self.run_id, _STATUS.get(outcome, "FAILED"))

    def _limited(self, act: Callable[[], None], limit_s: float, without: str) -> None:
        thread = threading.Thread(target=self._tell, args=(act,), name="hora-tracking", daemon=True)
        thread.start()
        thread.join(limit_s)
        if thread.is_alive():
            _log.warning("mlflow: no answer within %g s; the job %s", limit_s, without)

    def _tell(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # of MLflow, whatever it is: the job goes on
            text = (str(error).strip() or repr(error)).splitlines()[0]
            _log.warning("mlflow: parameters and verdict of this job do not arrive, and it goes on: %s", text)


def _databricks_access(uri: str) -> dict[str, str]:
    """Return host and token of the workspace, which a notebook has and a rank has not."""
    try:
        from mlflow.utils.databricks_utils import get_databricks_host_creds

        found = get_databricks_host_creds(uri)
        token = found.token
        if not token and getattr(found, "use_databricks_sdk", False):
            from databricks.sdk import WorkspaceClient

            profile = getattr(found, "databricks_auth_profile", None)
            config = WorkspaceClient(**({"profile": profile} if profile else {})).config
            token = config.authenticate().get("Authorization", "").removeprefix("Bearer ")
    except Exception as error:  # no workspace, no access to it
        _log.warning("mlflow: the ranks cannot be given access to %s: %s", uri, error)
        return {}
    return {"DATABRICKS_HOST": str(found.host), "DATABRICKS_TOKEN": str(token)} if token else {}


def _git_commit() -> str:
    """Return the commit of the directory that this process is in; empty if it is not in a repository."""
    command = ["git", "-C", os.curdir, "rev-parse", "HEAD"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""
