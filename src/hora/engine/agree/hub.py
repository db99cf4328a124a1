"""Agreement of the members of a set that spans hosts, through rank 0's hub (`hora.engine.hub`)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from hora.engine.agree.agreement import LoneRequests
from hora.engine.agree.announcement import Announcer, Reader
from hora.engine.plan import Batch, Planner
from hora.engine.request import Signature

__all__ = ["HubAgreement"]

_SLICE_S = 0.05


class HubAgreement:
    """Every announcement goes to the hub, which sends what came in together to all members as one round.

    `send` gives an announcement to the hub; the hub's thread calls `deliver` with each round. The hub knows whose connection
    an announcement came over, and `ranks` who is a member: what any other rank announces here is not heard.
    """

    holds_back = False

    def __init__(self, send: Callable[[bytes], None], ranks: Sequence[int], *, cache_capacity: int) -> None:
        self._send = send
        self._announcer = Announcer(cache_capacity)
        interned: dict[Signature, Signature] = {}
        self._readers = {rank: (member, Reader(interned)) for member, rank in enumerate(ranks)}
        self._rounds: deque[list[tuple[int, bytes]]] = deque()
        self._changed = threading.Condition()

    def deliver(self, announcements: list[tuple[int, bytes]]) -> None:
        """A round has come: what ranks have announced. On the hub's thread."""
        with self._changed:
            self._rounds.append(announcements)
            self._changed.notify_all()

    def announce(self, signature: Signature, instance: int) -> None:
        self._send(self._announcer.encode(signature, instance))

    def poll(self, planner: Planner) -> list[Batch] | None:
        if not self._rounds:
            return None
        for rank, data in self._rounds.popleft():
            if rank in self._readers:
                member, reader = self._readers[rank]
                for signature, instance in reader.decode(data):
                    planner.feed(member, signature, instance)
        return planner.close_round()

    def flush(self) -> None:
        """Nothing is kept back."""

    def lone_requests(self) -> LoneRequests:
        return {}

    def wait(self) -> None:
        with self._changed:
            if not self._rounds:
                self._changed.wait(_SLICE_S)

    def wake(self) -> None:
        """A round wakes the driver; an announcement of its own comes back as one."""

    def close(self) -> None:
        """Nothing is held."""
