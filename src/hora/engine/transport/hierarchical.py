"""The transport of a set whose members are on several hosts: memory inside a host, a group between hosts.

Every host has slice leaders, as many as the smallest host has members. Slice leader i of all hosts form a group and
carry slice i of everything, so that each byte crosses the network once per host and all slice leaders work at the same
time.

Reductions combine the members of each host in member order, then the hosts in the order of their first members. Every
element is combined that way on all hosts, so results are bit-identical on all members. They may differ in the last bit
from a one-host run of the same numbers, which combines 0, 1, 2, …. Half precision is sent between hosts as it is, so it
is rounded twice: the value of a host (its own average for an average), and the result. Two hosts exchange their values.
With more hosts, each combines a part and sends it to all: as many bytes as a ring, in two steps, or in one if that is
little, and in the order of hosts.

The native part computes sums and averages (`native_hosts`), staged or in place; other reductions are exchanged directly
between all members and combined in the same order (`HostwiseArithmetic`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from hora.engine.request import Kind, Reduce, ReduceOp
from hora.engine.shm.segment import Segment
from hora.engine.transport.arithmetic import HALVES, arithmetic_of, staged, stages
from hora.engine.transport.base import AliveCheck, LocalTransport, Tensors
from hora.engine.transport.distributed import DistributedTransport
from hora.engine.transport.native_hosts import HEADER_BYTES, NativeHosts, Scaling
from hora.engine.transport.packing import Buffers, InTwoHalves, complete, overlap, runs, spread, total, unpack
from hora.engine.transport.shm import ShmTransport
from hora.engine.transport.stream import StreamGroup

# Two portions are in flight at a time, which bounds the memory.
_PORTION_BYTES = 4 * 2**20


class HierarchicalTransport:
    """See `Transport`. `hosts` lists each host's members.

    `local` connects the members of this host, `share` allocates memory for them, and `connect` creates a named group of
    members that call it together.
    """

    def __init__(
        self,
        local: ShmTransport | LocalTransport,
        hosts: Sequence[Sequence[int]],
        member: int,
        *,
        share: Callable[[int], Segment],
        connect: Callable[[str, Sequence[int]], StreamGroup],
        check_alive: AliveCheck,
        limit_s: float,
    ) -> None:
        self._local = local
        self._hosts = sorted((sorted(host) for host in hosts), key=lambda host: host[0])
        self._member = member
        self._num_members = sum(len(host) for host in self._hosts)
        (self._host,) = (h for h, host in enumerate(self._hosts) if member in host)
        self._here = self._hosts[self._host]
        self._index = self._here.index(member)
        self._num_leaders = min(len(host) for host in self._hosts)
        sizes = [len(host) for host in self._hosts]
        self._weights = () if min(sizes) == max(sizes) else tuple(sizes)
        self._connect = connect
        self._leaders: StreamGroup | None = None
        self._between: DistributedTransport | None = None
        self._everyone: StreamGroup | None = None  # a group of all members, and its transport
        self._flat: DistributedTransport | None = None
        self.name = local.name
        if self._index < self._num_leaders:
            group = connect(f"leader{self._index}", [host[self._index] for host in self._hosts])
            self._between = DistributedTransport(group, self._host, len(self._hosts), weights=self._weights)
            self._leaders = group
            self.name = group.backend if self._apart is not None else f"{local.name}+{group.backend}"
        self._native = NativeHosts(
            share,
            self._leaders,
            index=self._index,
            num_local=len(self._here),
            num_leaders=self._num_leaders,
            host=self._host,
            num_hosts=len(self._hosts),
            check_alive=check_alive,
            limit_s=limit_s,
        )
        self._buffers = Buffers(torch.device("cpu"), 2 * _PORTION_BYTES)
        self._scaling = lru_cache(maxsize=256)(self._make_scaling)

    def allreduce(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        self.allreduce_compressed(inputs, outputs, reduce, ())

    def allreduce_compressed(self, inputs: Tensors, outputs: Tensors, reduce: Reduce, residuals: Tensors) -> None:
        """Reduce float32 tensors, encoded between hosts with `reduce.code`, to a sum or an average.

        `residuals[i]` is the encoding error of tensor i on this member, from before and updated now (empty: not kept).
        """
        if not total(inputs):
            return
        scaling = self._scaling(reduce, inputs[0].dtype)
        if scaling is None:
            self._between_all().allreduce(inputs, outputs, reduce)
        else:
            self._native.allreduce(inputs, outputs, scaling, residuals)

    def allreduce_negotiated(self, places: Tensors, reduce: Reduce, residual: torch.Tensor | None) -> None:
        """Reduce data in this host's memory, possibly compressed.

        `places` are its members' data, which all of them see and have filled. `residual` covers all of it; this member
        needs its slice.
        """
        self.allreduce_scheduled(places, reduce, residual)
        self._local.barrier()

    def half_scheduled(self, kind: Kind, places: Tensors, reduce: Reduce, header: bytes, most_records: int) -> bool:
        """Run this member's half of a scheduled reduction of data in this host's memory, without negotiation.

        A reducescatter writes each member's own slice of its place; an allgather copies the own slices to all places.
        Members are numbered host by host and own slices of equal length in that order. See `allreduce_scheduled`.
        """
        owned = places[0].numel() // self._num_members
        spans, scaling = self._spans(owned), self._scaling(reduce, places[0].dtype)
        assert scaling is not None, f"{reduce} of {places[0].dtype} is not of a bucket"
        if self._between is None or not any(spans):
            return True
        first = self._here[0] * owned
        return self._native.half(kind, places, spans, first, owned, scaling, header, most_records)

    def _spans(self, owned: int) -> list[range]:
        """Return this slice leader's part of each host's elements."""
        spans = []
        for host in self._hosts:
            shares = self._carried(len(host) * owned)
            begin = host[0] * owned + sum(shares[: self._index])
            spans.append(range(begin, begin + shares[self._index]))
        return spans

    def refuse(self, most_records: int) -> None:
        """Send the other hosts an invalid header instead of the next `allreduce_scheduled` here."""
        group = self._leaders
        if group is None:
            return
        with group.lent(most_records):  # both ends continue with the same key, whichever part makes the records
            pass
        group.finish(group.start_broadcast(torch.zeros(HEADER_BYTES, dtype=torch.uint8, device="cpu"), self._host))

    def num_records(self, count: int, itemsize: int) -> int:
        """Return the maximum number of records of this member's part of a reduction of `count` resident elements."""
        # Half an allreduce takes as many as if all hosts owned as much as the one with most members.
        count = -(-count // self._num_members) * max(map(len, self._hosts)) * len(self._hosts)
        return self._native.num_records(self._carried(count)[0], itemsize)

    @property
    def late_members(self) -> list[int]:
        """The members of the host that this one waits for during a liveness check, or of all others.

        Empty if another member of this host can tell.
        """
        if self._index:
            return []
        late = self._native.late_host
        hosts = self._hosts if late is None else [self._hosts[late]]
        return [member for host in hosts if host is not self._here for member in host]

    def allreduce_scheduled(
        self, places: Tensors, reduce: Reduce, residual: torch.Tensor | None, header: bytes = b"", most_records: int = 0
    ) -> bool:
        """Run this member's part of `allreduce_negotiated` without waiting for this host's members and without
        negotiation.

        Only a header of `HEADER_BYTES` precedes the data. Returns False if the hosts have different headers, on all of
        them alike: nothing was changed, and this transport is unusable. `most_records`: the same in every call, see
        `num_records`.
        """
        counts, scaling = self._carried(places[0].numel()), self._scaling(reduce, places[0].dtype)
        assert scaling is not None, f"{reduce} of {places[0].dtype} is not of a bucket"
        begin, count = sum(counts[: self._index]), counts[self._index]
        if not count:
            return True
        return self._native.allreduce_resident(places, begin, begin + count, scaling, residual, header, most_records)

    def _make_scaling(self, reduce: Reduce, dtype: torch.dtype) -> Scaling | None:
        """Return the arithmetic of an allreduce for the native part; None if it is not supported."""
        op, prescale, postscale, code = reduce
        num_local, num_hosts = len(self._here), len(self._hosts)
        last = arithmetic_of(Reduce(), dtype, 1)
        if code:  # an average is divided before it is sent: a sum could overflow half precision
            divided = 1.0 / self._num_members if op == ReduceOp.AVERAGE else 1.0
            inside, between = Reduce(ReduceOp.SUM, prescale, divided), Reduce(ReduceOp.SUM)
            last = arithmetic_of(Reduce(ReduceOp.SUM, 1.0, postscale), dtype, num_hosts)
        elif self._apart is not None:  # each member only applies the prescale to its own data
            inside, between = Reduce(), reduce
        else:
            inside, between, last = stages(reduce, dtype, self._num_members)
            inside = staged(inside, dtype, num_local)
        weighted = bool(self._weights) and dtype in HALVES and between.op == ReduceOp.AVERAGE
        one, weights = arithmetic_of(inside, dtype, num_local), tuple[float, ...]()
        other = arithmetic_of(between, dtype, num_hosts)
        if weighted:
            weights = tuple(weight / self._num_members for weight in self._weights)
            other = arithmetic_of(between._replace(op=int(ReduceOp.SUM)), dtype, num_hosts)
        stage = one.stage if other.stage == 1.0 else other.stage
        if stage is None or one.sum is None or other.sum is None or last.sum is None:
            return None
        return Scaling(stage, one.sum, other.sum, last.sum, weights, code.removesuffix("+"))

    @property
    def _apart(self) -> DistributedTransport | None:
        """Return the group of all members, if each is on its own host."""
        return self._between if len(self._hosts) == self._num_members else None

    def adasum(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        self._between_all().adasum(inputs, outputs, reduce)

    def allgather(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]]) -> None:
        if self._apart is not None:
            self._apart.allgather(inputs, outputs, counts)
            return
        overlap(self._gather(each) for each in portions(inputs, outputs, counts, self._limit(inputs[0])))

    def _gather(self, portion: Portion) -> InTwoHalves:
        turn, dtype, shares = portion.turn, portion.own[0].dtype, [self._shares(each) for each in portion.counts]
        # Inside the host: the members' data becomes the host's block, which all of them get.
        members = [[counts[member] for member in self._here] for counts in portion.counts]
        blocks = self._take(f"blocks{turn}", [sum(sizes) for sizes in members], dtype)
        self._local.allgather(portion.own, blocks, members)
        # Between hosts: each slice leader sends its share of this host's block, and gets the same share of all blocks.
        mine = self._own_shares(shares)
        slices = self._take(f"slices{turn}", [sum(sizes) for sizes in mine], dtype)
        pending = None
        if self._between is not None:
            own = [block.split(each[self._host])[self._index] for block, each in zip(blocks, shares, strict=True)]
            if len(own) > 1:
                self._between.allgather(own, slices, mine)
            elif slices[0].numel():
                pending = self._between.start_gather(own[0], slices[0], mine[0])
        yield
        if self._between is not None and pending is not None:
            self._between.finish(pending)
        # Inside the host: the slice leaders' shares together are all hosts' blocks.
        carried = list(itertools.chain(*shares))
        whole = self._take(f"whole{turn}", [sum(sizes) for sizes in carried], dtype)
        self._local.allgather(_split(slices, mine), whole, carried)
        for block, (targets, host) in zip(whole, itertools.product(portion.members, self._hosts), strict=True):
            unpack(block, [targets[member] for member in host])

    def broadcast(self, tensors: Tensors, root: int) -> None:
        if self._apart is not None:
            self._apart.broadcast(tensors, root)
            return
        (source,) = (h for h, host in enumerate(self._hosts) if root in host)
        counts = [self._carried(tensor.numel()) for tensor in tensors]
        if self._host == source:
            self._local.broadcast(tensors, self._here.index(root))
            slices = [tensor.split(each)[self._index] for tensor, each in zip(tensors, counts, strict=True)]
        else:
            sizes = [each[self._index] for each in counts]
            slices = list(torch.empty(sum(sizes), dtype=tensors[0].dtype, device="cpu").split(sizes))
        if self._between is not None:
            self._between.broadcast(slices, source)
        if self._host != source:
            self._local.allgather(slices, tensors, counts)

    def alltoall(
        self, input: torch.Tensor, output: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        """Exchange inside the host through memory, the rest directly between the members concerned."""
        if self._apart is not None:
            self._apart.alltoall(input, output, send_counts, receive_counts)
            return
        sent, received = input[: sum(send_counts)].split(list(send_counts)), output.split(list(receive_counts))
        beyond = ([part[:0] if m in self._here else part for m, part in enumerate(all_)] for all_ in (received, sent))
        self._between_all()
        assert self._everyone is not None
        pending = self._everyone.start_exchange(*beyond)
        self._local.exchange([received[m] for m in self._here], [sent[m] for m in self._here])
        self._everyone.finish(pending)

    def reducescatter(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]], reduce: Reduce) -> None:
        if self._apart is not None:
            self._apart.reducescatter(inputs, outputs, counts, reduce)
            return
        overlap(self._scatter(each, reduce) for each in portions(outputs, inputs, counts, self._limit(inputs[0])))

    def _scatter(self, portion: Portion, reduce: Reduce) -> InTwoHalves:
        turn, dtype, shares = portion.turn, portion.own[0].dtype, [self._shares(each) for each in portion.counts]
        # Inside the host: each slice leader gets its share of all hosts' blocks, combined over this host's members.
        mine, carried = self._own_shares(shares), list(itertools.chain(*shares))
        whole = [
            torch.cat([sources[member] for member in host])
            for sources, host in itertools.product(portion.members, self._hosts)
        ]
        slices = self._take(f"slices{turn}", [sum(sizes) for sizes in mine], dtype)
        inside, between, end = stages(reduce, dtype, self._num_members)
        self._local.reducescatter(whole, _split(slices, mine), carried, inside)
        # Between hosts: each slice leader gets its share of this host's block, combined over the hosts.
        here = [each[self._host] for each in shares]
        reduced = self._take(f"reduced{turn}", [sizes[self._index] for sizes in here], dtype)
        under_way = None
        if self._between is not None:
            under_way = self._between.start_scatter(slices, reduced, mine, turn, between)
            next(under_way)
        yield
        if under_way is not None:
            complete(under_way)
            for part in reduced:
                end.finish(part, part)
        # Inside the host: the slice leaders' shares together are the host's block, of which each member takes its part.
        blocks = self._take(f"blocks{turn}", [sum(sizes) for sizes in here], dtype)
        self._local.allgather(reduced, blocks, here)
        for block, counts, output in zip(blocks, portion.counts, portion.own, strict=True):
            output.copy_(block.split([counts[member] for member in self._here])[self._index])

    def barrier(self) -> None:
        self._local.barrier()
        if self._between is not None and self._index == 0:
            self._between.barrier()
        self._local.barrier()

    def close(self) -> None:
        for transport in (self._flat, self._between, self._local):
            if transport is not None:
                transport.close()
        self._native.close()

    def _between_all(self) -> DistributedTransport:
        """Return a connection between all members, created on first use."""
        if self._apart is not None:
            return self._apart
        if self._flat is None:
            group = self._connect("members", range(self._num_members))
            self._everyone = group
            self._flat = DistributedTransport(group, self._member, self._num_members, hosts=self._hosts)
        return self._flat

    def _carried(self, total: int) -> list[int]:
        """Return how many of `total` elements each member of this host carries."""
        idle = len(self._here) - self._num_leaders
        return spread(total, self._num_leaders) + [0] * idle

    def _shares(self, counts: Sequence[int]) -> list[list[int]]:
        """Return how much each member of this host carries of every host's block, the data of the host's members."""
        return [self._carried(sum(counts[member] for member in host)) for host in self._hosts]

    def _own_shares(self, shares: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
        """Return how much this member carries of each host's block, for each tensor."""
        return [[of_host[self._index] for of_host in each] for each in shares]

    def _take(self, purpose: str, sizes: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return buffers for a part of each of several tensors."""
        return list(self._buffers.take(purpose, sum(sizes), dtype).split(list(sizes)))

    def _limit(self, tensor: torch.Tensor) -> int:
        return _PORTION_BYTES // tensor.dtype.itemsize


def _split(tensors: Tensors, sizes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return the parts of several tensors."""
    return [part for tensor, each in zip(tensors, sizes, strict=True) for part in tensor.split(list(each))]


@dataclass(frozen=True)
class Portion:
    """A part of an allgather or a reducescatter, of several tensors.

    For each tensor: this member's own part, and the parts of all members with their sizes. Two portions are in flight
    at a time, in different turns.
    """

    own: list[torch.Tensor]
    members: list[Tensors]
    counts: list[Sequence[int]]
    turn: int


def portions(own: Tensors, whole: Tensors, counts: Sequence[Sequence[int]], limit: int) -> Iterator[Portion]:
    """Yield portions of about `limit` elements: small tensors together, large ones split over all members' parts."""
    turns = itertools.cycle((0, 1))
    for run in runs([sum(each) for each in counts], limit):
        parts = [whole[i].split(list(counts[i])) for i in run]
        most = max(max(counts[i]) for i in run)
        if len(run) > 1 or sum(counts[run[0]]) <= limit:
            if most:
                yield Portion([own[i] for i in run], list(parts), [counts[i] for i in run], next(turns))
            continue
        (number,), step = run, max(limit // len(parts[0]), 1)
        for start in range(0, most, step):
            bit = slice(start, start + step)
            members = [part[bit] for part in parts[0]]
            yield Portion([own[number][bit]], [members], [[part.numel() for part in members]], next(turns))
