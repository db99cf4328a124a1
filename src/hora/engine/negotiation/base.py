"""Negotiation: every member of a process set learns the same announcements in the same rounds.

A round is a set of announcements that all members feed to their planners (`plan`) before they close it, so that all
derive the same batches. How a round is formed depends on where the members are:

    one member            `LocalNegotiation`, here: its announcements are agreed
    all on one host       `negotiation.shared_memory`: the first member cuts rounds, all read them in shared memory
    on several hosts      `negotiation.tree`: announcements go up a tree of the members, rounds come down

Announcements are 8-byte records (signature number, instance). A whole signature is sent once and then identified by its
number. Numbers belong to the sending member; when it has too many, it forgets all of them and starts over.
"""

from __future__ import annotations

import struct
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from hora.engine.plan import Batch, BatchPlanner
from hora.engine.request import Signature

RECORD = struct.Struct("<II")
_DEFINE = 0xFFFFFFFF  # the second word is the length of the signature that follows, padded to whole records
_FORGET = 0xFFFFFFFE  # the member restarts the numbering of its signatures
_KEPT_SIGNATURES = 65536

# By request and running number: the signature, at the positions of the members that wait for it.
WaitingRequests = dict[tuple[Signature, int], list[Signature | None]]


class Negotiation(ABC):
    """One per process set. Any thread calls `announce` under the queue's lock; the driver calls the rest."""

    rounds = 0  # taken by this member
    may_be_late = False  # rounds may arrive after another member's goodbye

    @abstractmethod
    def announce(self, signature: Signature, instance: int) -> None:
        """Announce a request of this rank to the other members."""

    @abstractmethod
    def poll(self, planner: BatchPlanner) -> list[Batch] | None:
        """Feed news to the planner; returns the batches of the next round, or None if there is no new round."""

    def wait(self) -> None:  # noqa: B027
        """Sleep until something may have changed, or for a short while."""

    def wake(self, *, interrupt: bool = False) -> None:  # noqa: B027
        """Wake this rank's own driver if a round or its own announcement does not, or in any case (`interrupt`)."""

    def flush(self, lock: threading.Lock) -> None:  # noqa: B027
        """Send announcements that had no room, under the same lock as `announce`."""

    def waiting_requests(self) -> WaitingRequests:
        """Return the requests that members wait for without having announced them, by signature, with those members."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Release all resources."""


class LocalNegotiation(Negotiation):
    """A set of one member: all its announcements are agreed."""

    def __init__(self) -> None:
        self._news: deque[tuple[Signature, int]] = deque()

    def announce(self, signature: Signature, instance: int) -> None:
        self._news.append((signature, instance))

    def poll(self, planner: BatchPlanner) -> list[Batch] | None:
        if not self._news:
            return None
        while self._news:
            planner.feed(0, *self._news.popleft())
        return planner.close_round()


class Announcer:
    """Encodes requests as bytes, sending each signature once."""

    def __init__(self, capacity: int) -> None:
        self._capacity = max(capacity, 1)
        self._numbers: dict[Signature, int] = {}

    def encode(self, signature: Signature, instance: int) -> bytes:
        number = self._numbers.get(signature)
        if number is not None:
            return RECORD.pack(number, instance)
        prefix = b""
        if len(self._numbers) >= self._capacity:
            self._numbers.clear()
            prefix = RECORD.pack(_FORGET, 0)
        number = self._numbers[signature] = len(self._numbers)
        text = signature.encode()
        padding = -len(text) % RECORD.size
        return prefix + RECORD.pack(_DEFINE, len(text)) + text + bytes(padding) + RECORD.pack(number, instance)


class Reader:
    """Reads one member's announcements. Equal signatures become one object, so that comparing them is cheap."""

    def __init__(self, interned: dict[Signature, Signature]) -> None:
        self._interned = interned
        self._known: list[Signature] = []
        self._partial = b""  # a signature may be longer than what its writer could place at once

    def known_all(self, numbers: Sequence[int]) -> list[Signature] | None:
        """Return the signatures with these numbers; None if there is anything else among them."""
        known = self._known
        if self._partial or max(numbers) >= len(known):
            return None
        return [known[number] for number in numbers]

    def decode(self, data: bytes) -> list[tuple[Signature, int]]:
        if self._partial:
            data = self._partial + data
            self._partial = b""
        words = struct.unpack(f"<{len(data) // 4}I", data)
        num_words = len(words)
        known = self._known
        found: list[tuple[Signature, int]] = []
        position = 0
        while position < num_words:
            number, instance = words[position], words[position + 1]
            if number == _DEFINE:
                after = position + 2 + -(-instance // RECORD.size) * 2
                if after > num_words:
                    self._partial = data[position * 4 :]
                    break
                start = (position + 2) * 4
                signature = Signature.decode(data[start : start + instance])
                if len(self._interned) >= _KEPT_SIGNATURES:
                    self._interned.clear()  # afterwards equal ones may be two objects: slower to compare, still correct
                known.append(self._interned.setdefault(signature, signature))
                position = after
                continue
            if number == _FORGET:
                known.clear()
            else:
                found.append((known[number], instance))
            position += 2
        return found
