"""What a session needs of the place where its workers run: this machine (`local_backend`) or Spark (`spark_backend`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hora.workers.record import Record

__all__ = ["GRACE_S", "ORDER_VARIABLE", "Backend", "PlannedWorker", "order_file"]

ORDER_VARIABLE = "HORA_WORKER_ORDER_FILE"  # names the file in which a worker's process finds what to do
GRACE_S = 5.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True, kw_only=True)
class PlannedWorker:
    """A worker to start: its number in launch events, its record, the request, and variables for its environment."""

    number: int
    record: Record
    request: Mapping[str, Any]
    variables: Mapping[str, str]


class Backend(Protocol):
    """How a worker ended comes through `LaunchEvents`; the session then calls `release` and `clear_up`."""

    def settle(self, n: int) -> None:
        """Wait until it is known whether `n` more workers fit. The session's lock is not held."""

    def reserve(self, worker: str, request: Mapping[str, Any]) -> None:
        """Set something aside for this worker; raises Refused."""

    def start(self, planned: Sequence[PlannedWorker]) -> None:
        """Start workers that have a reservation. Does not wait."""

    def terminate(self, numbers: Iterable[int], *, grace_s: float) -> None:
        """End those of these workers that run here: SIGTERM, SIGKILL after the grace time. Does not wait."""

    def release(self, worker: str) -> None:
        """What was set aside is free again."""

    def clear_up(self, number: int) -> None:
        """End what a worker that has ended has left behind. Does not wait."""

    def close(self) -> None:
        """End everything."""


def order_file(request: Mapping[str, Any], *, cores: Sequence[int], source: str | None = None) -> dict[str, bytes]:
    """The private file in which the worker's process (`main`) finds what to do, by its variable.

    `source`: the script's text, where the file itself is not.
    """
    order = {
        "code": request.get("code") or "",
        "script": request.get("script") or "",
        "source": source,
        "cores": list(cores),
        "memory_gib": request["memory"],
    }
    return {ORDER_VARIABLE: json.dumps(order).encode()}
