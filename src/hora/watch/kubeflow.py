"""Progress reports for Kubeflow: a job inside a TrainJob posts its progress to the trainer's controller.

The controller's variables define the request; `live` drives the reports. The token is read from its file every time,
because it is rotated. It is sent only to the named server, over TLS verified against the controller's authority,
without following redirects. A failed report is dropped.
"""

from __future__ import annotations

import http.client
import json
import logging
import ssl
import threading
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hora.watch.model import Run

_EVERY_S = 5.0  # the controller's limit
_AGAIN_S = 60.0  # after a failure
_LIMIT_S = 5.0
_MAX_METRICS = 256

_log = logging.getLogger("hora.watch")


@dataclass(frozen=True, kw_only=True)
class Controller:
    """Address of the reports, and the files that authenticate both ends."""

    host: str
    port: int
    path: str
    token_file: str
    authority_file: str | None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Controller | None:
        """Return the controller named by the variables; None outside a TrainJob, or if it wants no reports."""
        url, token_file = environ.get("KUBEFLOW_TRAINER_SERVER_URL"), environ.get("KUBEFLOW_TRAINER_SERVER_TOKEN")
        if not url or not token_file:
            return None
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "https" or not parts.hostname:
            _log.warning("no progress for Kubeflow: its address must begin with https://, but it is %s", url)
            return None
        path = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        authority = environ.get("KUBEFLOW_TRAINER_SERVER_CA_CERT") or None
        return cls(
            host=parts.hostname, port=parts.port or 443, path=path, token_file=token_file, authority_file=authority
        )

    def post(self, message: Mapping[str, Any]) -> None:
        """Send a message; raises OSError or HTTPException if it was not accepted."""
        context = ssl.create_default_context(cafile=self.authority_file)
        connection = http.client.HTTPSConnection(self.host, self.port, timeout=_LIMIT_S, context=context)
        token = Path(self.token_file).read_text(encoding="ascii").strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        try:
            connection.request("POST", self.path, json.dumps(message), headers)
            answer = connection.getresponse()
            if not 200 <= answer.status < 300:
                raise OSError(f"it responded {answer.status} {answer.reason}")
        finally:
            connection.close()


def status(run: Run) -> dict[str, Any]:
    """Return Kubeflow's trainer status; it includes progress if the number of steps is known."""
    metrics = run.latest_metrics()
    step, total = run.progress()
    part = step / total if total else None
    if run.outcome == "done":
        part = 1.0
    left_s = run.time_left_s()
    found: dict[str, Any] = {
        "lastUpdatedTime": datetime.fromtimestamp(run.now or time.time(), timezone.utc).isoformat()
    }
    if part is not None:
        found["progressPercentage"] = int(100 * min(max(part, 0.0), 1.0))
    if left_s is not None:
        found["estimatedRemainingSeconds"] = int(left_s)
    if step:
        metrics = {"step": float(step), **metrics}
    if metrics:
        shown = list(metrics.items())[:_MAX_METRICS]
        found["metrics"] = [{"name": name, "value": f"{value:g}"} for name, value in shown]
    return found


class Reports:
    """Sends the run's status periodically, one at a time, and once more at the end."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._next_at = 0.0
        self._failed = False
        self._thread: threading.Thread | None = None

    def tick(self, run: Run) -> None:
        """Send a report if one is due; called every second."""
        busy = self._thread is not None and self._thread.is_alive()
        if run.places and not busy and time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + _EVERY_S
            self._thread = threading.Thread(target=self._send, args=(status(run),), name="hora-kubeflow", daemon=True)
            self._thread.start()

    def close(self, run: Run) -> None:
        """Send the last report. Takes a few seconds at most."""
        if self._thread is not None:
            self._thread.join(_LIMIT_S)
        if not self._failed:
            self._send(status(run))

    def _send(self, found: Mapping[str, Any]) -> None:
        try:
            self._controller.post({"trainerStatus": found})
            self._failed = False
        except (OSError, ValueError, http.client.HTTPException) as error:
            if not self._failed:
                where = f"{self._controller.host}:{self._controller.port}"
                _log.warning(
                    "Kubeflow's controller at %s refused the progress (%s); retrying in %g s",
                    where,
                    error,
                    _AGAIN_S,
                )
            self._failed = True
            self._next_at = time.monotonic() + _AGAIN_S
