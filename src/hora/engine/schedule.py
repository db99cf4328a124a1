"""A schedule: reductions that the members of a set execute in a fixed order, step after step, without negotiation.

When the members have agreed on buckets, they create them together in shared memory, with a schedule. From then on a
step is every bucket, in that order, on every member. Only the time of arrival can differ between members, so members
publish nothing else. Item number n is bucket (n - 1) modulo their number. The values of a member's counter:

    2 n       its data of item n is in place
    2 n + 1   it has done its part of item n (only if the members must wait for that: a slice of the result)
    OPEN      it has joined; beside the counter is the number of its last item: it is absent for later ones

    started --the items before it were started too--> published --all members have published it--> reduced --> done

Members cannot decide differently: an item is reduced when every member has published it or is absent for it. Neither
changes until every member has moved on to the next item, and a joining member's absence depends only on the number that
it wrote before. If one member has reduced an item, all have published it, and any other member can reduce it too, even
after its owner has left or died, because the data is in shared memory. A wait for a member ends with an error when the
world closes or breaks, and a long wait is reported with the late rank. `verify/schedule.pml` models this.

A background thread or a thread that waits for a result makes progress, never the driver of the queue: the late member
may first need an operation of this member's queue.

The items are `PersistentReduction`s, which the optimizer's buckets `start` when their data is in place and `wait` for.
An item is executed in one of two ways:

    scheduled    in order, without a message (`execute_scheduled`), when the members that share this memory have arrived
    negotiated   as a request that all members announce (`execute_negotiated`), including a rank that has joined

`execute_scheduled` returns False if the item is void: nothing changed, every member gets the same answer, and the item
is negotiated. That does not happen on one host. Over several hosts, each host has a schedule with a link to the other
hosts (`transport.host_reduction`): their messages name the item, so that a host notices if another one has a different
item.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any

import torch

from hora.engine.plan import Batch, Part
from hora.engine.progress import ProgressEngine
from hora.engine.queue import OperationQueue, same_name
from hora.engine.request import KINDS, Key, Kind, Reduce, Request, Signature, dtype_name, full_names
from hora.engine.shm.counters import LINE_BYTES, MEMBER_BYTES, OPEN, Counter, Counters
from hora.engine.shm.segment import Segment
from hora.engine.status import StallLimits, report_stall
from hora.errors import HorovodInternalError
from hora.telemetry.meters import meter


@dataclass(slots=True, eq=False)
class Item:
    """One reduction of one step; without a reduction a barrier, or the end of this member's part."""

    reduction: PersistentReduction | None
    name: str
    number: int = 0  # 0: earlier items have not been started
    absent: Sequence[int] = ()  # members that have joined
    error: HorovodInternalError | None = None
    done: bool = False


class ReductionSchedule(ProgressEngine):
    """This rank's end of a schedule. `offset`: position of the members' counters, initially zero, in the segment.
    `near`: the members that share this memory, if not all of them do.
    """

    def __init__(
        self,
        queue: OperationQueue,
        segment: Segment,
        offset: int,
        *,
        limits: StallLimits | None,
        near: Sequence[int] | None = None,
    ) -> None:
        self._items: deque[Item] = deque()
        super().__init__(f"hora-schedule-{queue.process_set_id}", queue.world.core, queue.ranks, self._items)
        near = range(len(queue.ranks)) if near is None else near
        ranks = [queue.ranks[member] for member in near]
        self.queue = queue
        self.member = member = list(near).index(queue.member)
        self.ranks = tuple(ranks)
        self._limits = limits
        self._counters = Counters(segment.memory, offset, member, len(ranks))
        places = [offset + peer * MEMBER_BYTES + LINE_BYTES for peer in range(len(ranks))]
        self._came = [Counter(segment.memory, place) for place in places]  # number of items before a member joined
        self._left = [Counter(segment.memory, place + 8) for place in places]  # number of joins
        self._void = [Counter(segment.memory, place + 16) for place in places]  # the last void item
        self.link: Any = None  # with other hosts (`HostLink`), if there are any
        self._leaving = Item(None, "join")  # the end of this member's part
        self._reductions: list[tuple[PersistentReduction, str]] = []  # with their names in messages
        self._next = 0  # the index of the next reduction to start
        self._started: dict[int, Item] = {}  # by index, before their turn
        self._num_items = 0  # numbered items
        self._waiting_since = self._warned = 0.0
        self._closed = False
        queue.schedules.add(self)

    @staticmethod
    def num_bytes(num_members: int) -> int:
        """Return the size of a schedule in shared memory."""
        return num_members * MEMBER_BYTES

    def add(self, reduction: PersistentReduction) -> int:
        """Append a reduction to the schedule, before the first step; returns its index."""
        self._reductions.append((reduction, full_names(*reduction.signature.key(0), 1)[0]))
        return len(self._reductions) - 1

    def wake(self) -> None:
        """Do nothing: counters wake the driver, which rechecks the status within a moment."""

    def keys_in_flight(self) -> list[Key]:
        return [item.reduction.signature.key(0) for item in [*self._items] if item.reduction is not None]

    def has_started(self, key: Key, number: int) -> bool:
        """Return whether this member has started item `number`, which is this reduction's. Thread-safe."""
        return number <= self._num_items and any(one.signature.key(0) == key for one, _ in self._reductions)

    def late_for(self, item: Item) -> list[int] | None:
        """Return the members that this one waits for before it reduces an item; empty if they are on other hosts. None
        if it waits for none. Thread-safe.
        """
        if self._closed:
            return None
        near = [self.queue.ranks.index(self.ranks[peer]) for peer in self._counters.missing(2 * item.number)]
        return None if not near and self.link is None else near

    # Called by one thread at a time, the training thread.

    def turn(self, index: int, num_turns: int) -> int:
        """Return which of `num_turns` places receives the data of this reduction's next item."""
        return self.turn_of(self._num_items + index - self._next + 1, num_turns)

    def turn_of(self, number: int, num_turns: int) -> int:
        """Return which place holds the data of item `number`."""
        return (number - 1) // len(self._reductions) % num_turns

    def start(self, index: int, *, background: bool) -> Item:
        """Start a reduction whose data on this rank is in place; it runs after all earlier reductions have been
        started. Without `background` only `wait` drives it.
        """
        if self._closed or not self.queue.status.is_open:
            self.queue.check_open()
        item = self._started[index] = Item(*self._reductions[index])
        while (ready := self._started.pop(self._next, None)) is not None:
            self._submit(ready)
            self._next = (self._next + 1) % len(self._reductions)
        if background and self._items:
            self.wake_background()
        return item

    def wait(self, item: Item) -> None:
        """Wait for an item; drive the schedule unless another thread does."""
        if not item.done:
            assert item.number, f"{item.name} is waited for before those that come before it were started"
            super().wait(item)
        if item.error is not None:
            raise HorovodInternalError(*item.error.args)

    def meet(self, name: str) -> Sequence[int]:
        """Wait for every member, after everything that was started before; returns the members that have joined."""
        self.queue.check_open()
        item = Item(None, name)
        self._submit(item)
        self.wait(item)
        return item.absent

    def leave(self) -> None:
        """Leave the schedule because this rank joins: the others do not wait for it after its started items."""
        if self._closed:
            return
        self._started.clear()
        self._next = 0
        self._leaving = Item(None, "join")
        self._items.append(self._leaving)
        self.wake_background()

    def finish_leaving(self) -> None:
        """Wait until no item will be announced any more, so that this rank may announce its join."""
        item = self._leaving
        while self.link is not None and not self._closed and not item.done:
            self.drive_or_wait(item)
        if item.error is not None and not self._closed:
            raise HorovodInternalError(*item.error.args)

    def come_back(self) -> None:
        """Resume after all members have left. No member may start an item before all have returned."""
        # The garbage collector may close this schedule at any time, on any subset of ranks, even during this method.
        counters = self._left
        if self._closed:
            return
        left = counters[self.member].value + (self._leaving in [*self._items])
        if self._closed:
            return
        for peer, counter in enumerate(counters):
            what = f"member {peer} of a schedule to join"
            counter.wait_for(left, check_alive=self.queue.status.check_alive, what=what)
        self.driving.acquire()  # every member has left, so nothing is driven
        self.driver = get_ident()
        try:
            if not self._closed:
                self._num_items = max(counter.value for counter in self._came)
                self._counters.publish(2 * self._num_items)
        finally:
            self.driver = 0
            self.release()

    def _submit(self, item: Item) -> None:
        self._num_items += 1
        item.number = self._num_items
        self._items.append(item)

    # Progress. Everything in this part runs under the progress lock.

    def _step(self) -> None:
        """Wait for the others and reduce. A wait that Ctrl-C interrupts can be repeated."""
        item, queue = self._items[0], self.queue
        if item is self._leaving:
            self._leave()
        else:
            value, self._waiting_since, self._warned = 2 * item.number, 0.0, 0.0
            # Unlike an agreed operation, this one has not begun: after a goodbye the others will not arrive.
            look_around = partial(self._look_around, value)
            if self._counters.meet(value, look_around, what="a reduction"):
                joined = [peer for peer, counter in enumerate(self._counters.counters) if counter.value == OPEN]
                item.absent = [peer for peer in joined if self._came[peer].value < item.number]
            reduction = item.reduction
            if reduction is not None:
                began = time.perf_counter()
                try:
                    recorded = queue.recorder.timeline is not None
                    execute = self._execute_recorded if recorded else reduction.execute_scheduled
                    if not execute(item.number, item.absent):
                        self._execute_negotiated(item, reduction)
                except BaseException as error:
                    queue.broke(error)
                    raise
                meter.transport_s += time.perf_counter() - began
                meter.num_bytes += reduction.num_bytes
        self._items.popleft()
        item.done = True
        if self.num_waiters:
            self.notify_waiters()
        if queue.status.closing:
            queue.idle_if_closing()

    def _execute_recorded(self, number: int, absent: Sequence[int]) -> bool:
        """Execute the first item while a timeline is written."""
        reduction, recorder = self._items[0].reduction, self.queue.recorder
        assert reduction is not None
        signature = reduction.signature
        part = Part(signature.key(0), 0, (signature,))
        recorder.arrived(self.queue.member, part.key, signature)
        way = "shm" if self.link is None else "shm+tcp"
        with recorder.batch(Batch(KINDS[signature.kind], signature, [part]), way):
            return reduction.execute_scheduled(number, absent)

    def _execute_negotiated(self, item: Item, reduction: PersistentReduction) -> None:
        try:
            reduction.execute_negotiated(item.number)
        except HorovodInternalError as error:
            if not self.queue.status.is_open:
                raise
            item.error = error  # of all members, for this item alone

    def end_together(self, number: int, *, void: bool = False) -> bool:
        """Wait until every member has done its part of an item; returns whether no member found it void."""
        if void:
            self._void[self.member].store(number)
        self._counters.meet(2 * number + 1, self.queue.status.check_alive, what="a reduction")
        return self.link is None or number not in [counter.value for counter in self._void]

    def _look_around(self, value: int) -> None:
        """Check the status while this member waits: raise if waiting is pointless, and report late members."""
        self.queue.check_open()
        self._watch(lambda: [self.ranks[peer] for peer in self._counters.missing(value)])

    def look_beyond(self, late: Callable[[Key], Sequence[int]]) -> None:
        """Do the same while this member waits for other hosts, which may have done their part.

        `late(key)`: the members of the set that have not reached this item.
        """
        self.queue.status.check_alive()
        reduction = self._items[0].reduction
        if reduction is None:
            return  # this member leaves, and waits for no one
        key = reduction.signature.key(0)
        self._watch(lambda: [self.queue.ranks[member] for member in late(key)])

    def _watch(self, find_late: Callable[[], list[int]]) -> None:
        if self.stopping:
            raise self._error()
        now, limits = time.monotonic(), self._limits
        if not self._waiting_since:
            self._waiting_since = self._warned = now
        if limits is None or not limits.warning_s or now - self._warned < limits.warning_s:
            return
        self._warned = now
        if late := find_late():
            doomed = limits.shutdown_s and now - self._waiting_since > limits.shutdown_s
            names = {rank: [self._items[0].name] for rank in late}
            report_stall(limits, names, late if doomed else (), self.queue.status)

    def _leave(self) -> None:
        member = self.member
        if self.link is not None:
            self.link.leave(tell=True)
        self._came[member].store(self._num_items)
        self._counters.publish(OPEN)
        self._left[member].set(self._left[member].value + 1)

    def _fail(self, error: HorovodInternalError) -> None:
        failed = [*self._started.values()]
        while self._items:
            failed.append(self._items.popleft())
        for item in failed:
            item.error, item.done = error, True
        self.notify_waiters(all_threads=True)
        self.queue.idle_if_closing()

    def _error(self) -> HorovodInternalError:
        return self.queue.status.error()

    # Shutdown. Thread-safe.

    def close(self) -> None:
        """End the background thread, fail items in progress, release the memory."""
        if self._closed:
            return
        self._closed = True
        self.queue.schedules.discard(self)
        for counter in self._left[self.member : self.member + 1]:
            counter.set(OPEN)  # the others' join does not wait for this member
        self._end()

    def _put_away(self) -> None:
        self._counters.close()
        self._came, self._left, self._void = [], [], []
        if self.link is not None:
            self.link.close()


class PersistentReduction:
    """A reduction of the same memory in every step, set up once by all members: `SharedMemoryReduction` on one host,
    `HostReduction` over several. `mine` is this rank's data, and the result of an allreduce in place; `out` is the
    result otherwise.

    All members must create it before one starts it. In a step: idle --`start`--> in flight --`wait`--> idle.
    """

    def __init__(
        self,
        schedule: ReductionSchedule,
        kind: Kind,
        mine: torch.Tensor,
        *,
        name: str,
        reduce: Reduce,
        out: torch.Tensor | None = None,
    ) -> None:
        self.schedule = schedule
        self.out = out
        self.num_bytes = mine.nbytes
        what = (int(kind), kind.name.lower(), name)
        self.signature = Signature(*what, (dtype_name(mine.dtype),), ((mine.numel(),),), reduce, bound=True)
        self._name = name
        self._mine = mine
        self._index = schedule.add(self)
        self._started: Item | None = None

    @property
    def in_flight(self) -> bool:
        """Return whether it was started and not yet waited for."""
        return self._started is not None

    @property
    def done(self) -> bool:
        """Return whether it was started and `wait` would return at once."""
        return self._started is not None and self._started.done

    def start(self, *, background: bool) -> None:
        """Start the reduction: this rank's data is in place. Without `background` only `wait` drives it."""
        if self._started is not None and not self._started.done:
            raise ValueError(same_name(self.signature.key(0)))
        self._started = self.schedule.start(self._index, background=background)

    def wait(self) -> torch.Tensor:
        """Wait for the result and return it; starts the reduction if necessary."""
        if self._started is None:
            self.start(background=False)
        started, self._started = self._started, None
        assert started is not None, self._name
        self.schedule.wait(started)
        return self._mine if self.out is None else self.out

    def release(self) -> None:
        """Release it and its schedule with all items; the memory is freed with its last view."""
        self.schedule.queue.bound.pop(self._name, None)
        self.schedule.close()

    def execute_negotiated(self, number: int) -> None:
        """Negotiate the reduction with all members, and wait until it is done."""
        request = Request(self.signature, (self._mine,))
        self.schedule.queue.submit(request, background=False)
        request.result()

    def execute_scheduled(self, number: int, absent: Sequence[int]) -> bool:
        """Execute item `number` of the schedule without the members that have joined; returns False if it is void."""
        return False
