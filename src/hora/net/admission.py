"""Strangers: connections that have not proven yet that they hold the secret, and the limits that hold for all of them.

They cost next to nothing: a few dozen bytes of memory, a deadline, a place in a waiting room of limited size and one
rate-limited log line. The `acceptor` keeps them.
"""

from __future__ import annotations

import itertools
import logging
import resource
import time
from collections import Counter
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

__all__ = ["RejectionLog", "PendingConnections"]

MAX_STRANGERS = 128
HANDSHAKE_LIMIT_S = 10.0
_SHARE_OF_DESCRIPTORS = 8  # one server's strangers hold at most an eighth of those that this process may open
_LOG_INTERVAL_S = 10.0

_log = logging.getLogger("hora.net")

Stranger = TypeVar("Stranger")


class _Arrived(NamedTuple):
    host: str
    since: float


class PendingConnections(Generic[Stranger]):
    """Strangers in order of their arrival."""

    def __init__(self) -> None:
        self._strangers: dict[Stranger, _Arrived] = {}

    def __iter__(self) -> Iterator[Stranger]:
        return iter(list(self._strangers))

    def __contains__(self, stranger: object) -> bool:
        return stranger in self._strangers

    def __len__(self) -> int:
        return len(self._strangers)

    @property
    def limit(self) -> int:
        """The most strangers that may wait at once."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return MAX_STRANGERS if soft < 0 else max(min(MAX_STRANGERS, soft // _SHARE_OF_DESCRIPTORS), 1)

    @property
    def full(self) -> bool:
        return len(self._strangers) >= self.limit

    def add(self, stranger: Stranger, host: str) -> None:
        self._strangers[stranger] = _Arrived(host, time.monotonic())

    def discard(self, stranger: Stranger) -> None:
        self._strangers.pop(stranger, None)

    def next_deadline(self) -> float | None:
        """When the one that has waited for longest must have proven itself."""
        oldest = next(iter(self._strangers.values()), None)
        return None if oldest is None else oldest.since + HANDSHAKE_LIMIT_S

    def overdue(self, now: float) -> list[Stranger]:
        came = self._strangers.items()
        return [one for one, _ in itertools.takewhile(lambda item: item[1].since + HANDSHAKE_LIMIT_S <= now, came)]

    def oldest_of_the_crowd(self) -> Stranger:
        """Choose the connection to drop: the oldest from where most come, so that a crowd harms itself."""
        crowds = Counter(arrived.host for arrived in self._strangers.values())
        [(host, _)] = crowds.most_common(1)
        return next(stranger for stranger, arrived in self._strangers.items() if arrived.host == host)


class RejectionLog:
    """Logs refused connections: the first at once, the others as a number now and then."""

    def __init__(self) -> None:
        self._count = 0
        self._next_report = 0.0

    def add(self, where: str, why: str) -> None:
        now = time.monotonic()
        if now >= self._next_report:
            self.report()
            _log.warning("closed a connection from %s: %s", where, why)
            self._next_report = now + _LOG_INTERVAL_S
        else:
            self._count += 1

    def report(self) -> None:
        if self._count:
            _log.warning("closed %d further connections that could not identify themselves", self._count)
            self._count = 0
