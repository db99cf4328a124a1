"""Negotiation of a set that spans hosts: announcements go up a tree of the members, rounds come down.

The set has its own tree (`hora.engine.control_tree`) of members only: the first member of each host speaks for its
host, and the first member of all is the root. Each member waits until all members at or below it have announced a
request, and then reports it once to its parent. So a member receives one message per child and sends one, for any
number of ranks. A request that is complete at the root is agreed: it goes down unchanged to all members as one round,
in the same order for all.

Messages, over the control tree's links, which keep their order:

    up      from a child: parts (who, announcements). Who is ALL: every member at or below the child has announced this;
            SLOTS: the same for known requests, as a bit vector; or a single member otherwise
    round   from the parent, created by the root: parts of the same form, of all members

A named request that all have agreed on once is identified by a slot from then on, the same on all members because all
see the same rounds. Known requests are bits: a member ANDs its children's vectors with its own and forwards the result.
A slot stands for one signature. A member that announces another signature under its name sends it in full, and the
request is held like a new one.

States of a request at a member:

    absent --announced by some below--> held
    held   --announced by all below---> absent, forwarded: as ALL if all have the same signature
    held   --OLD_S, or a member joins-> apart, what is known is forwarded member by member
    apart  --announced by more--------> apart, forwarded
    apart  --announced by all---------> absent

So a request that ranks disagree about, or that some never announce, still reaches the root with everything known about
it: there the planner finds the mismatch, and the stall report the missing ranks. From the first join until all have
joined no member holds anything back: everything is forwarded member by member, and the planners decide.

Invariants: announcements of one member reach the planners in its own order where that matters, because everything held
is forwarded before a member's JOIN. Everything in a round was forwarded by every member that it names. The planners of
all members are fed the same rounds.

A late member whose process is alive still forwards others' announcements, on the control tree's thread. A stopped one
cannot; but as it is a member, the requests held up behind it could not be agreed anyway. Only the stall report would
name too many ranks: before the root reports ranks behind a missing one, it asks them directly.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import inf
from operator import and_, or_

from hora.engine.control_tree import ControlTree, Whereabouts
from hora.engine.negotiation.base import Announcer, Negotiation, Reader, WaitingRequests
from hora.engine.plan import Batch, BatchPlanner
from hora.engine.rank_tree import Tree
from hora.engine.request import Key, Kind, Signature
from hora.net.wire import Header, cut_parts, join_parts

ALL = 0xFFFFFFFF  # instead of a rank: every member at or below the sender
SLOTS = 0xFFFFFFFE  # the same, with a bit vector of slots as the announcement
_NUM_SLOTS = 1024
OLD_S = 1.0
_SLICE_S = 0.05

Announced = tuple[int, Signature, int]  # who (a rank, or ALL), what, its running number


@dataclass(slots=True)
class _Held:
    """A request that not all members at or below this one have announced."""

    instance: int
    since: float
    apart: bool = False
    # By the child, or this rank, below which all have announced it
    whole: dict[int, Signature] = field(default_factory=dict)
    parts: dict[int, Signature] = field(default_factory=dict)  # by rank, for the others


class Slots:
    """Known requests by slot, in the order of the rounds that introduced them. Slots are never reused."""

    def __init__(self) -> None:
        self.signatures: list[Signature] = []
        self._bits: dict[Key, int] = {}

    def learn(self, signature: Signature) -> None:
        """Add a request that all members have agreed on."""
        key = signature.key(0)
        if signature.name is not None and key not in self._bits and len(self.signatures) < _NUM_SLOTS:
            self.signatures.append(signature)
            self._bits[key] = 1 << (len(self.signatures) - 1)

    def bit(self, signature: Signature) -> int:
        """Return the bit of a known request, 0 for any other. Thread-safe."""
        bit = self.bit_of_key(signature.key(0))
        return bit if bit and self.signatures[bit.bit_length() - 1] == signature else 0

    def bit_of_key(self, key: Key) -> int:
        return self._bits.get(key, 0)

    def of(self, bits: int) -> list[Signature]:
        """Return the requests with these bits."""
        found = []
        while bits:
            found.append(self.signatures[(bits & -bits).bit_length() - 1])
            bits &= bits - 1
        return found


class Collector:
    """Announcements known at and below a member.

    Pure: `add`, `add_slots` and `pass_on` return what to send to the parent, or from the root to all, in this order.
    """

    def __init__(self, tree: Tree, rank: int, slots: Slots) -> None:
        self._below = {child: tree.below(child) for child in tree.children(rank)} | {rank: [rank]}
        self._num_below = sum(map(len, self._below.values()))
        self._slots = slots
        self._bits = dict.fromkeys(self._below, 0)  # announced by all below a child, but not by all at or below here
        self._held: dict[Key, _Held] = {}  # all other such requests
        self._held_bits = 0  # slots of those, if they have one
        self._bits_before = 0  # already waiting at the last `hold_old_slots`
        self.joining = False  # a member has joined, but not all have

    def may_speak(self, child: int, who: int) -> bool:
        """Return whether that rank is below this child."""
        return who == ALL or who in self._below[child]

    def add(self, child: int, announced: Announced, now: float) -> list[Announced]:
        """Add an announcement of a child, or of this rank itself as one."""
        who, signature, instance = announced
        if signature.kind == Kind.JOIN:
            passed = [] if self.joining else self.hold_nothing()
            return [*passed, *self._each(child, who, signature, instance)]
        if self.joining:
            return self._each(child, who, signature, instance)
        key = signature.key(instance)
        held = self._held.get(key) or self._hold(key, instance, now)
        if who == ALL:
            held.whole[child] = signature
        else:
            held.parts[who] = signature
        if held.apart:
            passed = self._each(child, who, signature, instance)
            if self._complete(held):
                self._forget(key)
            return passed
        if not self._complete(held):
            return []
        self._forget(key)
        if not held.parts and all(other == signature for other in held.whole.values()):
            return [(ALL, signature, instance)]
        return self._split(held)

    def add_slots(self, child: int, bits: int, now: float) -> tuple[int, list[Announced]]:
        """Add slots that a child has announced. Returns those that are complete now, and what else to forward."""
        apart = bits if self.joining else bits & self._held_bits
        self._bits[child] |= bits & ~apart
        complete = reduce(and_, self._bits.values())
        if complete:
            self._bits = {one: waiting ^ complete for one, waiting in self._bits.items()}
            self._bits_before &= ~complete
        passed = [self.add(child, (ALL, signature, 0), now) for signature in self._slots.of(apart)]
        return complete, [announced for some in passed for announced in some]

    def hold_nothing(self) -> list[Announced]:
        """Forward what is held, and from now on everything at once: a member has joined."""
        self.joining = True
        self._hold_slots(reduce(or_, self._bits.values()), 0.0)
        passed = self.pass_on(inf)
        self._held.clear()
        self._held_bits = self._bits_before = 0
        return passed

    def hold_old_slots(self, now: float) -> None:
        """Treat slots that have waited since the last call like other requests; called every OLD_S."""
        waiting = reduce(or_, self._bits.values())
        self._hold_slots(waiting & self._bits_before, now - OLD_S)
        self._bits_before = waiting

    def _hold_slots(self, bits: int, since: float) -> None:
        for signature in self._slots.of(bits):
            self._hold(signature.key(0), 0, since)

    def _hold(self, key: Key, instance: int, since: float) -> _Held:
        held = self._held[key] = _Held(instance, since)
        bit = self._slots.bit_of_key(key)
        self._held_bits |= bit
        for child, waiting in self._bits.items():
            if waiting & bit:
                self._bits[child] ^= bit
                (held.whole[child],) = self._slots.of(bit)
        return held

    def _forget(self, key: Key) -> None:
        del self._held[key]
        self._held_bits &= ~self._slots.bit_of_key(key)

    def pass_on(self, before: float) -> list[Announced]:
        """Forward what has been held since then or longer, for the stall report."""
        passed = []
        for held in self._held.values():
            if held.since <= before and not held.apart:
                held.apart = True
                passed += self._split(held)
        return passed

    def held(self) -> list[tuple[Key, int, float, dict[int, Signature]]]:
        """Return the held announcements: running number, since when, signatures by rank. Thread-safe."""
        return [
            (key, held.instance, held.since, {rank: signature for rank, signature, _ in self._split(held)})
            for key, held in list(self._held.items())
        ]

    def _complete(self, held: _Held) -> bool:
        if not held.parts:
            return len(held.whole) == len(self._below)
        return sum(len(self._below[child]) for child in held.whole) + len(held.parts) == self._num_below

    def _split(self, held: _Held) -> list[Announced]:
        known = dict(held.parts)
        for child, signature in dict(held.whole).items():
            known |= dict.fromkeys(self._below[child], signature)
        return [(rank, signature, held.instance) for rank, signature in sorted(known.items())]

    def _each(self, child: int, who: int, signature: Signature, instance: int) -> list[Announced]:
        return [(rank, signature, instance) for rank in (self._below[child] if who == ALL else [who])]


class TreeNegotiation(Negotiation):
    """Negotiation of one member of the set with this serial number.

    `receive` and `tick` run on the control tree's thread, which does all of this rank's work in the tree; `poll` only
    takes rounds from it.
    """

    may_be_late = True

    def __init__(
        self, control_tree: ControlTree, serial: int, tree: Tree, ranks: Sequence[int], *, cache_capacity: int
    ) -> None:
        self._control_tree, self.serial, self._rank = control_tree, serial, control_tree.rank
        self._tree = tree
        self._members = {rank: member for member, rank in enumerate(ranks)}
        self._parent, self._children = tree.parent(control_tree.rank), tree.children(control_tree.rank)
        self._slots = Slots()
        self._uses_slots = cache_capacity > 0
        self._collector = Collector(tree, control_tree.rank, self._slots)
        self._announcer = Announcer(cache_capacity)  # to the parent; at the root: for rounds
        interned: dict[Signature, Signature] = {}
        self._readers = {child: Reader(interned) for child in self._children}
        self._round_reader = Reader({})
        self._own: deque[tuple[Signature, int]] = deque()  # announcements of this rank, for the control tree's thread
        self._passed: list[Announced] = []  # to be sent at the end of this turn of the control tree's thread
        self._passed_bits = 0
        self._joined: set[int] = set()  # until all have
        self._asking = False
        self._asked_at = 0.0
        self._answers: dict[int, Whereabouts] = {}
        self._delivered: deque[list[Announced]] = deque()
        self._changed = threading.Condition()

    # Called by this rank's queue.

    def announce(self, signature: Signature, instance: int) -> None:
        if not self._children and self._parent is not None:  # no child to wait for
            bit = self._bit(signature)
            part = (SLOTS, as_bytes(bit)) if bit else (ALL, self._announcer.encode(signature, instance))
            self._send_up([part])
            return
        self._own.append((signature, instance))
        if len(self._own) == 1:  # otherwise the control tree's thread has been called and has not run yet
            self._control_tree.call(self._announce_own)

    def poll(self, planner: BatchPlanner) -> list[Batch] | None:
        if not self._delivered:
            return None
        self.rounds += 1
        for who, signature, instance in self._delivered.popleft():
            if who == ALL:
                planner.feed_all(signature, instance)
            else:
                planner.feed(self._members[who], signature, instance)
        return planner.close_round()

    def _bit(self, signature: Signature) -> int:
        return self._slots.bit(signature) if self._uses_slots else 0

    def waiting_requests(self) -> WaitingRequests:
        """Return what the root knows about requests that some members have not announced.

        It asks ranks behind a missing one directly; a request about which they have not been asked yet is omitted.
        """
        if self._parent is not None:
            return {}
        found: WaitingRequests = {}
        for key, instance, since, signatures in self._collector.held():
            missing = self._members.keys() - signatures.keys()
            doubtful = self._doubtful(missing)
            if not signatures or (doubtful and self._asked_at < since + OLD_S):
                continue
            some = next(iter(signatures.values()))
            signatures |= {rank: some for rank in doubtful if rank in self._answers and key in self._answers[rank].keys}
            found[some, instance] = [signatures.get(rank) for rank in self._members]
        return found

    def wait(self) -> None:
        with self._changed:
            if not self._delivered:
                self._changed.wait(_SLICE_S)

    # On the control tree's thread.

    def receive(self, rank: int, header: Header, payload: bytes) -> None:
        """Handle a message of a neighbour in the tree; others are ignored."""
        parts = cut_parts(payload, int(header["parts"]))
        if header["t"] == "round":
            if rank == self._parent:
                self._apply_round(parts, payload)
        elif rank in self._readers:
            now = time.monotonic()
            for who, data in parts:
                if who == SLOTS:
                    self._pass(*self._collector.add_slots(rank, int.from_bytes(data, "little"), now))
                    continue
                for signature, instance in self._readers[rank].decode(data):
                    if self._collector.may_speak(rank, who):
                        self._pass(0, self._collector.add(rank, (who, signature, instance), now))

    def tick(self) -> None:
        """Make sure that the root learns what some members wait for and others do not announce; runs once a second."""
        now = time.monotonic()
        self._collector.hold_old_slots(now)
        if self._parent is not None:
            self._pass(0, self._collector.pass_on(now - OLD_S))
        else:
            self._look_beyond_missing(now)

    def _announce_own(self) -> None:
        now, bits = time.monotonic(), 0
        while self._own:
            signature, instance = self._own.popleft()
            bit = self._bit(signature)
            if not bit:
                self._pass(*self._collector.add_slots(self._rank, bits, now))  # announced before it
                self._pass(0, self._collector.add(self._rank, (ALL, signature, instance), now))
            bits = bits | bit if bit else 0
        self._pass(*self._collector.add_slots(self._rank, bits, now))

    def _pass(self, bits: int, some: Sequence[Announced]) -> None:
        if (bits or some) and not (self._passed_bits or self._passed):
            self._control_tree.call(self._send)  # together with what else arrives in this turn, so that it can be fused
        self._passed_bits |= bits
        self._passed += some

    def _send(self) -> None:
        passed, self._passed = self._passed, []
        bits, self._passed_bits = self._passed_bits, 0
        # First: before a member joins, all at or below here that know of it have announced these.
        parts: list[tuple[int, bytes]] = [(SLOTS, as_bytes(bits))] if bits else []
        for who, signature, instance in passed:
            data = self._announcer.encode(signature, instance)
            if parts and parts[-1][0] == who:
                parts[-1] = who, parts[-1][1] + data
            else:
                parts.append((who, data))
        if self._parent is not None:
            self._send_up(parts)
        else:
            self._apply_round(parts, join_parts(parts))

    def _send_up(self, parts: Sequence[tuple[int, bytes]]) -> None:
        assert self._parent is not None
        self._control_tree.send(self._parent, {"t": "up", "set": self.serial, "parts": len(parts)}, join_parts(parts))

    def _apply_round(self, parts: list[tuple[int, bytes]], payload: bytes) -> None:
        header = {"t": "round", "set": self.serial, "parts": len(parts)}
        for child in self._children:
            self._control_tree.send(child, header, payload)
        delivered: list[Announced] = []
        for who, data in parts:
            if who == SLOTS:
                delivered += [(ALL, signature, 0) for signature in self._slots.of(int.from_bytes(data, "little"))]
                continue
            for signature, instance in self._round_reader.decode(data):
                delivered.append((who, signature, instance))
                if who == ALL:
                    self._slots.learn(signature)
                elif signature.kind == Kind.JOIN:
                    self._joined.add(who)
        if len(self._joined) == len(self._members):
            self._joined.clear()
            self._collector.joining = False
        elif self._joined and not self._collector.joining:
            self._pass(0, self._collector.hold_nothing())
        with self._changed:
            self._delivered.append(delivered)
            self._changed.notify_all()

    # The root's questions.

    def _doubtful(self, missing: Iterable[int]) -> list[int]:
        """Return the ranks behind another missing rank, which may be stopped; the asking root itself is not."""
        some = set(missing)
        return [rank for rank in some if some.intersection(self._tree.above(rank)) - {self._rank}]

    def _look_beyond_missing(self, now: float) -> None:
        ranks: set[int] = set()
        for _, _, since, signatures in self._collector.held():
            if now - since >= OLD_S and signatures:
                ranks |= set(self._doubtful(self._members.keys() - signatures.keys()))
        if ranks and not self._asking:
            self._asking = True
            ask = threading.Thread(
                target=self._request_whereabouts, args=(sorted(ranks),), name="hora-control-ask", daemon=True
            )
            ask.start()

    def _request_whereabouts(self, ranks: Sequence[int]) -> None:
        try:
            self._answers = self._control_tree.whereabouts(ranks, self.serial)
            self._asked_at = time.monotonic()
        finally:
            self._asking = False


def as_bytes(bits: int) -> bytes:
    """Encode a bit vector for sending."""
    return bits.to_bytes(-(-bits.bit_length() // 8), "little")
