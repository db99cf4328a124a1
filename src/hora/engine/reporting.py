"""Reporting: this rank's telemetry goes to the launcher over the control connection, and the launcher's questions come.

One reporter per connection: it outlives the generations of an elastic world. `process` starts and ends it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
from collections.abc import Sequence
from typing import Any

from hora.config import EngineConfig
from hora.engine.lane import Item
from hora.engine.meeting import control_client, open_meeting
from hora.engine.request import Request, full_names
from hora.net.client import ControlClient
from hora.telemetry.data_loaders import meter_data_loaders
from hora.telemetry.meters import meter
from hora.telemetry.reporter import Reporter
from hora.world import World

__all__ = ["start_reporting"]

_reporters: dict[ControlClient, Reporter] = {}


def start_reporting(place: World, config: EngineConfig) -> None:
    """Answer the launcher's questions and, if it wants that (`HORA_TELEMETRY_S`), report to it again and again."""
    if place.meeting.kind != "hora":
        return
    if config.telemetry_s:
        open_meeting(place, limit_s=config.init_timeout_s)  # a world of one has not opened it
    client = control_client(place)
    if client is None or client in _reporters:
        return

    # Where no launcher has numbered the processes (Ray's actors), their ranks are their numbers.
    worker = place.worker if place.worker >= 0 else place.rank

    def send(kind: str, data: bytes) -> None:
        client.tell(kind, data, worker=worker)

    def late(ranks: Sequence[int]) -> None:
        with contextlib.suppress(ConnectionError):
            send("stall", json.dumps(list(ranks)).encode())

    reporter = Reporter(meter, send, describe=_describe, machine=place.local_rank == 0)
    _reporters[client] = reporter
    meter.on_stall = late
    client.on_notice(lambda notice: reporter.answer(notice) if notice["notice"] == "question" else None)
    send("here", b"")  # from now on the launcher knows whom to ask
    if config.telemetry_s:
        meter_data_loaders()
        reporter.start(config.telemetry_s)
        atexit.register(reporter.stop)


def _describe(what: Any, ranks: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """The name of what the training thread is blocked in, and the ranks that take part."""
    if isinstance(what, Request):
        names = full_names(*what.key, max(len(what.tensors), 1))
        name = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
    else:
        name = what.name if isinstance(what, Item) else str(what)
    return name, tuple(ranks)
