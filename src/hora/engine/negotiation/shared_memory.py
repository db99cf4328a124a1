"""Negotiation of members that share a host, through a segment that all of them map.

Each member owns a ring of announcements, which the others read, and a head: the number of bytes it has announced. The
first member is the coordinator. Whenever something has become ready, it publishes a *cut*: how far into every ring the
round reaches. No member polls on a timer: one with news rings the coordinator's bell, and the round number wakes the
members.

A round from the coordinator's view. `fed` is the position up to which the news has been fed to the planner; while the
planner is idle,

    quiet     no member has news
    delaying  some members have announced nothing yet: they may be about to announce what the others have
    alike     all members have announced the same known requests, some perhaps more
    planning  anything else: the news is fed to the planner, which knows what is ready

    quiet --news--> delaying, alike or planning
    delaying --the others' news--> alike, or planning if it differs or _PATIENCE_S have passed
    alike --> round of what all have announced: most rounds are like this
    planning --something is ready, or the rings fill up--> round

The other members read the cut and feed the same news, or recognize in the same way that it is alike. The coordinator
reuses a cut only after all members have read the one of _NUM_CUTS rounds ago (`_cut_is_free`).

A single request of every member needs no round at all. A member that has nothing else in flight, and knows of nothing
that others wait for, may publish a record: *this request, and nothing else until it is settled*. Once every member has
published the same record, all of them see it and continue at once (`engine.repeated`). Each such attempt has a ticket,
which all members count alike: the rounds so far, and the repeated calls since the last round.

    publish --all members have published this ticket, with equal records--> settled: executed
            --all have, but the records differ--> void: announced in the ordinary way, which explains the difference
            --a member has ordinary news instead, or a round was cut--> void, likewise

Why members cannot reach different outcomes: the records of a ticket do not change before all members have read them.
News that arrives instead concerns a request that cannot be settled without the member that reads it, so the member that
announced it does not reach this ticket; by then a round has passed, and tickets have changed. A member that sees news
checks once more whether all have published, because news may also arrive after the ticket was settled.
`verify/repeated.pml` models all of it. The native part (`repeated.h`) publishes, awaits and compares records.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
import time
from collections.abc import Sequence
from operator import eq, sub

from hora.engine.negotiation.base import RECORD, Announcer, Negotiation, Reader, WaitingRequests
from hora.engine.plan import Batch, BatchPlanner
from hora.engine.request import Kind, Signature
from hora.engine.shm.counters import LINE_BYTES, MEMBER_BYTES, Counter, Counters
from hora.engine.shm.native import Repeated, native_part
from hora.engine.shm.segment import Segment, aligned

_RING_BYTES = 512 * 1024
_NUM_CUTS = 64
_POSITION = struct.Struct("<q")  # of a member, in a cut
# How long the coordinator delays news of some members: the others probably announce the same.
_PATIENCE_S = 0.2
# There are never more repeated calls between two rounds; not a power of two, because sleepers watch the low half.
_TICKETS_PER_ROUND = 2**32 + 7919
# Of a repeated call: the ticket, a digest of the signature, the running number of an unnamed request.
_CALL_RECORD = struct.Struct("<q16sq")
_NUM_CALL_RECORDS = 4  # no member is more than one ticket ahead
_CALL_BYTES = MEMBER_BYTES + 2 * LINE_BYTES  # per member: the ticket, whether it sleeps, and two lines of records


class SharedMemoryNegotiation(Negotiation):
    """Layout of the segment; positions never wrap.

    Per member one line each for head (bytes announced) and rounds (rounds done); one line each for the round number and
    the coordinator's bell; the records of repeated calls; a ring of cuts (vectors of 64-bit positions); one ring of
    announcements per member.
    """

    def __init__(self, segment: Segment, member: int, num_members: int, *, cache_capacity: int) -> None:
        line, memory = LINE_BYTES, segment.memory
        self._member = member
        self._num_members = num_members
        self._memory = memoryview(memory)
        self._heads = [Counter(memory, (2 * m) * line) for m in range(num_members)]
        self._rounds_done = [Counter(memory, (2 * m + 1) * line) for m in range(num_members)]
        self._round = Counter(memory, 2 * num_members * line)
        self._bell = Counter(memory, (2 * num_members + 1) * line)
        self._asleep = Counter(memory, (2 * num_members + 1) * line + 8)  # whether the coordinator waits for it
        self._calls_at = (2 * num_members + 2) * line
        self.tickets = Counters(memory, self._calls_at, member, num_members, stride=_CALL_BYTES)
        self._native, self._group_at = native_part(), ctypes.addressof(self.tickets.group)
        self._cuts_at = self._calls_at + num_members * _CALL_BYTES
        self._cut = struct.Struct(f"<{num_members}q")
        self._rings_at = self._cuts_at + aligned(_NUM_CUTS * self._cut.size, line)
        self._own_ring_at = self._rings_at + member * _RING_BYTES
        self._announcer = Announcer(cache_capacity)
        self._interned: dict[Signature, Signature] = {}
        self._readers = [Reader(self._interned) for _ in range(num_members)]
        self._fed = [0] * num_members  # how far each ring has been fed to the planner
        self._fed_by_round = (ctypes.c_int64 * num_members)()  # the same as of the last round
        self.calls = Repeated(  # where records are, and where to see that all announcements are agreed
            group=self.tickets.group,
            heads=self._heads[0].address,
            head_bytes=2 * LINE_BYTES,
            round=self._round.address,
            fed=ctypes.addressof(self._fed_by_round),
            next_ticket=1,
        )
        self._head = 0
        self._free_from = 0  # all members have read this rank's ring up to here
        self._overflow = bytearray()
        self._bell_seen = 0
        self._delaying_since = 0.0  # 0: not delaying

    @staticmethod
    def num_bytes(num_members: int) -> int:
        """Return the size of the segment."""
        cuts = aligned(_NUM_CUTS * 8 * num_members, LINE_BYTES)
        return (2 * num_members + 2) * LINE_BYTES + num_members * (_CALL_BYTES + _RING_BYTES) + cuts

    def wait(self) -> None:
        if self._member == 0:
            self._asleep.store(1)
            self._native.fence()  # either this member sees another's bell, or that one sees that this one sleeps
            self._bell.wait_beyond(self._bell_seen)
            self._asleep.store(0)
        else:
            self._round.wait_beyond(self.rounds)

    def wake(self, *, interrupt: bool = False) -> None:
        if self._member and not interrupt:
            return
        with contextlib.suppress(AttributeError):  # closed: the control tree's thread wakes queues until it ends
            if self._member:
                self._round.wake()
            else:
                self._ring()

    def close(self) -> None:
        """Release the memory. No thread waits any more, but a `wake` may still arrive."""
        self._memory.release()
        self.tickets.close()
        self._heads, self._rounds_done = [], []
        del self._round, self._bell, self._asleep

    # Without a round: nothing is announced while a member holds a ticket.

    def waiting_requests(self) -> WaitingRequests:
        found: WaitingRequests = {}
        next_ticket = self.calls.next_ticket
        at = self._calls_at + MEMBER_BYTES + next_ticket % _NUM_CALL_RECORDS * _CALL_RECORD.size
        for member, counter in enumerate(self.tickets.counters):
            ticket, digest, instance = _CALL_RECORD.unpack_from(self._memory, at + member * _CALL_BYTES)
            if counter.value == ticket == next_ticket:
                for signature in [known for known in list(self._interned) if known.digest() == digest]:
                    found.setdefault((signature, instance), [None] * self._num_members)[member] = signature
        return found

    # Rounds.

    def poll(self, planner: BatchPlanner) -> list[Batch] | None:
        if not (self._follow(planner) if self._member else self._lead(planner)):
            return None
        batches = planner.close_round()
        self.calls.rounds, self.calls.next_ticket = self.rounds, self.rounds * _TICKETS_PER_ROUND + 1
        self._fed_by_round[:] = list(self._fed)
        self._rounds_done[self._member].store(self.rounds)
        return batches

    def _lead(self, planner: BatchPlanner) -> bool:
        """Read the news as the coordinator, and cut a round if it is worth one."""
        # The bell is read before the heads: news that arrives after the heads were read changes it, and `wait` returns.
        self._bell_seen = self._bell.value
        heads = [head.value for head in self._heads]
        if planner.idle and self._cut_is_free():
            num_bytes = min(map(sub, heads, self._fed))
            if self._feed_alike(planner, num_bytes):
                self._fed = [fed + num_bytes for fed in self._fed]
                return self._publish()
            if self._batching(heads):
                return False
        self._delaying_since = 0.0
        self._feed(planner, heads)
        # Rounds without a batch keep a ring from filling up with announcements that wait for a slow member.
        filled = sum(self._fed) - sum(self._fed_by_round) > _RING_BYTES // 4
        return (planner.has_ready or filled) and self._cut_is_free() and self._publish()

    def _follow(self, planner: BatchPlanner) -> bool:
        """Take the next round that the coordinator has cut."""
        if self._round.value == self.rounds:
            return False
        self.rounds += 1
        cut = self._cut.unpack_from(self._memory, self._cut_offset(self.rounds))
        sizes = set(map(sub, cut, self._fed))
        if planner.idle and len(sizes) == 1 and self._feed_alike(planner, sizes.pop()):
            self._fed = list(cut)
        else:
            self._feed(planner, cut)
        return True

    def _feed_alike(self, planner: BatchPlanner, num_bytes: int) -> bool:
        """Feed the next `num_bytes` bytes of every member, if all announce the same known requests in order."""
        if num_bytes < RECORD.size:
            return False
        same: list[Signature] | None = None
        instances: Sequence[int] = ()
        for member, fed in enumerate(self._fed):
            words = struct.unpack(f"<{num_bytes // 4}I", self._read(member, fed, fed + num_bytes))
            found = self._readers[member].known_all(words[::2])
            if member == 0:
                same, instances = found, words[1::2]
            if found is None or found != same or words[1::2] != instances:
                return False
        assert same is not None
        if any(signature.kind == Kind.JOIN for signature in same):
            return False
        for signature, instance in zip(same, instances, strict=True):
            planner.feed_all(signature, instance)
        return True

    def _batching(self, heads: Sequence[int]) -> bool:
        """Return whether to delay news of some members for a moment: others, which have none yet, may have the same."""
        num_missing = sum(map(eq, heads, self._fed))
        if num_missing in (0, self._num_members) or sum(heads) - sum(self._fed) > _RING_BYTES // 4:
            return False
        now = time.monotonic()
        if not self._delaying_since:
            self._delaying_since = now
        return now - self._delaying_since < _PATIENCE_S

    def _feed(self, planner: BatchPlanner, upto: Sequence[int]) -> None:
        """Feed the news up to these positions to the planner."""
        fed = self._fed
        for member in range(self._num_members):
            if upto[member] > fed[member]:
                data = self._read(member, fed[member], upto[member])
                fed[member] = upto[member]
                for signature, instance in self._readers[member].decode(data):
                    planner.feed(member, signature, instance)

    def _publish(self) -> bool:
        self.rounds += 1
        self._delaying_since = 0.0
        self._cut.pack_into(self._memory, self._cut_offset(self.rounds), *self._fed)
        self._round.set(self.rounds)
        return True

    def _cut_offset(self, number: int) -> int:
        return self._cuts_at + number % _NUM_CUTS * self._cut.size

    def _cut_is_free(self) -> bool:
        return min(done.value for done in self._rounds_done) > self.rounds + 1 - _NUM_CUTS

    # Announcements.

    def announce(self, signature: Signature, instance: int) -> None:
        data = self._announcer.encode(signature, instance)
        if self._overflow:
            self._overflow += data
        else:
            self._write(data)

    def flush(self, lock: threading.Lock) -> None:
        if self._overflow:
            with lock:
                data = bytes(self._overflow)
                self._overflow.clear()
                self._write(data)

    def _read(self, member: int, start: int, stop: int) -> bytes:
        size = _RING_BYTES
        at = self._rings_at + member * size
        low, high = start % size, (stop - 1) % size + 1
        if low < high:
            return bytes(self._memory[at + low : at + high])
        return bytes(self._memory[at + low : at + size]) + bytes(self._memory[at : at + high])

    def _write(self, data: bytes) -> None:
        size, head = _RING_BYTES, self._head
        if head + len(data) - self._free_from > size:
            self._reclaim()
            room = size - (head - self._free_from)
            self._overflow += data[room:]
            data = data[:room]
        low = head % size
        at = self._own_ring_at + low
        if low + len(data) > size:
            rest = data[size - low :]
            self._memory[self._own_ring_at : self._own_ring_at + len(rest)] = rest
            self._memory[at : self._own_ring_at + size] = data[: size - low]
        else:
            self._memory[at : at + len(data)] = data
        self._head += len(data)
        self._heads[self._member].store(self._head)
        # Members that wait in a repeated call must now take the ordinary path, so wake them. Nudge on every write: one
        # that has seen a later round may have gone back to sleep since.
        self._native.nudge(self._group_at)
        if self._member != 0:  # `wake` wakes the coordinator's own driver if necessary
            self._ring()

    def _reclaim(self) -> None:
        """Free the part of this rank's ring that all members have read: up to the cut of a round that all have done."""
        done = -1
        while done != (done := min(counter.value for counter in self._rounds_done)):  # its cut stays until all go on
            (self._free_from,) = _POSITION.unpack_from(self._memory, self._cut_offset(done) + 8 * self._member)

    def _ring(self) -> None:
        self._native.add(self._bell.address, 1)  # every member does, and a sleeper waits for a larger value
        self._bell.wake_if(self._asleep)
