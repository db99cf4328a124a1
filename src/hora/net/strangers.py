"""Strangers: connections that have not proven yet that they hold the secret, and the limits that hold for all of them.

They cost next to nothing: a few dozen bytes of memory, a deadline, a place in a waiting room of limited size and one
rate-limited log line. Kept by `server`, in its thread.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterator

from hora.net.peer import Peer

__all__ = ["TurnedAway", "WaitingRoom"]

MAX_STRANGERS = 128
HANDSHAKE_LIMIT_S = 10.0
_LOG_INTERVAL_S = 10.0

_log = logging.getLogger("hora.net")


class WaitingRoom:
    """Strangers in order of their arrival."""

    def __init__(self) -> None:
        self._strangers: dict[Peer, None] = {}

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._strangers))

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._strangers

    def __len__(self) -> int:
        return len(self._strangers)

    @property
    def full(self) -> bool:
        return len(self._strangers) >= MAX_STRANGERS

    def add(self, peer: Peer) -> None:
        self._strangers[peer] = None

    def remove(self, peer: Peer) -> None:
        del self._strangers[peer]

    def next_deadline(self) -> float | None:
        """When the one that has waited for longest must have proven itself."""
        oldest = next(iter(self._strangers), None)
        return None if oldest is None else oldest.since + HANDSHAKE_LIMIT_S

    def overdue(self, now: float) -> list[Peer]:
        if not self._strangers:
            return []
        return list(itertools.takewhile(lambda peer: peer.since + HANDSHAKE_LIMIT_S <= now, self._strangers))

    def oldest_of_the_crowd(self) -> Peer:
        """Choose the peer to disconnect: the oldest from where most come, so that a crowd harms itself."""
        crowds = Counter(peer.host for peer in self._strangers)
        [(host, _)] = crowds.most_common(1)
        return next(peer for peer in self._strangers if peer.host == host)


class TurnedAway:
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
