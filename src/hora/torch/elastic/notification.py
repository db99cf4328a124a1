"""News about hosts, on their way from the launcher to the states of this process.

The launcher says `{"notice": "hosts_updated", "timestamp": s, "change": flags, "generation": g}` over the control
connection; every registered state hears of it, once this process is in that generation. Without a Hora launcher nothing
is ever said.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from hora import engine

__all__ = ["HostUpdateResult", "NotificationManager", "notification_manager"]


class HostUpdateResult:
    """Kinds of change of the hosts: flags that can be combined."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added
    leave = 4  # the whole job is asked to end


class Listener(Protocol):
    def on_hosts_updated(self, timestamp: int, update_res: int) -> None: ...


class NotificationManager:
    """Passes notices on to listeners. One per process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._client: object = None
        self._latest: dict[str, Any] | None = None

    def init(self) -> None:
        """Begin to listen, once per control connection; called again after every change of the world."""
        client = engine.control_connection()
        with self._lock:
            known, self._client = self._client, client
        if client is not None and client is not known:
            client.on_notice(self._on_notice)
        elif self._latest is not None:
            # News of a new generation may come while its members still reset themselves, which forgets all news.
            self._on_notice(self._latest)

    def register_listener(self, listener: Listener) -> None:
        with self._lock:
            self._listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        with self._lock:
            self._listeners = [other for other in self._listeners if other is not listener]

    def handle_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Tell every listener."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)

    def _on_notice(self, notice: dict[str, Any]) -> None:
        if notice.get("notice") != "hosts_updated":
            return
        self._latest = notice
        generation = engine.current_runtime().world.generation if engine.is_initialized() else -1
        if notice.get("generation", generation) == generation:
            self.handle_hosts_updated(int(notice["timestamp"]), int(notice["change"]))


notification_manager = NotificationManager()
