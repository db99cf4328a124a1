"""The transport of a set whose members are on several hosts: memory inside a host, a group between hosts.

Every host has slice leaders, as many as the smallest host has members. Slice leader i of all hosts form a group
and carry slice i of everything, so that each byte crosses the network once per host and all slice leaders work
at the same time.

Reductions combine the members of each host in member order, then the hosts in the order of their first members; every
element is combined that way on all hosts, so results are bit-identical on all members. They may differ in the last bit
from a one-host run of the same numbers, which combines 0, 1, 2, …. Half precision travels between hosts as it is, so it
is rounded twice: what a host's members have together, which is their own average where one is wanted, and the result.
Two hosts swap what they have. Of more, each combines a part and gives it to all: as many bytes as round a ring, in two
steps, or in one where that is little, and in the order of hosts.

Sums and averages are the native part's where all members have it (`native_hosts`), staged or where they lie. What is
here is the same in Python, and what else there is. The engine makes it and gives it `local`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from hora.engine.request import Kind, Reduce, ReduceOp
from hora.engine.shm.segment import Segment
from hora.engine.transport.arithmetic import HALVES, Arithmetic, arithmetic_of, single_threaded, staged
from hora.engine.transport.base import AliveCheck, Tensors, Transport
from hora.engine.transport.codes import CODES, Code
from hora.engine.transport.distributed import DistributedTransport
from hora.engine.transport.division import Division, Portion, consecutive, portions, where
from hora.engine.transport.group import PeerGroup
from hora.engine.transport.native_hosts import HEADER_BYTES, Cut, NativeHosts, Scaling, cut_for
from hora.engine.transport.packing import Buffers, InTwoHalves, complete, copy, overlap, spread, total, unpack
from hora.engine.transport.stream import StreamGroup

__all__ = ["HierarchicalTransport"]

# Two portions are under way at a time, which bounds the memory.
_PORTION_BYTES = 4 * 2**20


class _Steps(NamedTuple):
    """Arithmetic of an allreduce: on the numbers of a host's members, to those of the hosts, and in the end
    (`finish_`).
    """

    inside: Reduce
    between: Reduce
    end: Arithmetic
    native: Scaling | None  # the same for the native part; None: for what it does not know


class HierarchicalTransport:
    """See `Transport`. `hosts` lists each host's members; `local` connects those of this member's host, `share` gives
    them the same new memory, and `connect` makes a group, with a name, of members that call it together. `native`: all
    members have the native part, for all dtypes that it knows.
    """

    def __init__(
        self,
        local: Transport,
        hosts: Sequence[Sequence[int]],
        member: int,
        *,
        share: Callable[[int], Segment],
        connect: Callable[[str, Sequence[int]], PeerGroup],
        native: bool = False,
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
        self._leaders: PeerGroup | None = None
        self._between: DistributedTransport | None = None
        self._flat: DistributedTransport | None = None
        self.name = local.name
        if self._index < self._num_leaders:
            group = connect(f"leader{self._index}", [host[self._index] for host in self._hosts])
            self._between = DistributedTransport(group, self._host, len(self._hosts), weights=self._weights)
            self._leaders = group
            self.name = group.backend if self._apart is not None else f"{local.name}+{group.backend}"
        self._native: NativeHosts | None = None
        if native:
            assert self._leaders is None or isinstance(self._leaders, StreamGroup), self._leaders
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
        self._steps = lru_cache(maxsize=256)(self._make_steps)

    def allreduce(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        self.allreduce_compressed(inputs, outputs, reduce, ())

    def allreduce_compressed(self, inputs: Tensors, outputs: Tensors, reduce: Reduce, residuals: Tensors) -> None:
        """`allreduce` of float32 that travels between hosts in `reduce.code`, a sum or an average; `residuals[i]`: what
        the code has lost of tensor i before and loses now, on this member (none of them: it is not kept).
        """
        count = total(inputs)
        if not count:
            return
        steps = self._steps(reduce, inputs[0].dtype)
        if self._native is not None and steps.native is not None:
            self._native.allreduce(inputs, outputs, steps.native, residuals)
        else:
            with single_threaded():
                self._allreduce_in_python(inputs, outputs, reduce, residuals)

    def allreduce_resident(self, places: Tensors, reduce: Reduce, residual: torch.Tensor | None) -> None:
        """An allreduce, also a compressed one, of data in this host's memory: `places` are its members' data, which all
        of them see and have filled. `residual` is for all of it, of which this member needs its slice.
        """
        self.allreduce_unannounced(places, reduce, residual)
        self._local.barrier()

    def half(self, kind: Kind, places: Tensors, reduce: Reduce, header: bytes, most_records: int) -> bool:
        """This member's part of a reducescatter of data that lies in this host's memory, into each member's own slice
        of its place, or of an allgather of the own slices, into all places. Members are numbered host by host, and own
        slices of one length in that order. On nobody's word, as `allreduce_unannounced`.
        """
        owned, num_hosts = places[0].numel() // self._num_members, len(self._hosts)
        spans, native, steps = self._spans(owned), self._native, self._steps(reduce, places[0].dtype)
        if self._between is None or not any(spans):
            return True
        if native is not None and steps.native is not None:
            first = self._here[0] * owned
            return native.half(kind, places, spans, first, owned, steps.native, header, most_records)
        if not self._have_all(header, most_records):
            return False
        counts, dtype = [len(span) for span in spans], places[0].dtype
        whole = self._buffers.take("whole", sum(counts), dtype)
        parts, mine = whole.split(counts), self._buffers.take("mine0", counts[self._host], dtype)
        with single_threaded():
            if kind is Kind.ALLGATHER:
                for member, there, here in self._owners(spans[self._host], owned):
                    copy(places[member][there], mine[here])
                self._between.allgather([mine], [whole], [counts])
                for place, host in itertools.product(places, range(num_hosts)):
                    copy(parts[host], place[spans[host].start : spans[host].stop])
                return True
            inside = arithmetic_of(steps.inside, dtype, len(places))
            for span, part in zip(spans, parts, strict=True):
                slices = [place[span.start : span.stop] for place in places]
                for each in slices:
                    inside.prepare_(each)
                inside.reduce(slices, part, self._buffers.take("scratch", len(span), dtype))
            self._between.reducescatter([whole], [mine], [counts], steps.between)
            steps.end.finish_(mine)
            for member, there, here in self._owners(spans[self._host], owned):
                copy(mine[here], places[member][there])
        return True

    def _spans(self, owned: int) -> list[range]:
        """This slice leader's part of what each host owns."""
        spans = []
        for host in self._hosts:
            shares = self._carried(len(host) * owned)
            begin = host[0] * owned + sum(shares[: self._index])
            spans.append(range(begin, begin + shares[self._index]))
        return spans

    def _owners(self, span: range, owned: int) -> Iterator[tuple[int, slice, slice]]:
        """The members of this host that own elements of a span, by their number here: which elements, and where in the
        span.
        """
        for number, member in enumerate(self._here):
            begin, end = max(span.start, member * owned), min(span.stop, (member + 1) * owned)
            if begin < end:
                yield number, slice(begin, end), slice(begin - span.start, end - span.start)

    def refuse(self, most_records: int) -> None:
        """Let the other hosts find a header that is none, instead of the next `allreduce_unannounced` here."""
        group = self._leaders
        if group is None:
            return
        self._lend(most_records)
        group.finish(group.start_broadcast(torch.zeros(HEADER_BYTES, dtype=torch.uint8, device="cpu"), self._host))

    def num_records(self, count: int, itemsize: int) -> int:
        """Return how many records this member's part of a reduction of so many resident elements takes at most."""
        # Of half an allreduce as many as if all hosts owned as much as the one with most members.
        count = -(-count // self._num_members) * max(map(len, self._hosts)) * len(self._hosts)
        return 0 if self._native is None else self._native.num_records(self._carried(count)[0], itemsize)

    @property
    def late_members(self) -> list[int]:
        """Those of the host that this one waits for during a liveness check, or of all others; none where another
        member of this host can tell.
        """
        if self._index:
            return []
        late = None if self._native is None else self._native.late_host
        hosts = self._hosts if late is None else [self._hosts[late]]
        return [member for host in hosts if host is not self._here for member in host]

    def allreduce_unannounced(
        self, places: Tensors, reduce: Reduce, residual: torch.Tensor | None, header: bytes = b"", most_records: int = 0
    ) -> bool:
        """This member's part of `allreduce_resident`, without a wait for the other members of this host, and on
        nobody's word but a header of `HEADER_BYTES` in front of the data. False if the hosts have different headers, on
        all of them alike: nothing was changed then, and this transport is of no more use. `most_records`: the same in
        every call, see `num_records`.
        """
        dtype, counts = places[0].dtype, self._carried(places[0].numel())
        steps, begin, count = self._steps(reduce, dtype), sum(counts[: self._index]), counts[self._index]
        if not count:
            return True
        if self._native is not None and steps.native is not None:
            end = begin + count
            return self._native.allreduce_resident(places, begin, end, steps.native, residual, header, most_records)
        if header and not self._have_all(header, most_records):
            return False
        with single_threaded():
            slices = [place[begin : begin + count] for place in places]
            lost = None if residual is None else residual[begin : begin + count]
            self._reduce_resident(slices, reduce, lost)
        return True

    def _lend(self, most_records: int) -> None:
        """Do as if the native part had made records, so that both ends go on with the same key whatever makes them."""
        if self._native is not None and isinstance(self._leaders, StreamGroup):
            with self._leaders.lent(most_records):
                pass

    def _have_all(self, header: bytes, most_records: int) -> bool:
        assert self._leaders is not None
        self._lend(most_records)
        mine = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        (found,) = self._take("headers", [HEADER_BYTES * len(self._hosts)], torch.uint8)
        self._leaders.finish(self._leaders.start_allgather(found, mine, [HEADER_BYTES] * len(self._hosts)))
        return all(torch.equal(mine, each) for each in found.split(HEADER_BYTES))

    def _make_steps(self, reduce: Reduce, dtype: torch.dtype) -> _Steps:
        op, prescale, postscale, code = reduce
        num_local, num_hosts = len(self._here), len(self._hosts)
        last = _nothing(dtype)
        if code:  # an average is divided before it travels: a sum could be too large for half precision
            divided = 1.0 / self._num_members if op == ReduceOp.AVERAGE else 1.0
            inside, between = Reduce(ReduceOp.SUM, prescale, divided), Reduce(ReduceOp.SUM)
            last = arithmetic_of(Reduce(ReduceOp.SUM, 1.0, postscale), dtype, num_hosts)
        elif self._apart is not None:  # each member does nothing to its own data but what comes before everything
            inside, between = Reduce(), reduce._replace(code="")
        else:
            inside, between = self._stages(reduce, dtype)
            inside, last = staged(inside, dtype, num_local), self._end(reduce, dtype)
        one, other = (
            arithmetic_of(inside, dtype, num_local),
            arithmetic_of(between, dtype, num_hosts, weights=self._weights),
        )
        stage = one.stage if other.stage == 1.0 else other.stage
        sums = [one.sum, other.sum, last.sum]
        weighted = bool(self._weights) and dtype in HALVES and between.op == ReduceOp.AVERAGE
        if weighted:
            sums[1] = arithmetic_of(between._replace(op=int(ReduceOp.SUM)), dtype, num_hosts).sum
        native = None
        if stage is not None and sums[0] is not None and sums[1] is not None and sums[2] is not None:
            weights = tuple(weight / self._num_members for weight in self._weights) if weighted else ()
            native = Scaling(stage, sums[0], sums[1], sums[2], weights, code.removesuffix("+"))
        return _Steps(inside, between, last, native)

    # The same in Python.

    def _allreduce_in_python(self, inputs: Tensors, outputs: Tensors, reduce: Reduce, residuals: Tensors) -> None:
        dtype, num_leaders = inputs[0].dtype, self._num_leaders
        steps, cut = self._steps(reduce, dtype), self._cut(total(inputs), dtype, num_leaders, reduce)
        whole = torch.cat(list(inputs))
        lost = torch.cat(list(residuals)) if residuals else None
        for begin in range(0, whole.numel(), cut.most * num_leaders):
            piece = whole[begin : begin + cut.most * num_leaders]
            counts = [max(min(cut.most, piece.numel() - c * cut.most), 0) for c in range(num_leaders)]
            counts += [0] * (len(self._here) - num_leaders)
            (mine,) = self._take("mine0", [counts[self._index]], dtype)
            self._local.reducescatter([piece], [mine], [counts], steps.inside)
            if mine.numel():
                at = begin + self._index * cut.most
                self._exchange(mine, None if lost is None else lost[at : at + cut.most], cut.two_steps, reduce)
            self._local.allgather([mine], [piece], [counts])
        unpack(whole, outputs)
        if lost is not None:
            unpack(lost, residuals)

    def _cut(self, count: int, dtype: torch.dtype, num_slices: int, reduce: Reduce) -> Cut:
        """In code the native part's, because blocks begin where slices do."""
        if reduce.code:
            return cut_for(count, dtype.itemsize, num_slices, len(self._hosts))
        return Cut(max(_PORTION_BYTES // (dtype.itemsize * num_slices), 1), two_steps=False)

    def _reduce_resident(self, slices: Tensors, reduce: Reduce, residual: torch.Tensor | None) -> None:
        """This slice leader's slice of the data of all members of this host."""
        dtype, count = slices[0].dtype, slices[0].numel()
        steps, cut, mine = self._steps(reduce, dtype), self._cut(count, dtype, 1, reduce), slices[self._index]
        inside = arithmetic_of(steps.inside, dtype, len(slices))
        for each in slices:
            inside.prepare_(each)
        inside.reduce(slices, mine, self._buffers.take("scratch", count, dtype))
        for begin in range(0, count, cut.most):
            some = slice(begin, begin + cut.most)
            self._exchange(mine[some], None if residual is None else residual[some], cut.two_steps, reduce)
        for each in slices:
            if each is not mine:
                copy(mine, each)

    def _exchange(self, mine: torch.Tensor, residual: torch.Tensor | None, two_steps: bool, reduce: Reduce) -> None:
        """Make a slice of this host's numbers that of all hosts."""
        assert self._leaders is not None
        assert self._between is not None
        steps = self._steps(reduce, mine.dtype)
        if not reduce.code:
            self._between.allreduce([mine], [mine], steps.between)
            steps.end.finish_(mine)
            return
        group, code, num_hosts = self._leaders, CODES[reduce.code.removesuffix("+")], len(self._hosts)
        combine = arithmetic_of(steps.between, mine.dtype, num_hosts).reduce
        scratch = self._buffers.take("scratch", mine.numel(), mine.dtype)
        if not two_steps:
            gathered = self._coded("gathered", code, [mine.numel()] * num_hosts)
            code.encode(mine, gathered[self._host], residual, self._buffers)
            group.finish(
                group.start_allgather(_joined(gathered), gathered[self._host], [len(each) for each in gathered])
            )
            theirs = self._take("theirs", [mine.numel()] * num_hosts, mine.dtype)
            for data, numbers in zip(gathered, theirs, strict=True):
                code.decode(data, numbers)
            combine(theirs, mine, scratch)
            steps.end.finish_(mine)
            return
        counts = spread(mine.numel(), num_hosts)
        parts, lost = mine.split(counts), [None] * num_hosts if residual is None else residual.split(counts)
        sent, own = self._coded("sent", code, counts), counts[self._host]
        received = self._coded("gathered", code, [own] * num_hosts)
        for part, data, gone in zip(parts, sent, lost, strict=True):
            code.encode(part, data, gone, self._buffers)
        sizes = [data.numel() for data in sent]
        group.finish(group.start_alltoall(_joined(received), _joined(sent), [received[0].numel()] * num_hosts, sizes))
        theirs = self._take("theirs", [own] * num_hosts, mine.dtype)
        for data, numbers in zip(received, theirs, strict=True):
            code.decode(data, numbers)
        combine(theirs, parts[self._host], scratch[:own])
        wanted = parts[self._host].clone()
        code.encode(parts[self._host], received[0], None, self._buffers)
        gone = lost[self._host]
        if gone is not None:  # what is lost of all hosts' sum, this host adds the next time
            gone.add_(wanted.sub_(parts[self._host]).nan_to_num_(0.0, 0.0, 0.0))
        for data in received[1:]:
            copy(received[0], data)
        results = self._coded("sent", code, counts)
        group.finish(
            group.start_alltoall(_joined(results), _joined(received), sizes, [received[0].numel()] * num_hosts)
        )
        for data, numbers in zip(results, parts, strict=True):
            code.decode(data, numbers)
        steps.end.finish_(mine)

    def _coded(self, purpose: str, code: Code, counts: Sequence[int]) -> list[torch.Tensor]:
        """Room for so many numbers each in code, one after the other."""
        return self._take(purpose, [code.num_bytes(count) for count in counts], torch.uint8)

    @property
    def _apart(self) -> DistributedTransport | None:
        """Return the group of all members, where each is on a host of its own."""
        return self._between if len(self._hosts) == self._num_members else None

    def adasum(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        self._between_all().adasum(inputs, outputs, reduce)

    def allgather(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]]) -> None:
        if self._apart is not None:
            self._apart.allgather(inputs, outputs, counts)
            return
        overlap(self._gather(each) for each in portions(inputs, outputs, counts, self._limit(inputs[0])))

    def _gather(self, portion: Portion) -> InTwoHalves:
        turn, dtype, divisions = portion.turn, portion.own[0].dtype, [self._divide(each) for each in portion.counts]
        # Inside the host: what its members have becomes the host's block, which all of them get.
        members = [division.block(self._host) for division in divisions]
        blocks = self._take(f"blocks{turn}", [sum(sizes) for sizes in members], dtype)
        self._local.allgather(portion.own, blocks, members)
        # Between hosts: each slice leader sends its share of this host's block, and gets the same share of all blocks.
        carried = [division.carried for division in divisions]
        slices = self._take(f"slices{turn}", [each[self._index] for each in carried], dtype)
        pending = None
        if self._between is not None:
            own = [
                block.split(list(division.shares[self._host]))[self._index]
                for block, division in zip(blocks, divisions, strict=True)
            ]
            shares = self._own_shares(divisions)
            if len(own) > 1:
                self._between.allgather(own, slices, shares)
            elif slices[0].numel():
                pending = self._between.start_gather(own[0], slices[0], shares[0])
        yield
        if self._between is not None and pending is not None:
            self._between.finish(pending)
        # Inside the host: the slice leaders' slices together are all blocks.
        arranged = self._take(f"arranged{turn}", [sum(sizes) for sizes in carried], dtype)
        self._local.allgather(slices, arranged, carried)
        for division, tensor, targets in zip(divisions, arranged, portion.members, strict=True):
            division.by_member(tensor, targets)

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
        """Inside the host through memory, the rest directly between the members concerned."""
        if self._apart is not None:
            self._apart.alltoall(input, output, send_counts, receive_counts)
            return
        sent, received = input[: sum(send_counts)].split(list(send_counts)), output.split(list(receive_counts))
        flat, pending = self._between_all(), []
        for run in consecutive(m for m in range(self._num_members) if m not in self._here):
            sends = [count if m in run else 0 for m, count in enumerate(send_counts)]
            receives = [count if m in run else 0 for m, count in enumerate(receive_counts)]
            pending.append(flat.start_alltoall(where(sent, run, input), where(received, run, output), sends, receives))
        inside = [[counts[m] for m in self._here] for counts in (send_counts, receive_counts)]
        if len(consecutive(self._here)) == 1:
            here = range(self._here[0], self._here[-1] + 1)
            self._local.alltoall(where(sent, here, input), where(received, here, output), *inside)
        else:
            arrived = torch.empty(sum(inside[1]), dtype=input.dtype, device="cpu")
            self._local.alltoall(torch.cat([sent[m] for m in self._here]), arrived, *inside)
            unpack(arrived, [received[m] for m in self._here])
        for each in pending:
            flat.finish(each)

    def reducescatter(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]], reduce: Reduce) -> None:
        if self._apart is not None:
            self._apart.reducescatter(inputs, outputs, counts, reduce)
            return
        overlap(self._scatter(each, reduce) for each in portions(outputs, inputs, counts, self._limit(inputs[0])))

    def _scatter(self, portion: Portion, reduce: Reduce) -> InTwoHalves:
        turn, dtype, divisions = portion.turn, portion.own[0].dtype, [self._divide(each) for each in portion.counts]
        # Inside the host: each slice leader gets its share of all hosts' blocks, combined over this host's members.
        carried = [division.carried for division in divisions]
        arranged = self._take(f"arranged{turn}", [sum(sizes) for sizes in carried], dtype)
        for division, sources, out in zip(divisions, portion.members, arranged, strict=True):
            division.by_leader(sources, out)
        slices = self._take(f"slices{turn}", [each[self._index] for each in carried], dtype)
        inside, between = self._stages(reduce, dtype)
        self._local.reducescatter(arranged, slices, carried, inside)
        # Between hosts: each slice leader gets its share of this host's block, combined over the hosts.
        here = [division.shares[self._host] for division in divisions]
        reduced = self._take(f"reduced{turn}", [shares[self._index] for shares in here], dtype)
        under_way = None
        if self._between is not None:
            under_way = self._between.start_scatter(slices, reduced, self._own_shares(divisions), turn, between)
            next(under_way)
        yield
        if under_way is not None:
            complete(under_way)
            for part in reduced:
                self._end(reduce, part.dtype).finish_(part)
        # Inside the host: the slice leaders' shares together are the host's block, of which each member takes its own
        # part.
        blocks = self._take(f"blocks{turn}", [sum(shares) for shares in here], dtype)
        self._local.allgather(reduced, blocks, here)
        for division, block, output in zip(divisions, blocks, portion.own, strict=True):
            output.copy_(block.split(division.block(self._host))[self._index])

    def barrier(self) -> None:
        self._local.barrier()
        if self._between is not None and self._index == 0:
            self._between.barrier()
        self._local.barrier()

    def close(self) -> None:
        for transport in (self._flat, self._between, self._local):
            if transport is not None:
                transport.close()
        if self._native is not None:
            self._native.close()

    def _stages(self, reduce: Reduce, dtype: torch.dtype) -> tuple[Reduce, Reduce]:
        """Return the reduction within a host and the one between hosts."""
        op, prescale, postscale, _ = reduce
        if dtype not in HALVES:  # an average is a sum that is divided at the very end, by `_end`
            op = int(ReduceOp.SUM) if op == ReduceOp.AVERAGE else op
            return Reduce(op, prescale), Reduce(op)
        return Reduce(op, prescale), Reduce(op, 1.0, postscale)

    def _end(self, reduce: Reduce, dtype: torch.dtype) -> Arithmetic:
        """Return the last step on what has been combined over all members."""
        return (
            _nothing(dtype)
            if dtype in HALVES
            else arithmetic_of(reduce._replace(prescale=1.0), dtype, self._num_members)
        )

    def _between_all(self) -> DistributedTransport:
        """A connection between all members, made when an operation first needs one."""
        if self._apart is not None:
            return self._apart
        if self._flat is None:
            group = self._connect("members", range(self._num_members))
            self._flat = DistributedTransport(group, self._member, self._num_members)
        return self._flat

    def _carried(self, total: int) -> list[int]:
        """Return how many of `total` elements each member of this host carries."""
        idle = len(self._here) - self._num_leaders
        return spread(total, self._num_leaders) + [0] * idle

    def _divide(self, counts: Sequence[int]) -> Division:
        blocks = [sum(counts[member] for member in host) for host in self._hosts]
        return Division(self._hosts, counts, [self._carried(size) for size in blocks])

    def _own_shares(self, divisions: Sequence[Division]) -> list[list[int]]:
        """Return this slice leader's share of each host's block."""
        return [[shares[self._index] for shares in division.shares] for division in divisions]

    def _take(self, purpose: str, sizes: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Room for a part of each of several tensors."""
        return list(self._buffers.take(purpose, sum(sizes), dtype).split(list(sizes)))

    def _limit(self, tensor: torch.Tensor) -> int:
        return _PORTION_BYTES // tensor.dtype.itemsize


def _nothing(dtype: torch.dtype) -> Arithmetic:
    return arithmetic_of(Reduce(), dtype, 1)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join what was split."""
    return parts[0].as_strided((sum(part.numel() for part in parts),), (1,))
