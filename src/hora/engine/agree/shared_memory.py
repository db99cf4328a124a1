"""Agreement of the members of a set that share a host, through a segment that all of them map.

Each member owns a ring of announcements, which the others read, and a head: how many bytes it has announced. The first
member is the coordinator. Whenever something has become ready it publishes a *cut*: how far into every ring the round
reaches. No member polls on a timer: one with news rings the coordinator's bell, and the round number wakes the members.

A round, as the coordinator sees it. `fed` is how far the news has been given to the planner; while the planner is idle,

    quiet     no member has news
    hoping    some members have announced nothing yet: they may be about to announce what the others have
    alike     all members have announced the same known requests, some perhaps more besides
    planning  anything else: the news is fed to the planner, and the planner knows what is ready

    quiet --news--> hoping, alike or planning
    hoping --the others' news--> alike, or planning when it is not the same, or when _PATIENCE_S have passed
    alike --> round of what all have announced: most rounds are like this
    planning --something is ready, or the rings fill up--> round

The other members learn the cut and feed the same news, or see in the same way that it is alike. The coordinator
publishes a cut only where the one of _NUM_CUTS rounds ago has been read by all members (`_cut_is_free`).

One request of every member, and nothing else, needs no round at all: `repeated`.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from operator import eq, sub

from hora.engine.agree.agreement import Agreement, UnannouncedRequests
from hora.engine.agree.announcement import RECORD, Announcer, Reader
from hora.engine.agree.repeated import TICKETS_PER_ROUND, RepeatedRecords
from hora.engine.plan import Batch, Planner
from hora.engine.request import Kind, Signature
from hora.engine.shm import native
from hora.engine.shm.futex import LINE_BYTES, Counter, fence
from hora.engine.shm.segment import Segment, aligned

__all__ = ["SharedMemoryAgreement"]

_RING_BYTES = 512 * 1024
_NUM_CUTS = 64
# How long the coordinator holds back news of some members in the hope that the others announce the same.
_PATIENCE_S = 0.2
_RECORD_BYTES = RECORD.size


class SharedMemoryAgreement(Agreement):
    """Layout: per member one line each for head (bytes announced), rounds (rounds done) and bell; one line for the
    round number; the records of repeated calls; a ring of cuts (vectors of 64-bit positions); one ring of announcements
    per member. Positions never wrap.
    """

    def __init__(self, segment: Segment, member: int, num_members: int, *, cache_capacity: int) -> None:
        line, memory = LINE_BYTES, segment.memory
        self._member = member
        self._num_members = num_members
        self._memory = memoryview(memory)
        self._heads = [Counter.at(memory, (3 * m) * line) for m in range(num_members)]
        self._rounds_done = [Counter.at(memory, (3 * m + 1) * line) for m in range(num_members)]
        self._bells = [Counter.at(memory, (3 * m + 2) * line) for m in range(num_members)]
        self._asleep = Counter.at(memory, 2 * line + 8)  # whether the coordinator waits for its bell, beside this
        self._round = Counter.at(memory, 3 * num_members * line)
        self.repeated = RepeatedRecords(memory, (3 * num_members + 1) * line, member, num_members)
        self.ticket = 1  # the next one: see `repeated`
        self.void = 0  # a ticket that was published and not settled: never again
        self._cuts_at = (3 * num_members + 1) * line + RepeatedRecords.num_bytes(num_members)
        self._cut = struct.Struct(f"<{num_members}q")
        self._rings_at = self._cuts_at + aligned(_NUM_CUTS * self._cut.size, line)
        self._announcer = Announcer(cache_capacity)
        self._interned: dict[Signature, Signature] = {}
        self._readers = [Reader(self._interned) for _ in range(num_members)]
        self._fed = [0] * num_members  # how far each ring has been fed to the planner
        self._fed_by_round = (ctypes.c_int64 * num_members)()  # the same as of the last round, for the native part
        self._published = [0] * num_members  # the last cut
        self._head = 0
        self._free_from = 0  # everything of the own ring before this position has been read by all
        # (round, own position) not yet known to be read by all. Old ones may be dropped: later ones imply them.
        self._own_cuts: deque[tuple[int, int]] = deque(maxlen=512)
        self._cuts_lock = threading.Lock()  # the driver ends a round, the thread that announces reclaims room
        self._overflow = bytearray()
        self._num_bells = 0
        self._bell_seen = 0
        self._hoping_since = 0.0  # 0: not hoping

    @staticmethod
    def num_bytes(num_members: int) -> int:
        """Return the size of the segment."""
        cuts = aligned(_NUM_CUTS * 8 * num_members, LINE_BYTES)
        records = RepeatedRecords.num_bytes(num_members)
        return (3 * num_members + 1) * LINE_BYTES + records + cuts + num_members * _RING_BYTES

    def wait(self) -> None:
        if self._member == 0:
            self._asleep.store(1)
            fence()  # either the bell that another member rings is seen here, or that this one sleeps is seen there
            self._bells[0].wait_beyond(self._bell_seen)
            self._asleep.store(0)
        else:
            self._round.wait_beyond(self.rounds)

    def wake(self) -> None:
        if self._member == 0:
            # Closed meanwhile: the hub's thread wakes queues until it ends.
            with contextlib.suppress(IndexError, AttributeError):
                self._ring()

    def close(self) -> None:
        """Let go of the memory. No thread waits any more, though a `wake` may still come."""
        self._memory.release()
        self.repeated.close()
        self._heads, self._rounds_done, self._bells = [], [], []
        del self._round, self._asleep

    # Without a round: nothing is announced while a member is at a ticket.

    def describe_to(self, job: native.Repeated) -> None:
        """Tell the native part where records are, and where it sees that all announcements have been agreed on."""
        job.group, job.heads, job.round = self.repeated.tickets.group, self._heads[0].address, self._round.address
        job.fed, job.head_bytes = ctypes.addressof(self._fed_by_round), 3 * LINE_BYTES

    def unannounced_requests(self) -> UnannouncedRequests:
        found: UnannouncedRequests = {}
        for member, record in enumerate(self.repeated.waiting(self.ticket)):
            for signature in [] if record is None else list(self._interned):
                if record is not None and signature.digest() == record[1]:
                    found.setdefault((signature, record[2]), [None] * self._num_members)[member] = signature
        return found

    # Rounds.

    def poll(self, planner: Planner) -> list[Batch] | None:
        return self._lead(planner) if self._member == 0 else self._follow(planner)

    def _lead(self, planner: Planner) -> list[Batch] | None:
        """The coordinator: look at the news, and cut a round when it is worth one."""
        # The bell is read before the heads: news that comes after the heads were read changes it, and `wait` returns.
        self._bell_seen = self._bells[0].value
        heads = [head.value for head in self._heads]
        if planner.idle and self._cut_is_free():
            num_bytes = min(map(sub, heads, self._fed))
            if self._feed_alike(planner, num_bytes):
                self._fed = [fed + num_bytes for fed in self._fed]
                self._publish()
                return self._end_round(planner.close_round())
            if self._batching(heads):
                return None
        self._hoping_since = 0.0
        self._feed(planner, heads)
        # Rounds without a batch keep a ring from filling up with announcements that wait for a slow member.
        filled = sum(self._fed) - sum(self._published) > _RING_BYTES // 4
        if not (planner.has_ready or filled) or not self._cut_is_free():
            return None
        self._publish()
        return self._end_round(planner.close_round())

    def _follow(self, planner: Planner) -> list[Batch] | None:
        """Another member: take the next round that the coordinator has cut."""
        if self._round.value == self.rounds:
            return None
        self.rounds += 1
        cut = self._cut.unpack_from(self._memory, self._cut_offset())
        sizes = set(map(sub, cut, self._fed))
        if planner.idle and len(sizes) == 1 and self._feed_alike(planner, sizes.pop()):
            self._fed = list(cut)
        else:
            self._feed(planner, cut)
        return self._end_round(planner.close_round())

    def _feed_alike(self, planner: Planner, num_bytes: int) -> bool:
        """Give the planner the next so many bytes of every member's news, if all of them announce the same known
        requests in the same order."""
        if num_bytes < _RECORD_BYTES:
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
        """Return whether to leave news of some members for a moment: others, who have none yet, may have the same."""
        num_missing = sum(map(eq, heads, self._fed))
        if num_missing in (0, self._num_members) or sum(heads) - sum(self._fed) > _RING_BYTES // 4:
            return False
        now = time.monotonic()
        if not self._hoping_since:
            self._hoping_since = now
        return now - self._hoping_since < _PATIENCE_S

    def _feed(self, planner: Planner, upto: Sequence[int]) -> None:
        """Give the planner the news up to there."""
        fed = self._fed
        for member in range(self._num_members):
            if upto[member] > fed[member]:
                data = self._read(member, fed[member], upto[member])
                fed[member] = upto[member]
                for signature, instance in self._readers[member].decode(data):
                    planner.feed(member, signature, instance)

    def _publish(self) -> None:
        self.rounds += 1
        self._hoping_since = 0.0
        self._published = list(self._fed)
        self._cut.pack_into(self._memory, self._cut_offset(), *self._fed)
        self._round.set(self.rounds)

    def _end_round(self, batches: list[Batch]) -> list[Batch]:
        self.ticket = self.rounds * TICKETS_PER_ROUND + 1
        self._fed_by_round[:] = list(self._fed)
        with self._cuts_lock:
            self._own_cuts.append((self.rounds, self._fed[self._member]))
        self._rounds_done[self._member].store(self.rounds)
        return batches

    def _cut_offset(self) -> int:
        return self._cuts_at + (self.rounds % _NUM_CUTS) * self._cut.size

    def _cut_is_free(self) -> bool:
        return min(done.value for done in self._rounds_done) > self.rounds + 1 - _NUM_CUTS

    # Announcements.

    @property
    def holds_back(self) -> bool:
        return bool(self._overflow)

    def announce(self, signature: Signature, instance: int) -> None:
        number = self._announcer.number(signature)
        if number >= 0 and not self._overflow and self._head + _RECORD_BYTES - self._free_from <= _RING_BYTES:
            # Records never straddle the end.
            at = self._rings_at + self._member * _RING_BYTES + self._head % _RING_BYTES
            RECORD.pack_into(self._memory, at, number, instance)
            self._announced(_RECORD_BYTES)
            return
        data = self._announcer.encode(signature, instance)
        if self._overflow:
            self._overflow += data
        else:
            self._write(data)

    def flush(self) -> None:
        if self._overflow:
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
        size = _RING_BYTES
        if self._head + len(data) - self._free_from > size:
            self._reclaim()
        room = size - (self._head - self._free_from)
        if len(data) > room:
            self._overflow += data[room:]
            data = data[:room]
        at = self._rings_at + self._member * size
        low = self._head % size
        first = min(len(data), size - low)
        self._memory[at + low : at + low + first] = data[:first]
        if first < len(data):
            self._memory[at : at + len(data) - first] = data[first:]
        self._announced(len(data))

    def _announced(self, num_bytes: int) -> None:
        """So many bytes more are in the own ring: tell the others."""
        self._head += num_bytes
        self._heads[self._member].store(self._head)
        # What they hope for will not come. Each time: those that have seen a round that this member has not seen yet
        # may have fallen asleep since it announced something before.
        self.repeated.nudge()
        if self._member != 0:  # the coordinator's own driver is woken by `wake`, if it has to be
            self._ring()

    def _reclaim(self) -> None:
        done = min(counter.value for counter in self._rounds_done)
        with self._cuts_lock:
            while self._own_cuts and self._own_cuts[0][0] <= done:
                self._free_from = self._own_cuts.popleft()[1]

    def _ring(self) -> None:
        # Every member writes this word: values never repeat, so that a sleeper sees each change.
        self._num_bells += 1
        self._bells[0].store((self._num_bells & 0x7FFFFF) << 8 | (self._member & 0xFF))
        fence()
        if self._asleep.value:
            self._bells[0].wake()
