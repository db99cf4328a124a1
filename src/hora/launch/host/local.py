"""The local launcher: workers as processes of this machine, under one supervisor. Nothing listens off
loopback."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hora.launch.host.connection import Host, local_supervisor_command
from hora.launch.job import LaunchEvents, WorkerSpec

__all__ = ["LocalLauncher"]

_CLOSE_SLACK_S = 15.0


class LocalLauncher:
    """Starts workers on this machine."""

    def __init__(self) -> None:
        self._host: Host | None = None
        self._grace_s = 0.0

    @property
    def bind_address(self) -> str:
        return "127.0.0.1"

    @property
    def advertised_address(self) -> str:
        return "127.0.0.1"

    def start(self, workers: Sequence[WorkerSpec], events: LaunchEvents) -> None:
        if self._host is None:
            self._host = self._open_host(events)
        self._grace_s = max([self._grace_s, *(spec.grace_s for spec in workers)])
        self._host.start(workers)

    def _open_host(self, events: LaunchEvents) -> Host:
        return Host("localhost", local_supervisor_command(), events)

    def terminate(self, workers: Iterable[int], *, grace_s: float) -> None:
        if self._host is not None:
            self._host.terminate(workers, grace_s=grace_s)

    def close(self) -> None:
        if self._host is not None:
            host, self._host = self._host, None
            host.finish(grace_s=self._grace_s)
            host.wait(self._grace_s + _CLOSE_SLACK_S)
