"""Records of repeated calls: how members of one host agree on one request without the coordinator's round.

A member that has nothing else in flight and knows of nothing that others wait for may say: *this request, and nothing
else until it is settled*. When every member has said so of the same request they all see it, and go on at once. Each
such moment has a ticket, which all members count alike: the rounds of the agreement so far, and the repeated calls
since the last.

    publish --all members have published this ticket, with equal records--> settled: carried out
            --all have, but the records differ--> void: announced in the ordinary way, which explains the difference
            --a member has ordinary news instead, or a round was cut--> void, likewise

Why no two members come to different ends: the records of a ticket do not change before all members have read them. And
news that comes instead is about a request that cannot be settled without the member that reads it, so the member that
announced it does not get as far as this ticket; by then a round has passed, and tickets are others. Who sees news looks
once more whether all have published: news may also come after the ticket was settled. `verify/repeated.pml` has all of
it.

Records are published, waited for and compared by the native part (`repeated.h`).
"""

from __future__ import annotations

import ctypes
import mmap
import struct

from hora.engine.shm.counters import MEMBER_BYTES, Counters
from hora.engine.shm.futex import LINE_BYTES
from hora.engine.shm.native import library

__all__ = ["TICKETS_PER_ROUND", "Record", "RepeatedRecords"]

# More repeated calls than this never come between two rounds; not a power of two, because sleepers watch the low half.
TICKETS_PER_ROUND = 2**32 + 7919
# The ticket, a digest of the signature, the running number of an unnamed request.
_RECORD = struct.Struct("<q16sq")
_NUM_KEPT = 4  # no member is more than one ticket ahead
_MEMBER_BYTES = MEMBER_BYTES + 2 * LINE_BYTES  # the ticket and who sleeps, and two lines of records

Record = tuple[int, bytes, int]


class RepeatedRecords:
    """All members' tickets and records, in memory that they share. One member writes its own, all read all."""

    def __init__(self, memory: mmap.mmap, offset: int, member: int, num_members: int) -> None:
        self._memory = memoryview(memory)
        self.tickets = Counters(memory, offset, member, num_members, stride=_MEMBER_BYTES)
        self._native, self._group_at = library(), ctypes.addressof(self.tickets.group)
        self._records = [offset + peer * _MEMBER_BYTES + MEMBER_BYTES for peer in range(num_members)]

    @staticmethod
    def num_bytes(num_members: int) -> int:
        """Return the size in shared memory."""
        return num_members * _MEMBER_BYTES

    def nudge(self) -> None:
        """Tell members that wait for a record that this one has announced something instead: all look up."""
        if self._native is not None:  # else nobody waits here
            self._native.nudge(self._group_at)

    def has_published(self, ticket: int) -> bool:
        """Return whether this member has got as far as that."""
        return self.tickets.own.value >= ticket

    def waiting(self, ticket: int) -> list[Record | None]:
        """The records of those members that wait at this ticket, by member; for the stall report."""
        at = ticket % _NUM_KEPT * _RECORD.size
        found: list[Record | None] = []
        for counter, place in zip(self.tickets.counters, self._records, strict=True):
            record = _RECORD.unpack_from(self._memory, place + at) if counter.value == ticket else None
            found.append(record if record is not None and record[0] == ticket else None)
        return found

    def close(self) -> None:
        """Let go of the memory."""
        self._native = None
        self._memory.release()
        self.tickets.close()
