"""The planner: turns agreed announcements into ordered fused batches and errors. Pure: no clock, socket or tensor.

Every member of a process set feeds the same announcements, divided into the same rounds, to its own `BatchPlanner`, and
so derives the same batches. Inside a round the order between members does not matter: ready requests are ordered by
their position in the announcements of the lowest member that made them. Property tests verify this.

States of a request key:  absent --feed--> pending --last member feeds, or the missing ones have joined--> ready
                          ready --close_round--> absent, as part of a batch (to execute, or with an error)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from hora.engine.request import ITEM_BYTES, KINDS, NUM_INSTANCES, Key, Kind, ReduceOp, Signature, full_names

_FUSIBLE = frozenset(map(int, (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.REDUCESCATTER)))
_KEPT_SIGNATURES = 8192


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request that some members have announced."""

    key: Key
    signatures: list[Signature | None]  # by member; None: not announced yet
    first_seen: float
    uniform: Signature | None = None  # the signature, while all have announced the same
    num_announced: int = 0
    order: tuple[int, int] = (sys.maxsize, 0)
    ready: bool = False

    def missing(self) -> list[int]:
        return [member for member, signature in enumerate(self.signatures) if signature is None]


# A request that all members that have not joined have announced, each one's signature, and the common one.
Agreed = tuple[Key, Sequence[Signature | None], Signature | None]


class Part(NamedTuple):
    """One tensor of a batch: tensor `index` of request `key`, and every member's signature (None: has joined)."""

    key: Key
    index: int  # type: ignore[assignment] # a tuple has a method of this name, which is not called here
    signatures: Sequence[Signature | None]


@dataclass(slots=True)
class Batch:
    """Parts to be executed together, all of one kind, or an error for their requests."""

    kind: Kind
    signature: Signature
    parts: list[Part] = field(default_factory=list)
    error: str | None = None
    last_joined: int = -1
    num_bytes: int = 0

    @property
    def devices(self) -> str:
        """The devices of the members' tensors, if they differ: each such combination has its own transport."""
        labels = _devices(self.parts[0].signatures) if self.signature.device != "cpu" else ("cpu",)
        return labels[0] if len(set(labels)) == 1 else ",".join(labels)


class BatchPlanner:
    """Derives batches for one process set. `ranks` are the members' global ranks, for messages."""

    def __init__(self, ranks: Sequence[int], *, fusion_threshold_bytes: int, group_fusion: bool = True) -> None:
        self.ranks = tuple(ranks)
        self.now = 0.0  # set by the caller before feeding; only copied into `PendingRequest.first_seen`
        self.unnamed: dict[str, int] = {}  # next running number per operation, as far as any member has announced
        self.on_arrival: Callable[[int, Key, Signature], None] | None = None
        self._threshold = fusion_threshold_bytes
        self._group_fusion = group_fusion
        self._num_members = len(self.ranks)
        self._positions = [0] * self._num_members
        self._pending: dict[Key, PendingRequest] = {}
        self._fusion: dict[int, tuple[Signature, Sequence[tuple[object, int]]]] = {}
        self._agreed: list[Agreed] = []  # in this round, without having been pending
        self._ready: list[PendingRequest] = []
        self.joined: set[int] = set()  # members
        self._joined_this_round: set[int] = set()

    @property
    def has_ready(self) -> bool:
        """Return whether closing the round now would yield a batch."""
        return bool(self._ready or self._agreed) or len(self.joined) == self._num_members

    def pending(self) -> list[PendingRequest]:
        """Return the requests that some members have not announced yet."""
        return [entry for entry in self._pending.values() if not entry.ready]

    def missing(self, key: Key) -> list[int]:
        """Return the members that have not announced a pending request. Thread-safe."""
        entry = self._pending.get(key)
        return [] if entry is None else entry.missing()

    def feed(self, member: int, signature: Signature, instance: int) -> None:
        """Feed an announcement of a member. Announcements of one member are fed in its own order."""
        self._positions[member] += 1
        if signature.kind == Kind.JOIN:
            self._join(member)
            return
        key = signature.key(instance)
        if signature.name is None:
            self.note_number(signature.operation, instance)
        entry = self._pending.get(key)
        if entry is None:
            entry = self._pending[key] = PendingRequest(key, [None] * self._num_members, self.now, signature)
        assert entry.signatures[member] is None, (key, member)
        entry.signatures[member] = signature
        if entry.uniform is not signature:
            entry.uniform = None
        entry.num_announced += 1
        if member < entry.order[0]:
            entry.order = (member, self._positions[member])
        if self.on_arrival is not None:
            self.on_arrival(member, key, signature)
        self._mark_if_ready(entry)

    def feed_all(self, signature: Signature, instance: int) -> None:
        """Do the same as `feed` for every member, several times faster, while none has joined, as for most requests."""
        assert not self.joined, (signature, self.joined)
        key = signature.key(instance)
        if signature.name is None:
            self.note_number(signature.operation, instance)
        assert key not in self._pending, key
        self._agreed.append((key, (signature,) * self._num_members, signature))
        if self.on_arrival is not None:
            for member in range(self._num_members):
                self.on_arrival(member, key, signature)

    @property
    def idle(self) -> bool:
        """Return whether nothing is pending, no member has joined and no timeline is written."""
        return not self._pending and not self.joined and self.on_arrival is None

    @property
    def pending_and_joined(self) -> tuple[Sized, Sized]:
        """The requests that some members have announced, and the members that have joined: the same objects always."""
        return self._pending, self.joined

    def close_round(self) -> list[Batch]:
        """Return the batches that the announcements so far allow, in the order in which every member executes them."""
        ready, self._ready = self._ready, []
        if len(ready) > 1:
            ready.sort(key=lambda entry: entry.order)
        agreed, self._agreed = self._agreed, []
        for entry in ready:
            del self._pending[entry.key]
            uniform = entry.uniform if entry.num_announced == self._num_members else None
            agreed.append((entry.key, entry.signatures, uniform))
        batches = self._fuse(agreed)
        if len(self.joined) == self._num_members:
            last, end = max(self._joined_this_round), Signature(Kind.JOIN, "join", "noname")
            self.joined.clear()
            batches.append(Batch(Kind.JOIN, end, last_joined=self.ranks[last]))
        self._joined_this_round.clear()
        return batches

    def note_number(self, operation: str, instance: int) -> None:
        """Record the running number of an unnamed request that was announced, or agreed on without a round."""
        ahead = (instance - self.unnamed.get(operation, 0)) % NUM_INSTANCES
        if ahead < NUM_INSTANCES // 2:  # otherwise it is an earlier one, of a member that is behind
            self.unnamed[operation] = (instance + 1) % NUM_INSTANCES

    def _join(self, member: int) -> None:
        self.joined.add(member)
        self._joined_this_round.add(member)
        for entry in self._pending.values():
            self._mark_if_ready(entry)

    def _mark_if_ready(self, entry: PendingRequest) -> None:
        if entry.ready:
            return
        if entry.num_announced == self._num_members or (
            self.joined
            and self.joined.issuperset(entry.missing())
            and next(filter(None, entry.signatures)).kind != Kind.RETIRE  # joined members announce it too
        ):
            entry.ready = True
            self._ready.append(entry)

    def _fuse(self, agreed: list[Agreed]) -> list[Batch]:
        batches: list[Batch] = []
        open_batches: dict[object, Batch] = {}
        for key, signatures, uniform in agreed:
            signature = uniform or next(filter(None, signatures))
            simple = uniform is not None and signature.kind != Kind.ALLGATHER and not self.joined
            error = None if simple else self._error(key, signatures, signature, uniform is not None)
            if error is None and signature.kind in _FUSIBLE and not signature.bound:
                self._add_fusible(key, signatures, signature, batches, open_batches)
            else:
                part = Part(key, 0, signatures)
                num_bytes = sum(size for _, size in self._fusion_of(signature))
                batches.append(Batch(KINDS[signature.kind], signature, [part], error, num_bytes=num_bytes))
        return batches

    def _add_fusible(
        self,
        request: Key,
        signatures: Sequence[Signature | None],
        signature: Signature,
        batches: list[Batch],
        open_batches: dict[object, Batch],
    ) -> None:
        alone = not self._group_fusion and signature.operation.startswith("grouped_")
        for index, (fusion_key, num_bytes) in enumerate(self._fusion_of(signature)):
            key: object = fusion_key
            if alone:
                key = (fusion_key, request)
            elif signature.device != "cpu":
                key = (fusion_key, _devices(signatures))
            batch = open_batches.get(key)
            if batch is None or (batch.num_bytes + num_bytes > self._threshold and not alone):
                batch = open_batches[key] = Batch(KINDS[signature.kind], signature)
                batches.append(batch)
            batch.parts.append(Part(request, index, signatures))
            batch.num_bytes += num_bytes

    def _fusion_of(self, signature: Signature) -> Sequence[tuple[object, int]]:
        """Return for each tensor what another one must share to be fused with it, and its size."""
        known = self._fusion.get(id(signature))
        if known is None:
            if len(self._fusion) >= _KEPT_SIGNATURES:
                self._fusion.clear()
            s = signature
            shared = (s.kind, s.reduce, s.root, s.device_type)
            tensors = zip(s.dtypes, s.shapes, strict=True)
            sizes = [((shared, dtype), ITEM_BYTES[dtype] * prod(shape)) for dtype, shape in tensors]
            known = self._fusion[id(signature)] = (signature, sizes)  # keeps the id from being reused
        return known[1]

    def _error(
        self, key: Key, signatures: Sequence[Signature | None], signature: Signature, uniform: bool
    ) -> str | None:
        if self.joined and signature.kind not in (Kind.ALLREDUCE, Kind.RETIRE):
            joined = ", ".join(str(self.ranks[member]) for member in sorted(self.joined))
            name = KINDS[signature.kind].name
            return f"{name} is not supported with Join: rank(s) {joined} have joined already ({_names(key, signature)})"
        if signature.kind == Kind.ALLGATHER and any(not shape for shape in signature.shapes):
            names = _names(key, signature)
            return f"allgather cannot gather a rank-zero tensor ({names}); reshape it to one dimension first"
        if uniform:
            return None
        for member, other in enumerate(signatures):
            if other is None or other is signature:
                continue
            text = _disagreement(signature, other)
            if text is not None:
                mine = next(index for index, item in enumerate(signatures) if item is signature)
                what, left, right = text
                values = f"rank {self.ranks[mine]} has {left}, rank {self.ranks[member]} has {right}"
                return f"{what}: {values} ({_names(key, signature)})"
        return None


def _devices(signatures: Sequence[Signature | None]) -> tuple[str, ...]:
    """Return the members' devices on a GPU; a joined member takes part on its first."""
    return tuple(["cuda" if signature is None else signature.device for signature in signatures])


def _names(key: Key, signature: Signature) -> str:
    names = full_names(*key, len(signature.dtypes))
    return f"tensor {names[0]}" if len(names) == 1 else f"tensors {names[0]} … {names[-1]}" if names else str(key[0])


def _disagreement(a: Signature, b: Signature) -> tuple[str, str, str] | None:
    """Return the first difference between two members' signatures, with both values, or None."""
    kind, memory = KINDS[a.kind].name, {True: "shared memory", False: "a tensor of its own"}
    one, other = a.reduce, b.reduce
    gathers = a.kind in (Kind.ALLGATHER, Kind.ALLTOALL)  # each member has its own number of rows
    shapes = [(left, right) for left, right in zip(a.shapes, b.shapes, strict=False) if left != right]
    if gathers:
        shapes = [pair for pair in shapes if len(pair[0]) != len(pair[1]) or pair[0][1:] != pair[1][1:]]
    left, right = shapes[0] if shapes else ((), ())
    rows: Sequence[tuple[str, object, object]] = (
        ("operations", a.kind_name, b.kind_name),
        ("number of tensors in a group", len(a.dtypes), len(b.dtypes)),
        ("data types", _listed(a.dtypes), _listed(b.dtypes)),
        (f"{kind} tensor shapes", list(left), list(right)),
        ("prescale and/or postscale factors", f"{one.prescale}/{one.postscale}", f"{other.prescale}/{other.postscale}"),
        ("reduction operation", ReduceOp(one.op).name, ReduceOp(other.op).name),
        ("BROADCAST root ranks", a.root, b.root),
        (f"{kind} CPU/GPU device selection", a.device_type, b.device_type),
        ("compression", one.code or "none", other.code or "none"),
        (f"{kind} memory", memory[a.bound], memory[b.bound]),
        (f"{kind} arguments", [] if gathers else list(a.extra), [] if gathers else list(b.extra)),
    )
    found = next((row for row in rows if row[1] != row[2]), None)
    return None if found is None else (f"Mismatched {found[0]}", str(found[1]), str(found[2]))


def _listed(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else "[" + ", ".join(values) + "]"
