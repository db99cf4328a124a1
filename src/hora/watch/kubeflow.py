"""Progress reports for Kubeflow: a job inside a TrainJob posts its progress to the trainer's controller.

The controller's variables define the request; `live` drives the reports. The token is read from its file every time,
because it is rotated. It is sent only to the named server, over TLS verified against the controller's authority,
without following redirects. A failed report is dropped.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import ssl
import threading
import time
import urllib.parse
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hora.watch.model import Run

_EVERY_S = 5.0  # the controller's limit
_AGAIN_S = 60.0  # after a failure
_LIMIT_S = 5.0
_MAX_METRICS = 256

_log = logging.getLogger("hora.watch")


def status(run: Run) -> dict[str, Any]:
    """Return Kubeflow's trainer status; it includes progress if the number of steps is known."""
    step, total = run.progress()
    part = 1.0 if run.outcome == "done" else step / total if total else None
    left_s = run.time_left_s()
    metrics = ({"step": float(step)} if step else {}) | run.latest_metrics()
    updated = datetime.fromtimestamp(run.now or time.time(), timezone.utc)
    found: dict[str, Any] = {"lastUpdatedTime": updated.isoformat()}
    if part is not None:
        found["progressPercentage"] = int(100 * min(max(part, 0.0), 1.0))
    if left_s is not None:
        found["estimatedRemainingSeconds"] = int(left_s)
    if metrics:
        shown = list(metrics.items())[:_MAX_METRICS]
        found["metrics"] = [{"name": name, "value": f"{value:g}"} for name, value in shown]
    return found


class Reports:
    """Reports of a run's status to the controller: periodic ones, one at a time, and one at the end."""

    def __init__(self, url: urllib.parse.SplitResult, token_file: str, authority_file: str | None) -> None:
        self._url, self._token_file, self._authority_file = url, token_file, authority_file
        self._next_at = 0.0
        self._failed = False
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Reports | None:
        """Return the reports that the variables request; None outside a TrainJob, or if it requests none."""
        url, token_file = environ.get("KUBEFLOW_TRAINER_SERVER_URL"), environ.get("KUBEFLOW_TRAINER_SERVER_TOKEN")
        if not url or not token_file:
            return None
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "https" or not parts.hostname:
            _log.warning("no progress for Kubeflow: its address must begin with https://, but it is %s", url)
            return None
        return cls(parts, token_file, environ.get("KUBEFLOW_TRAINER_SERVER_CA_CERT") or None)

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

    def post(self, message: Mapping[str, Any]) -> None:
        """Send a message; raises OSError or HTTPException if it was not accepted."""
        url, context = self._url, ssl.create_default_context(cafile=self._authority_file)
        connection = http.client.HTTPSConnection(str(url.hostname), url.port or 443, timeout=_LIMIT_S, context=context)
        token = Path(self._token_file).read_text(encoding="ascii").strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        path = urllib.parse.urlunsplit(("", "", url.path or "/", url.query, ""))
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(message), headers)
            answer = connection.getresponse()
            if not 200 <= answer.status < 300:
                raise OSError(f"it responded {answer.status} {answer.reason}")

    def _send(self, found: Mapping[str, Any]) -> None:
        try:
            self.post({"trainerStatus": found})
            self._failed = False
        except (OSError, ValueError, http.client.HTTPException) as error:
            if not self._failed:
                where = f"{self._url.hostname}:{self._url.port or 443}"
                _log.warning(
                    "Kubeflow's controller at %s refused the progress (%s); retrying in %g s", where, error, _AGAIN_S
                )
            self._failed = True
            self._next_at = time.monotonic() + _AGAIN_S
