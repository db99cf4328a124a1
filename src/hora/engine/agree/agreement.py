"""Agreement: every member of a process set learns the same announcements in the same rounds.

Inside one host (`ShmAgreement`) each member owns a ring of announcements in shared memory, which the others read. The
first member is the coordinator: whenever something has become ready it publishes a cut, that is how far into every ring
the round reaches. Nobody polls on a timer: a member with news rings the coordinator's bell, the coordinator's round
number wakes the members. Across hosts `hub` carries the same announcements (`HubAgreement`).

What is announced is in `announcement`.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from hora.engine.agree.announcement import RECORD, Announcer, Reader
from hora.engine.plan import Batch, Planner
from hora.engine.request import Kind, Signature
from hora.engine.shm.futex import LINE_BYTES, Counter
from hora.engine.shm.segment import Segment, aligned

__all__ = ["Agreement", "LocalAgreement", "HubAgreement", "ShmAgreement"]


# How long the coordinator holds back news of some members in the hope that the others announce the same.
_PATIENCE_S = 0.2


class Agreement(Protocol):
    """One per process set. `announce` comes from any thread under the queue's lock, the rest from the driver."""

    @property
    def holds_back(self) -> bool:
        """Whether announcements could not be sent for lack of room; `flush` tries again."""

    def announce(self, signature: Signature, instance: int) -> None:
        """Tell the other members about a request of this rank."""

    def poll(self, planner: Planner) -> list[Batch] | None:
        """Feed what is new to the planner; the batches of the next round, or None when there is no new round."""

    def wait(self) -> None:
        """Sleep until something may have changed, or for a short while."""

    def wake(self) -> None:
        """Wake this rank's own driver."""

    def flush(self) -> None:
        """Send what could not be sent before. Under the same lock as `announce`."""

    def close(self) -> None:
        """Let go of what it holds."""


class LocalAgreement:
    """A set of one member: whatever it announces is agreed."""

    holds_back = False

    def __init__(self) -> None:
        self._news: deque[tuple[Signature, int]] = deque()

    def announce(self, signature: Signature, instance: int) -> None:
        self._news.append((signature, instance))

    def poll(self, planner: Planner) -> list[Batch] | None:
        if not self._news:
            return None
        while self._news:
            planner.feed(0, *self._news.popleft())
        return planner.close_round()

    def wait(self) -> None:
        """Nothing to wait for: an announcement is ready at once."""

    def wake(self) -> None:
        """Nobody sleeps."""

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """Nothing is held."""


def _is_simple(signature: Signature) -> bool:
    """Whether a round of nothing but this request, announced by all, needs no planning."""
    if signature.kind == Kind.ALLREDUCE:
        return len(signature.dtypes) == 1
    return signature.kind == Kind.BARRIER or (signature.kind == Kind.REDUCESCATTER and bool(signature.extra))


class ShmAgreement:
    """Agreement through a segment that all members map.

    Layout: per member one line each for head (bytes announced), rounds (rounds done) and bell; one line for the round
    number; a ring of cuts (vectors of 64-bit positions); one ring of announcements per member. Positions never wrap.
    """

    RING_BYTES = 512 * 1024
    _NUM_CUTS = 64

    def __init__(self, segment: Segment, member: int, num_members: int, *, cache_capacity: int) -> None:
        line, memory = LINE_BYTES, segment.memory
        self._member = member
        self._num_members = num_members
        self._memory = memoryview(memory)
        self._heads = [Counter.at(memory, (3 * m) * line) for m in range(num_members)]
        self._rounds_done = [Counter.at(memory, (3 * m + 1) * line) for m in range(num_members)]
        self._bells = [Counter.at(memory, (3 * m + 2) * line) for m in range(num_members)]
        self._round = Counter.at(memory, 3 * num_members * line)
        self._cuts_at = (3 * num_members + 1) * line
        self._cut = struct.Struct(f"<{num_members}q")
        self._rings_at = self._cuts_at + aligned(self._NUM_CUTS * self._cut.size, line)
        self._announcer = Announcer(cache_capacity)
        interned: dict[Signature, Signature] = {}
        self._readers = [Reader(interned) for _ in range(num_members)]
        self._fed = [0] * num_members  # how far each ring has been fed to the planner
        self._published = [0] * num_members  # the last cut
        self._rounds = 0
        self._head = 0
        self._free_from = 0  # everything of the own ring before this position has been read by all
        # (round, own position) not yet known to be read by all. Old ones may be dropped: later ones imply them.
        self._own_cuts: deque[tuple[int, int]] = deque(maxlen=512)
        self._cuts_lock = threading.Lock()  # a round is ended by the driver, room is reclaimed by whoever announces
        self._overflow = bytearray()
        self._num_bells = 0
        self._bell_seen = 0
        self._patient_since = 0.0

    @classmethod
    def num_bytes(cls, num_members: int) -> int:
        """How large a segment must be."""
        cuts = aligned(cls._NUM_CUTS * 8 * num_members, LINE_BYTES)
        return (3 * num_members + 1) * LINE_BYTES + cuts + num_members * cls.RING_BYTES

    @property
    def holds_back(self) -> bool:
        return bool(self._overflow)

    def announce(self, signature: Signature, instance: int) -> None:
        data = self._announcer.encode(signature, instance)
        if self._overflow:
            self._overflow += data
        else:
            self._write(data)

    def poll(self, planner: Planner) -> list[Batch] | None:
        return self._lead(planner) if self._member == 0 else self._follow(planner)

    def flush(self) -> None:
        """Place announcements for which there was no room before. Under the same lock as `announce`."""
        if self._overflow:
            data = bytes(self._overflow)
            self._overflow.clear()
            self._write(data)

    def wait(self) -> None:
        if self._member == 0:
            self._bells[0].wait_beyond(self._bell_seen)
        else:
            self._round.wait_beyond(self._rounds)

    def wake(self) -> None:
        if self._member == 0:
            with contextlib.suppress(IndexError):  # closed meanwhile: the hub's thread wakes queues until it ends
                self._ring()

    def close(self) -> None:
        """Let go of the memory. Nobody waits any more, though a `wake` may still come."""
        self._memory.release()
        self._heads, self._rounds_done, self._bells = [], [], []
        del self._round

    def _lead(self, planner: Planner) -> list[Batch] | None:
        # The bell is read before the heads: news that comes after the heads were read changes it, and `wait` returns.
        self._bell_seen = self._bells[0].value
        heads = [head.value for head in self._heads]
        if planner.idle and self._cut_is_free():
            same = self._same_record(heads)
            if same is not None:
                self._patient_since = 0.0
                self._publish()
                return self._end_round(planner.plan_one(*same))
            if self._may_become_same(heads):
                return None
        self._feed(planner, heads)
        if not planner.has_ready and not self._filled():
            return None
        if not self._cut_is_free():
            return None
        self._publish()
        return self._end_round(planner.close_round())

    def _publish(self) -> None:
        self._rounds += 1
        self._published = list(self._fed)
        self._cut.pack_into(self._memory, self._cut_offset(), *self._fed)
        self._round.set(self._rounds)

    def _follow(self, planner: Planner) -> list[Batch] | None:
        if self._round.value == self._rounds:
            return None
        self._rounds += 1
        cut = self._cut.unpack_from(self._memory, self._cut_offset())
        same = self._same_record(cut) if planner.idle else None
        if same is not None:
            return self._end_round(planner.plan_one(*same))
        self._feed(planner, cut)
        return self._end_round(planner.close_round())

    def _same_record(self, upto: Sequence[int]) -> tuple[Signature, int] | None:
        """The request, if the news up to there is that every member announces the same known simple one."""
        fed, at = self._fed, self._rings_at
        same: tuple[Signature, int] | None = None
        for member, position in enumerate(fed):
            if upto[member] - position != RECORD.size:
                return None
            number, instance = RECORD.unpack_from(self._memory, at + position % self.RING_BYTES)
            signature = self._readers[member].known(number)
            if signature is None or not _is_simple(signature):
                return None
            if same is None:
                same = (signature, instance)
            elif signature is not same[0] or instance != same[1]:
                return None
            at += self.RING_BYTES
        self._fed[:] = upto
        return same

    def _may_become_same(self, heads: Sequence[int]) -> bool:
        """Whether to wait a moment before feeding the news, because the others' may make it a round of one request."""
        fed, missing = self._fed, False
        for member, head in enumerate(heads):
            if head == fed[member]:
                missing = True
            elif head - fed[member] != RECORD.size:
                return False
        now = time.monotonic()
        if not self._patient_since or now - self._patient_since > 2 * _PATIENCE_S:
            self._patient_since = now
        return missing and now - self._patient_since < _PATIENCE_S

    def _end_round(self, batches: list[Batch]) -> list[Batch]:
        with self._cuts_lock:
            self._own_cuts.append((self._rounds, self._fed[self._member]))
        self._rounds_done[self._member].store(self._rounds)
        return batches

    def _filled(self) -> bool:
        # Rounds without a batch keep a ring from filling up with announcements that wait for a slow member.
        return sum(self._fed) - sum(self._published) > self.RING_BYTES // 4

    def _cut_offset(self) -> int:
        return self._cuts_at + (self._rounds % self._NUM_CUTS) * self._cut.size

    def _cut_is_free(self) -> bool:
        return min(done.value for done in self._rounds_done) > self._rounds + 1 - self._NUM_CUTS

    def _feed(self, planner: Planner, upto: Sequence[int]) -> None:
        fed = self._fed
        for member in range(self._num_members):
            if upto[member] > fed[member]:
                data = self._read(member, fed[member], upto[member])
                fed[member] = upto[member]
                for signature, instance in self._readers[member].decode(data):
                    planner.feed(member, signature, instance)

    def _read(self, member: int, start: int, stop: int) -> bytes:
        size = self.RING_BYTES
        at = self._rings_at + member * size
        low, high = start % size, (stop - 1) % size + 1
        if low < high:
            return bytes(self._memory[at + low : at + high])
        return bytes(self._memory[at + low : at + size]) + bytes(self._memory[at : at + high])

    def _write(self, data: bytes) -> None:
        size = self.RING_BYTES
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
        self._head += len(data)
        self._heads[self._member].store(self._head)
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
        self._bells[0].set((self._num_bells & 0x7FFFFF) << 8 | (self._member & 0xFF))


class HubAgreement:
    """Agreement of a set that spans hosts: rank 0's hub gives all members the same rounds."""

    _SLICE_S = 0.05

    holds_back = False

    def __init__(self, send: Callable[[bytes], None], num_members: int, *, cache_capacity: int) -> None:
        self._send = send
        self._announcer = Announcer(cache_capacity)
        interned: dict[Signature, Signature] = {}
        self._readers = [Reader(interned) for _ in range(num_members)]
        self._rounds: deque[list[tuple[int, bytes]]] = deque()
        self._changed = threading.Condition()

    def deliver(self, parts: list[tuple[int, bytes]]) -> None:
        """A round has come, on the hub's thread."""
        with self._changed:
            self._rounds.append(parts)
            self._changed.notify_all()

    def announce(self, signature: Signature, instance: int) -> None:
        self._send(self._announcer.encode(signature, instance))

    def poll(self, planner: Planner) -> list[Batch] | None:
        if not self._rounds:
            return None
        for member, data in self._rounds.popleft():
            for signature, instance in self._readers[member].decode(data):
                planner.feed(member, signature, instance)
        return planner.close_round()

    def flush(self) -> None:
        """Nothing is kept back."""

    def wait(self) -> None:
        with self._changed:
            if not self._rounds:
                self._changed.wait(self._SLICE_S)

    def wake(self) -> None:
        """A round wakes the driver; an announcement of its own comes back as one."""

    def close(self) -> None:
        """Nothing is held."""
