"""Lone records: how members of one host agree on one request without the coordinator's round.

A member that has nothing else in flight and knows of nothing that others wait for may say: *this request, and nothing else
until it is settled*. When every member has said so of the same request they all see it, and go on at once. Each such
moment has a ticket, which all members count alike: the rounds of the agreement so far, and the lone requests since the last.

    publish --all members have published this ticket, with equal records--> settled: carried out
            --all have, but the records differ--> void: announced in the ordinary way, which explains the difference
            --a member has ordinary news instead, or a round was cut--> void, likewise

Why no two members come to different ends: the records of a ticket do not change before all members have read them. And news
that comes instead is about a request that cannot be settled without the member that reads it, so the member that announced it
does not get as far as this ticket; by then a round has passed, and tickets are others. Who sees news looks once more
whether all have published: news may also come after the ticket was settled.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence

from hora.engine.shm.futex import LINE_BYTES, Counter, fence

__all__ = ["TICKETS_PER_ROUND", "LoneRecords", "Record"]

# More lone requests than this never come between two rounds; not a power of two, because sleepers watch the low half.
TICKETS_PER_ROUND = 2**32 + 7919
# The ticket, a digest of the signature, the running number of an unnamed request.
_RECORD = struct.Struct("<q16sq")
_NUM_KEPT = 4  # no member is more than one ticket ahead
_MEMBER_BYTES = 4 * LINE_BYTES  # a line for the ticket, one for who sleeps, two for the records

Record = tuple[int, bytes, int]


class LoneRecords:
    """All members' tickets and records, in memory that they share. One member writes its own, all read all."""

    def __init__(self, memory: mmap.mmap, offset: int, member: int, num_members: int) -> None:
        self._memory = memoryview(memory)
        places = [offset + peer * _MEMBER_BYTES for peer in range(num_members)]
        tickets = [Counter.at(memory, place) for place in places]
        asleep = [Counter.at(memory, place + LINE_BYTES) for place in places]
        self._records = [place + 2 * LINE_BYTES for place in places]
        self._own, self._own_record, self._own_sleep = tickets[member], self._records[member], asleep[member]
        # Each member begins with the next one, so that not all of them look at member 0 first.
        order = [(member + distance) % num_members for distance in range(1, num_members)]
        self._peers = [(tickets[peer], self._records[peer]) for peer in order]
        self._asleep = [asleep[peer] for peer in order]
        self._tickets: Sequence[Counter] = tickets
        self.address = tickets[0].address

    @staticmethod
    def num_bytes(num_members: int) -> int:
        """What they need of shared memory."""
        return num_members * _MEMBER_BYTES

    def publish(self, record: Record) -> None:
        """Say that this request is all that this member has."""
        ticket = record[0]
        _RECORD.pack_into(self._memory, self._own_record + ticket % _NUM_KEPT * _RECORD.size, *record)
        self._own.store(ticket)
        self.nudge()

    def has_published(self, ticket: int) -> bool:
        """Whether this member has got as far as that."""
        return self._own.value >= ticket

    def nudge(self) -> None:
        """Wake members that sleep until this one does something."""
        self._own.wake_any(self._asleep)

    def missing(self, ticket: int) -> Counter | None:
        """The ticket of a member that has not come this far; None if all have."""
        for counter, _ in self._peers:
            if counter.value < ticket:
                return counter
        return None

    def agree(self, record: Record) -> bool:
        """Whether all members have published this very record."""
        at = record[0] % _NUM_KEPT * _RECORD.size
        for counter, place in self._peers:
            if counter.value < record[0] or _RECORD.unpack_from(self._memory, place + at) != record:
                return False
        return True

    def fall_asleep(self) -> None:
        """From now on other members wake this one."""
        self._own_sleep.store(1)
        fence()

    def wake_up(self) -> None:
        self._own_sleep.store(0)

    def waiting(self, ticket: int) -> list[Record | None]:
        """The records of those members that wait at this ticket, by member; for the stall report."""
        at = ticket % _NUM_KEPT * _RECORD.size
        found: list[Record | None] = []
        for counter, place in zip(self._tickets, self._records, strict=True):
            record = _RECORD.unpack_from(self._memory, place + at) if counter.value == ticket else None
            found.append(record if record is not None and record[0] == ticket else None)
        return found

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.release()
        self._tickets, self._peers, self._asleep = [], [], []
        del self._own, self._own_sleep
