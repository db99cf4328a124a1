"""Point-to-point messages: `send`, and `receive` from one source or any, matched by group and tag.

Ranks of one host share a segment with a ring of bytes for each ordered pair. Ranks of different hosts use an encrypted
stream for each direction, opened with the first message. A message is a header and its bytes. A sender writes as much
as the ring has room for, and continues when the receiver has made room. The receiver copies bytes to the matching
receive, or buffers them until there is one. So messages of a pair with one tag arrive in the order in which they were
sent.

The native part moves the bytes of one host (`messages.h`). A message is sent at once if its ring has room, and received
at once if it has arrived. A waiting thread stays in the native part if nothing else is pending. Otherwise it makes
progress on everything that is pending, so that two ranks may send to each other and wait. A background thread moves
messages that no thread waits for, after a short delay in which one may start to wait.

Waiting in shared memory: each rank has a bell, a counter that a peer increments after it has written bytes, or has read
from a full ring. A rank reads its bell, checks its rings, announces that it sleeps, checks once more, and sleeps while
the bell is unchanged (`verify/messages.pml`).
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from hora.engine.request import Completion
from hora.engine.shm.counters import LINE_BYTES, SLICE_NS, Counter
from hora.engine.shm.native import SHORT_BYTES, MessageCall, PipeStruct, library, native_part, new_spin_policy
from hora.engine.shm.segment import Segment
from hora.engine.status import WorldStatus
from hora.engine.transport.stream import Incoming, Outgoing, poll
from hora.errors import HorovodInternalError
from hora.net.wire import Stream

_Bell = tuple[Counter, Counter]  # a rank's wake-up counter, and whether it sleeps

ANY_SOURCE = -1
_NO_GROUP = -1  # of a message that no receive may have
_HEADER = struct.Struct("<qqqq")  # group, tag, bytes, digest of shape and dtype
_pack = struct.Struct("<qqqqQq").pack_into  # fields of a `MessageCall`: header, address of the bytes, number moved
_CALL_AT = MessageCall.group.offset
_NAME = "messages"  # of the streams
_RINGS_BYTES = 64 * 2**20  # for all pairs of a host
_MOST_RING_BYTES, _LEAST_RING_BYTES = 2**20, 16 * 2**10
_PAIR_LINES = 4  # per pair, before its bytes: number of bytes written and read
_RANK_LINES = 4  # per rank: its bell, and whether it sleeps
_POLL_MS = 1
_MOST_AT_ONCE = 256 * 2**10  # the receiver reads the beginning of a longer message while the rest is being sent
_LEAST_LOOKS = 5000  # spins before a thread sleeps, if spinning has paid off: a woken peer takes this long to answer
_GRACE_S = 0.002  # delay in which a thread may start to wait for a message
_LONGEST_IDLE = 250  # idle delays before the background thread ends


class Message(Completion):
    """A message being sent or received. `memory`: the address of its bytes; `keep`: the owner of that memory.

    A completed receive has its `source`. `kind` is the dtype's number, which both ends must agree on. One that has
    arrived before its receive is a message without `sources` in a buffer.
    """

    def __init__(
        self, peer: int, group: int, tag: int, memory: tuple[int, int], kind: int, keep: object, sources: Sequence[int]
    ) -> None:
        super().__init__()
        self.peer, self.group, self.tag, self.kind = peer, group, tag, kind
        self.address, self.num_bytes = memory
        self.keep, self.sources = keep, sources
        self.source = peer
        self.head = ctypes.create_string_buffer(_HEADER.size)  # the header, while it is sent or received
        self.num_moved = 0  # header and bytes together
        self.ordinary = False  # another message arrived first

    def finish(self, error: HorovodInternalError | None = None) -> None:
        self.error = error
        self.run_last()
        self.done, self.keep = True, None
        if self.on_done is not None:
            self.call_back()

    @property
    def num_left(self) -> int:
        return _HEADER.size + self.num_bytes - self.num_moved

    def move(self, way: _Ring | Outgoing | Incoming) -> int:
        """Move what can be moved without waiting; returns the number of bytes."""
        before = self.num_moved
        if before < _HEADER.size:
            self.num_moved += way.move_bytes(ctypes.addressof(self.head) + before, _HEADER.size - before)
        done = self.num_moved - _HEADER.size
        if 0 <= done < self.num_bytes:
            self.num_moved += way.move_bytes(self.address + done, self.num_bytes - done)
        return self.num_moved - before

    def matches(self, peer: int, group: int, tag: int) -> bool:
        """Return whether this receive is for a message of `peer`."""
        return self.group == group and self.tag == tag and peer in self.sources


class _Ring:
    """One end of an ordered pair's ring, at `offset` of the host's segment. `bells`: this rank's and the other's."""

    def __init__(
        self, segment: Segment, offset: int, num_bytes: int, bells: Sequence[_Bell], patience: Any, *, receives: bool
    ) -> None:
        self._native = native_part()
        self._counters = written, read = [Counter(segment.memory, offset + at) for at in (0, 2 * LINE_BYTES)]
        (bell, asleep), (others_bell, other_asleep) = bells
        start = written.address + _PAIR_LINES * LINE_BYTES
        self._pipe = PipeStruct(
            written.address, read.address, start, num_bytes, others_bell.address, other_asleep.address
        )
        self._pipe_at = ctypes.addressof(self._pipe)
        self._call = MessageCall(
            pipe=ctypes.pointer(self._pipe), bell=bell.address, asleep=asleep.address, patience=patience
        )
        self._call.receives = receives
        self._call_at = ctypes.addressof(self._call)
        self.busy = threading.Lock()  # held by the thread that moves bytes

    def move_bytes(self, address: int, count: int) -> int:
        """Write as many bytes as there is room for, or read the available ones; returns their number."""
        if not self.busy.acquire(False):
            return 0
        try:
            return int(self._native.pipe_move(self._pipe_at, address, count, self._call.receives))
        finally:
            self.busy.release()

    def move_now(
        self, move: Callable[[int], int], group: int, tag: int, kind: int, address: int, num_bytes: int
    ) -> bool:
        """Move a whole message or none of it."""
        if not self.busy.acquire(False):
            return False
        try:
            _pack(self._call, _CALL_AT, group, tag, num_bytes, kind, address, 0)
            return move(self._call_at) == 1
        finally:
            self.busy.release()

    def move_waiting(self, message: Message) -> int:
        """Move a message for a slice of time, holding `busy`; returns the result of `hora_message`."""
        head = message.group, message.tag, message.num_bytes, message.kind
        _pack(self._call, _CALL_AT, *head, message.address, message.num_moved)
        try:
            return self._native.message(self._call_at, SLICE_NS)
        finally:
            message.num_moved = self._call.moved


class Messages:
    """This rank's messages. `near`: the ranks of this host in a common order, with their segment; `status_of` returns
    the status of a group, by number; `open_stream` and `accept_stream` return the streams with a name to and from a
    rank of another host; the latter raises TimeoutError without one.
    """

    def __init__(
        self,
        rank: int,
        near: Sequence[int],
        segment: Segment | None,
        status: WorldStatus,
        status_of: Callable[[int], WorldStatus],
        open_stream: Callable[[int, str], Stream],
        accept_stream: Callable[[int, str], Stream],
    ) -> None:
        self._rank, self._status, self._status_of = rank, status, status_of
        self._open_stream, self._accept_stream = open_stream, accept_stream
        self._segment = segment
        self._lock = threading.RLock()
        self._sending: dict[int, deque[Message]] = {}  # by destination
        self._receives: list[Message] = []  # waiting receives, in order
        self._arrivals: dict[int, deque[Message]] = {}  # per source, in order; the last may be incomplete
        self._next: dict[int, Message] = {}  # by source: the message whose header is to be read
        self._far: dict[tuple[int, bool], Outgoing | Incoming] = {}  # by rank, and whether it is outgoing
        self._out: dict[int, _Ring] = {}
        self._in: dict[int, _Ring] = {}
        self._bells: dict[int, _Bell] = {}
        self._num_waiting = self._num_direct = 0
        self._closed = ""
        self._in_background = False  # a thread makes progress
        self._patience = new_spin_policy(len(near))
        self._patience.many = max(self._patience.many, _LEAST_LOOKS)
        native = library()
        if segment is not None and native is not None:
            self._native = native
            self._lay_out(list(near), segment)

    @staticmethod
    def num_bytes(num_near: int) -> int:
        """Return the size of the segment for this many ranks of a host."""
        pair = _ring_bytes(num_near) + _PAIR_LINES * LINE_BYTES
        return num_near * _RANK_LINES * LINE_BYTES + num_near * num_near * pair

    def _lay_out(self, near: list[int], segment: Segment) -> None:
        size, mine = len(near), near.index(self._rank)
        ring_bytes = _ring_bytes(size)
        pair_bytes, pairs_at = ring_bytes + _PAIR_LINES * LINE_BYTES, size * _RANK_LINES * LINE_BYTES
        for index, rank in enumerate(near):
            at = index * _RANK_LINES * LINE_BYTES
            self._bells[rank] = Counter(segment.memory, at), Counter(segment.memory, at + 2 * LINE_BYTES)
        for index, rank in enumerate(near):
            if rank != self._rank:
                bells, patience = (self._bells[self._rank], self._bells[rank]), ctypes.pointer(self._patience)
                out_at, in_at = (pairs_at + pair * pair_bytes for pair in (mine * size + index, index * size + mine))
                self._out[rank] = _Ring(segment, out_at, ring_bytes, bells, patience, receives=False)
                self._in[rank] = _Ring(segment, in_at, ring_bytes, bells, patience, receives=True)

    # Sending and receiving.

    def send_now(self, peer: int, group: int, tag: int, kind: int, address: int, num_bytes: int) -> bool:
        """Send a message at once if its ring on this host has room; returns False if `send` is needed."""
        ring = self._out.get(peer)
        if ring is None or num_bytes > _MOST_AT_ONCE or self._sending.get(peer):
            return False
        if self._closed or not (self._status.is_open or self._status_of(group).is_open):
            return False
        move = self._native.short_try_send if num_bytes <= SHORT_BYTES else self._native.try_send
        return ring.move_now(move, group, tag, kind, address, num_bytes)

    def receive_now(self, peer: int, group: int, tag: int, kind: int, address: int, num_bytes: int) -> bool:
        """Receive a message at once if it is in a ring of this host, or arrives in a moment; returns False if `receive`
        is needed.
        """
        ring = self._in.get(peer)
        if ring is None or self._receives or self._closed or not self._is_between_messages(peer):
            return False
        return ring.move_now(self._native.try_receive, group, tag, kind, address, num_bytes)

    def _is_between_messages(self, peer: int) -> bool:
        """Return whether no message of this source is half read."""
        return not self._arrivals.get(peer) and (peer not in self._next or not self._next[peer].num_moved)

    def send(self, message: Message) -> None:
        """Start to send. The message is done when all of its bytes are written."""
        _HEADER.pack_into(message.head, 0, message.group, message.tag, message.num_bytes, message.kind)
        with self._lock:
            self._check_open()
            if not self._status.is_open:
                self._status_of(message.group).check_open()
            self._sending.setdefault(message.peer, deque()).append(message)
            self._progress()
        self._call_direct_waiter()

    def _check_open(self) -> None:
        if self._closed:
            raise HorovodInternalError(self._closed)

    def receive(self, message: Message) -> None:
        """Start to receive."""
        with self._lock:
            self._check_open()
            self._receives.append(message)
            if self._status.is_open and message.peer in self._in and self._is_alone(message):
                return  # it had not arrived a moment ago
            self._progress()  # messages that arrived before their sender left are received, too
            if not message.done and not self._status.is_open:
                status = self._status_of(message.group)
                if not status.is_open:
                    self._receives.remove(message)
                    raise status.error()
        self._call_direct_waiter()

    def _call_direct_waiter(self) -> None:
        """Wake a thread that waits in the native part for a single message: now there is another one."""
        if self._num_direct:
            self._native.add(self._bells[self._rank][0].address, 1)
            self.interrupt()

    def wait(self, message: Message, deadline: float) -> bool:
        """Wait for a message, making progress; returns whether it was done before the deadline."""
        with self._lock:
            self._num_waiting += 1
        try:
            while not message.done:
                if not self._move_alone(message):
                    self._turn()
                if not message.done and time.monotonic() > deadline:
                    return False
        finally:
            with self._lock:
                self._num_waiting -= 1
                if self._pending():
                    self.go_on()
        return True

    def _move_alone(self, message: Message) -> bool:
        """Wait in the native part for the only pending message; returns False if there is more to do, or nothing
        happened for a moment.
        """
        receives = bool(message.sources)
        ring = (self._in if receives else self._out).get(message.peer)
        with self._lock:
            if ring is None or message.ordinary or message.done or not self._is_alone(message):
                return False
            if not ring.busy.acquire(blocking=False):
                return False
            self._num_direct += 1
        state = 0
        try:
            state = ring.move_waiting(message)
        finally:
            with self._lock:
                self._num_direct -= 1
                ring.busy.release()
                self._record_moved(message, state)
        return state == 1

    def _is_alone(self, message: Message) -> bool:
        """Return whether this message is the only pending one."""
        num_sending = sum(map(len, self._sending.values()))
        if self._is_half_received():
            return False
        if message.sources:
            return not num_sending and self._receives == [message] and self._is_between_messages(message.peer)
        return not self._receives and num_sending == 1 and message in self._sending[message.peer]

    def _record_moved(self, message: Message, state: int) -> None:
        """Record what the native part has moved. Under the lock."""
        if message.done:  # failed meanwhile
            return
        if not message.sources:
            if state == 1:
                self._sending[message.peer].popleft().finish()
            return
        message.ordinary = state == -1
        if message.num_moved:
            self._receives.remove(message)
        if state == 1:
            message.finish()
        elif message.num_moved:
            self._arrivals.setdefault(message.peer, deque()).append(message)

    def cancel(self, message: Message, error: HorovodInternalError) -> None:
        """Cancel a message. A started one goes on without its owner, because the stream must reach its end."""
        with self._lock:
            if message.done:
                return
            orphan = copy(message)  # it keeps the memory alive
            orphan.on_done = orphan.last = None
            sending = self._sending.get(message.peer, deque())
            if message in self._receives:
                self._receives.remove(message)
            elif message in sending:
                at = sending.index(message)
                if message.num_moved or (at == 0 and message.peer not in self._out):
                    sending[at] = orphan
                else:
                    sending.remove(message)
            for some in self._arrivals.values():
                if some and some[-1] is message:
                    some[-1] = orphan
            message.finish(error)

    def go_on(self) -> None:
        """Make progress in the background on messages that no thread waits for."""
        if not self._in_background:
            with self._lock:
                if not self._in_background and not self._closed:
                    self._in_background = True
                    threading.Thread(target=self._run, name="hora-messages", daemon=True).start()

    def _run(self) -> None:
        idle = 0
        while True:
            time.sleep(_GRACE_S)  # for most messages a thread waits at once
            with self._lock:
                idle = idle + 1 if self._num_waiting or not self._pending() else 0
                if self._closed or idle > _LONGEST_IDLE:
                    self._in_background = False
                    return
            if not idle:
                with contextlib.suppress(HorovodInternalError):
                    self._turn()

    def _pending(self) -> bool:
        return bool(self._receives) or any(self._sending.values()) or self._is_half_received()

    def _is_half_received(self) -> bool:
        """Return whether a part of a message has arrived in the memory of its receive."""
        return any(some and some[-1].sources for some in self._arrivals.values())

    # Progress.

    def _turn(self) -> None:
        """Make progress if possible, or sleep for a moment."""
        mine = self._bells.get(self._rank)
        with self._lock:
            seen = 0 if mine is None else mine[0].value
            try:
                self._check_open()
                if not self._status.is_open:
                    self._end_with_groups()
                moved = self._progress()
            except HorovodInternalError as error:
                self._fail(error)
                return
            far = [*self._far.values()]
            lacking = any(peer not in self._in for peer in self._sources())
        if moved:
            return
        if mine is None or far or lacking:
            poll([end for end in far if end.queue or isinstance(end, Incoming)], _POLL_MS)
            return
        bell, asleep = mine
        self._native.add(asleep.address, 1)
        try:
            with self._lock:
                moved = self._progress()
            if not moved:
                bell.wait_beyond(seen)
        finally:
            self._native.add(asleep.address, -1)

    def _progress(self) -> bool:
        """Make progress without waiting. Under the lock."""
        moved = False
        for peer, queue in self._sending.items():
            while queue and self._push(peer, queue[0]):
                moved = True
                if not queue[0].num_left:
                    queue.popleft().finish()
        for receive in list(self._receives):
            moved |= self._match_kept(receive)
        for peer in self._sources():
            while self._pull(peer):
                moved = True
        return moved

    def _sources(self) -> list[int]:
        """Return the ranks to read from now. A message without a receive stays in its ring, unless it precedes one with
        a receive.
        """
        wanted = {source for receive in self._receives for source in receive.sources}
        unfinished = {peer for peer, some in self._arrivals.items() if some and some[-1].num_left}
        return sorted(wanted | unfinished)

    def _push(self, peer: int, message: Message) -> bool:
        """Write some bytes of a message; returns whether there was room."""
        try:
            return message.move(self._way(peer, outwards=True)) > 0
        except OSError as error:
            raise HorovodInternalError(f"rank {peer} cannot be reached: {error}") from error

    def _pull(self, peer: int) -> bool:
        """Read bytes from a source; returns whether there were any."""
        arrivals = self._arrivals.setdefault(peer, deque())
        last = arrivals[-1] if arrivals and arrivals[-1].num_left else None
        if last is None:
            if any(self._match_kept(receive) for receive in list(self._receives)):
                return True  # before the next message, which may have the same tag
            if not any(peer in receive.sources for receive in self._receives):
                return False
            last = self._next.get(peer) or Message(peer, _NO_GROUP, 0, (0, 0), 0, None, ())
            self._next[peer] = last  # a stream keeps its room until the header has arrived
        try:
            if not last.move(self._way(peer, outwards=False)):
                return False
        except TimeoutError:
            return False  # the source has not opened its stream yet
        except OSError as error:
            raise HorovodInternalError(f"rank {peer} cannot be reached: {error}") from error
        if last is self._next.get(peer) and not last.num_left:
            del self._next[peer]
            last = self._receive_for(peer, *_HEADER.unpack(last.head.raw))
            arrivals.append(last)
        if not last.num_left and (last.sources or last.group == _NO_GROUP):
            arrivals.pop()
            last.source = peer
            last.finish()
        return True

    def _receive_for(self, peer: int, group: int, tag: int, num_bytes: int, kind: int) -> Message:
        """Return the receive for the message with this header, or a buffer for it."""
        receive = next((one for one in self._receives if one.matches(peer, group, tag)), None)
        if receive is not None:
            self._receives.remove(receive)
            if not self._fits(receive, peer, num_bytes, kind):
                receive, group = None, _NO_GROUP
        if receive is None:
            buffer = ctypes.create_string_buffer(max(num_bytes, 1))
            receive = Message(peer, group, tag, (ctypes.addressof(buffer), num_bytes), kind, buffer, ())
        receive.num_moved = _HEADER.size
        return receive

    def _match_kept(self, receive: Message) -> bool:
        """Match a receive with a message that arrived before it."""
        for peer in receive.sources:
            arrivals = self._arrivals.get(peer, deque())
            for arrival in arrivals:
                if not arrival.sources and receive.matches(peer, arrival.group, arrival.tag):
                    if arrival.num_left:
                        break
                    arrivals.remove(arrival)
                    self._receives.remove(receive)
                    if self._fits(receive, peer, arrival.num_bytes, arrival.kind):
                        ctypes.memmove(receive.address, arrival.address, arrival.num_bytes)
                        receive.source = peer
                        receive.finish()
                    return True
        return False

    def _fits(self, receive: Message, peer: int, num_bytes: int, kind: int) -> bool:
        if receive.num_bytes == num_bytes and receive.kind == kind:
            return True
        what = f"{num_bytes} bytes" if num_bytes != receive.num_bytes else "a tensor of another dtype"
        receive.finish(
            HorovodInternalError(
                f"rank {peer} sent {what} with tag {receive.tag}, but rank {self._rank} receives {receive.num_bytes} "
                "bytes: send and receive tensors of one size and dtype"
            )
        )
        return False

    def _way(self, peer: int, *, outwards: bool) -> _Ring | Outgoing | Incoming:
        near = (self._out if outwards else self._in).get(peer)
        if near is not None:
            return near
        far = self._far.get((peer, outwards))
        if far is None:
            far = Outgoing(self._open_stream(peer, _NAME)) if outwards else Incoming(self._accept_stream(peer, _NAME))
            self._far[peer, outwards] = far
        return far

    # Shutdown.

    def interrupt(self) -> None:
        """Wake the sleeping thread so that it rechecks the world's status. Any thread."""
        mine = self._bells.get(self._rank)
        if mine is not None:
            with contextlib.suppress(AttributeError):
                mine[0].wake()

    def _fail(self, error: HorovodInternalError) -> None:
        messages = [*self._receives, *(one for queue in self._sending.values() for one in queue)]
        self._receives.clear()
        self._sending.clear()
        for some in self._arrivals.values():
            messages += [arrival for arrival in some if arrival.sources]
        self._arrivals.clear()
        for message in messages:
            message.finish(error)

    def _end_with_groups(self) -> None:
        """Fail the messages of groups that have ended with the world. Those of groups whose members live go on."""
        halves = [some[-1] for some in self._arrivals.values() if some and some[-1].sources]
        for message in [*self._receives, *halves, *(one for some in self._sending.values() for one in some)]:
            try:
                self._status_of(message.group).check_alive()
            except HorovodInternalError as error:
                self.cancel(message, error)

    def close(self, why: str) -> None:
        """Fail all pending messages, and release memory and streams."""
        with self._lock:
            if self._closed:
                return
            self._closed = why
            self._fail(HorovodInternalError(why))
            for far in self._far.values():
                far.close()
        self.interrupt()


def _ring_bytes(num_near: int) -> int:
    each = _RINGS_BYTES // max(num_near * num_near, 1)
    return max(min(each, _MOST_RING_BYTES), _LEAST_RING_BYTES) // LINE_BYTES * LINE_BYTES
