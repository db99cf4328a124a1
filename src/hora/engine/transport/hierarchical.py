"""The transport of a set whose members are on several hosts: memory inside a host, a group between hosts.

Every host has carriers, as many as the smallest host has members. Carrier i of all hosts form a group
and carry slice i of everything, so that each byte crosses the network once per host and all carriers work
at the same time.

Reductions combine the members of each host in member order, then the hosts in the order of their first
members; every element is combined that way on all hosts, so results are bit-identical on all members. They
may differ in the last bit from a one-host run of the same numbers, which combines 0, 1, 2, …. Half precision
travels between hosts as it is, so it is rounded twice: what a host's members have together, which is their own
average where one is wanted, and the result. The engine makes it and gives it `local`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hora.engine.request import Reduce, ReduceOp
from hora.engine.shm.segment import Segment
from hora.engine.transport.arithmetic import HALVES, Arithmetic, arithmetic_of, single_threaded
from hora.engine.transport.base import Guard, Tensors, Transport
from hora.engine.transport.codes import CODES
from hora.engine.transport.distributed import DistributedTransport
from hora.engine.transport.division import Division, Portion, consecutive, portions, where
from hora.engine.transport.exchange import Exchange, make_exchange
from hora.engine.transport.group import Group
from hora.engine.transport.packing import Buffers, InTwoHalves, complete, overlap, spread, total, unpack
from hora.engine.transport.relay import Relay, Steps
from hora.engine.transport.relay_memory import Place, RelayMemory
from hora.engine.transport.resident import reduce_resident

__all__ = ["HierarchicalTransport"]

# What goes through a host's memory and between hosts at a time: a carrier's slice is a part of it. Small pieces stay in the
# processors' caches, large ones cost Python less. Most process sets never send much: memory for large ones is made when needed.
SMALL_PIECE_BYTES = 128 * 2**10
LARGE_PIECE_BYTES = 2 * 2**20
RESIDENT_PIECE_BYTES = 256 * 2**10
# Of an allgather or a reducescatter two portions are under way at a time, which bounds the memory.
_PORTION_BYTES = 4 * 2**20


class HierarchicalTransport:
    """See `Transport`. `hosts` lists each host's members; `local` connects those of this member's host, `share` gives them
    the same new memory, and `connect` makes a group, with a name, of members that call it together. `native`, the same for all
    members: most of them will have the native part do an allreduce."""

    def __init__(
        self,
        local: Transport,
        hosts: Sequence[Sequence[int]],
        member: int,
        *,
        share: Callable[[int], Segment],
        connect: Callable[[str, Sequence[int]], Group],
        native: bool = False,
        guard: Guard,
        limit_s: float,
    ) -> None:
        self._local = local
        self._hosts = sorted((sorted(host) for host in hosts), key=lambda host: host[0])
        self._member = member
        self._num_members = sum(len(host) for host in self._hosts)
        (self._host,) = (h for h, host in enumerate(self._hosts) if member in host)
        self._here = self._hosts[self._host]
        self._index = self._here.index(member)
        self._num_carriers = min(len(host) for host in self._hosts)
        self._share, self._connect = share, connect
        self._guard, self._limit_s = guard, limit_s
        self._carriers: Group | None = None
        self._between: DistributedTransport | None = None
        self._flat: DistributedTransport | None = None
        self._native = native and len(self._hosts) == 2
        self.name = local.name
        if self._index < self._num_carriers:
            group = connect(f"carrier{self._index}", [host[self._index] for host in self._hosts])
            self._between = DistributedTransport(group, self._host, len(self._hosts), weights=self._sizes)
            self._carriers = group
            self.name = group.backend if self._apart is not None else f"{local.name}+{group.backend}"
        self._buffers = Buffers(torch.device("cpu"), 2 * _PORTION_BYTES)
        self._small = self._make_memory(SMALL_PIECE_BYTES)
        self._large: RelayMemory | None = None

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(len(host) for host in self._hosts)

    @property
    def _place(self) -> Place:
        return Place(self._index, len(self._here), self._num_carriers, self._host, len(self._hosts))

    def _make_memory(self, piece_bytes: int) -> RelayMemory:
        return RelayMemory(self._share, self._place, piece_bytes=piece_bytes, guard=self._guard, limit_s=self._limit_s)

    def _memory_for(self, num_bytes: int, *, natively: bool = False) -> RelayMemory:
        """The memory for so many bytes, which all members choose alike."""
        if natively or num_bytes <= self._small.piece_bytes:
            return self._small
        if self._large is None:
            self._large = self._make_memory(LARGE_PIECE_BYTES)
        return self._large

    def _goes_natively(self, reduce: Reduce, dtype: torch.dtype) -> bool:
        """Whether the native part does it on all members. Not every processor can convert float16."""
        return self._native and reduce.op in (ReduceOp.SUM, ReduceOp.AVERAGE) and dtype is not torch.float16

    def allreduce(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        dtype = inputs[0].dtype
        steps = self._steps(reduce, dtype) if self._apart is None else self._steps_apart(reduce, dtype)
        memory = self._memory_for(total(inputs) * dtype.itemsize, natively=self._goes_natively(reduce, dtype))
        Relay(memory, self._exchange(steps, ""), self._buffers, steps).run(inputs, outputs)

    def _steps(self, reduce: Reduce, dtype: torch.dtype) -> Steps:
        inside, between = self._stages(reduce, dtype)
        return Steps(
            arithmetic_of(inside, dtype, len(self._here)),
            arithmetic_of(between, dtype, len(self._hosts), weights=self._sizes),
            self._end(reduce, dtype),
        )

    def _steps_apart(self, reduce: Reduce, dtype: torch.dtype) -> Steps:
        """Every member on a host of its own: everything happens between hosts, but for what each does to its own data."""
        between = arithmetic_of(reduce, dtype, self._num_members)
        prescale = reduce.prescale if between.prescales else 1.0
        return Steps(arithmetic_of(Reduce(prescale=prescale), dtype, 1, elsewhere=True), between, _nothing(dtype))

    def allreduce_compressed(self, inputs: Tensors, outputs: Tensors, reduce: Reduce, residuals: Tensors) -> None:
        dtype = inputs[0].dtype
        steps = self._steps_compressed(reduce, dtype)
        memory = self._memory_for(total(inputs) * dtype.itemsize)
        Relay(memory, self._exchange(steps, reduce.code), self._buffers, steps).run(inputs, outputs, residuals)

    def allreduce_resident(self, places: Tensors, reduce: Reduce, residual: torch.Tensor | None) -> None:
        """An allreduce, also a compressed one, of data in this host's memory: `places` are its members' data, which all of
        them see and have filled. `residual` is for all of it, of which this member needs its slice."""
        dtype, counts = places[0].dtype, self._carried(places[0].numel())
        steps = self._steps_compressed(reduce, dtype) if reduce.code else self._steps(reduce, dtype)
        exchange = self._exchange(steps, reduce.code)
        if exchange is not None and counts[self._index]:
            slices = [place.split(counts)[self._index] for place in places]
            lost = None if residual is None else residual.split(counts)[self._index]
            with single_threaded():
                reduce_resident(
                    slices, lost, self._place, exchange, steps, self._buffers, piece_bytes=RESIDENT_PIECE_BYTES
                )
        self._local.barrier()

    def _steps_compressed(self, reduce: Reduce, dtype: torch.dtype) -> Steps:
        # An average is divided before it travels: a sum could be too large for half precision.
        divided = 1.0 / self._num_members if reduce.op == ReduceOp.AVERAGE else 1.0
        return Steps(
            arithmetic_of(Reduce(ReduceOp.SUM, reduce.prescale, divided), dtype, len(self._here)),
            arithmetic_of(Reduce(ReduceOp.SUM), dtype, len(self._hosts)),
            arithmetic_of(Reduce(ReduceOp.SUM, 1.0, reduce.postscale), dtype, len(self._hosts)),
        )

    def _exchange(self, steps: Steps, code: str) -> Exchange | None:
        """Of a carrier."""
        if self._carriers is None:
            return None
        found = CODES[code.removesuffix("+")] if code else None
        return make_exchange(self._carriers, self._host, len(self._hosts), steps.between, self._buffers, found)

    @property
    def _apart(self) -> DistributedTransport | None:
        """What connects all members, where each is on a host of its own."""
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
        # Between hosts: each carrier sends its share of this host's block, and gets the same share of all blocks.
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
                pending = self._between.start_gather(own[0], slices[0], shares[0], turn)
        yield
        if self._between is not None and pending is not None:
            self._between.finish(pending)
        # Inside the host: the carriers' slices together are all blocks.
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
        self,
        input: torch.Tensor,
        output: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
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
        # Inside the host: each carrier gets its share of all hosts' blocks, combined over this host's members.
        carried = [division.carried for division in divisions]
        arranged = self._take(f"arranged{turn}", [sum(sizes) for sizes in carried], dtype)
        for division, sources, out in zip(divisions, portion.members, arranged, strict=True):
            division.by_carrier(sources, out)
        slices = self._take(f"slices{turn}", [each[self._index] for each in carried], dtype)
        inside, between = self._stages(reduce, dtype)
        self._local.reducescatter(arranged, slices, carried, inside)
        # Between hosts: each carrier gets its share of this host's block, combined over the hosts.
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
        # Inside the host: the carriers' shares together are the host's block, of which each member takes its own part.
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
        for memory in (self._small, self._large):
            if memory is not None:
                memory.close()

    def _stages(self, reduce: Reduce, dtype: torch.dtype) -> tuple[Reduce, Reduce]:
        """What is done to the members of a host, and what to the hosts."""
        op, prescale, postscale, _ = reduce
        if dtype not in HALVES:  # an average is a sum that is divided at the very end, by `_end`
            op = int(ReduceOp.SUM) if op == ReduceOp.AVERAGE else op
            return Reduce(op, prescale), Reduce(op)
        return Reduce(op, prescale), Reduce(op, 1.0, postscale)

    def _end(self, reduce: Reduce, dtype: torch.dtype) -> Arithmetic:
        """What is left to do with what has been combined over all members."""
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
        """How many of `total` elements each member of this host carries."""
        idle = len(self._here) - self._num_carriers
        return spread(total, self._num_carriers) + [0] * idle

    def _divide(self, counts: Sequence[int]) -> Division:
        blocks = [sum(counts[member] for member in host) for host in self._hosts]
        return Division(self._hosts, counts, [self._carried(size) for size in blocks])

    def _own_shares(self, divisions: Sequence[Division]) -> list[list[int]]:
        """What this carrier carries of each host's block."""
        return [[shares[self._index] for shares in division.shares] for division in divisions]

    def _take(self, purpose: str, sizes: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Room for a part of each of several tensors."""
        return list(self._buffers.take(purpose, sum(sizes), dtype).split(list(sizes)))

    def _limit(self, tensor: torch.Tensor) -> int:
        return _PORTION_BYTES // tensor.dtype.itemsize


def _nothing(dtype: torch.dtype) -> Arithmetic:
    return arithmetic_of(Reduce(), dtype, 1)
