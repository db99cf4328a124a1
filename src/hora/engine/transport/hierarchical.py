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

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch

from hora.engine.request import Kind, Reduce, ReduceOp
from hora.engine.shm.segment import Segment
from hora.engine.transport.arithmetic import HALVES, arithmetic_of, staged, stages
from hora.engine.transport.base import AliveCheck, FusingTransport, LocalTransport, Tensors
from hora.engine.transport.distributed import DistributedTransport
from hora.engine.transport.native_hosts import HEADER_BYTES, NativeHosts, Scaling
from hora.engine.transport.packing import InTwoHalves, complete, overlap, spread, total, unpack
from hora.engine.transport.shm import ShmTransport
from hora.engine.transport.stream import StreamGroup

# Two portions are in flight at a time, which bounds the memory.
_PORTION_BYTES = 4 * 2**20
_FUSED_BYTES = 32 * 2**20


class HierarchicalTransport(FusingTransport):
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
    ) -> None:
        super().__init__(member, torch.device("cpu"), _FUSED_BYTES)
        self._local = local
        self._hosts = sorted((sorted(host) for host in hosts), key=lambda host: host[0])
        self._num_members = sum(len(host) for host in self._hosts)
        (self._host,) = (h for h, host in enumerate(self._hosts) if member in host)
        self._here = self._hosts[self._host]
        self._index = self._here.index(member)
        sizes = tuple(map(len, self._hosts))
        self._num_leaders = min(sizes)
        self._weights = () if min(sizes) == max(sizes) else sizes
        self._connect = connect
        self._between: DistributedTransport | None = None  # the slice leaders with this one's number
        self._flat: DistributedTransport | None = None  # all members
        self.name, group = local.name, None
        if self._index < self._num_leaders:
            group = connect(f"leader{self._index}", [host[self._index] for host in self._hosts])
            self._between = DistributedTransport(group, weights=self._weights)
            self.name = group.backend if self._apart is not None else f"{local.name}+{group.backend}"
        self._native = NativeHosts(share, group, self._hosts, self._host, self._index, check_alive)
        self._scaling = lru_cache(maxsize=256)(self._make_scaling)

    def allreduce(self, inputs: Tensors, outputs: Tensors, reduce: Reduce, residuals: Tensors = ()) -> None:
        """Reduce several tensors as one, encoded between hosts with `reduce.code` if there is one.

        Encoded tensors are float32, and their sum or average is wanted. `residuals[i]` is the encoding error of tensor
        i on this member, from before and updated now (empty: not kept).
        """
        if not total(inputs):
            return
        scaling = None if reduce.op == ReduceOp.ADASUM else self._scaling(reduce, inputs[0].dtype)
        if scaling is None:
            self._between_all().allreduce(inputs, outputs, reduce)
        else:
            self._native.allreduce(inputs, outputs, scaling, residuals)

    def reduce_resident(
        self, kind: Kind, places: Tensors, reduce: Reduce, residual: torch.Tensor | None, header: bytes = b""
    ) -> bool:
        """Run this member's part of an allreduce of data in this host's memory, or of half of one, without negotiation
        and without waiting for this host's members.

        `places` are the members' data, which all of them see and have filled. `residual` covers all of it; this member
        needs its slice. A reducescatter writes each member's own slice of its place; an allgather copies the own slices
        to all places. Members are numbered host by host and own slices of equal length in that order.

        Only a header of `HEADER_BYTES` precedes the data. Returns False if the hosts have different headers, on all of
        them alike: nothing was changed, and this transport is unusable.
        """
        count, scaling = places[0].numel(), self._scaling(reduce, places[0].dtype)
        assert scaling is not None, f"{reduce} of {places[0].dtype} is not of a bucket"
        owned = count // self._num_members
        if kind is Kind.ALLREDUCE:
            spans = [self._own_span(0, count)]
        else:
            spans = [self._own_span(host[0] * owned, len(host) * owned) for host in self._hosts]
        if not any(spans):
            return True
        at = self._here[0] * owned
        owners = range(at, at + owned)
        return self._native.reduce_resident(kind, places, spans, owners, scaling, residual, header)

    def _own_span(self, begin: int, count: int) -> range:
        """Return this member's share of these elements."""
        shares = self._carried(count)
        begin += sum(shares[: self._index])
        return range(begin, begin + shares[self._index])

    def refuse(self) -> None:
        """Send the other hosts an invalid header instead of the next `reduce_resident` here."""
        if self._between is not None:
            group = self._between.group
            assert isinstance(group, StreamGroup), group
            with group.lent():  # both ends continue with the same key, whichever part makes the records
                pass
            self._between.broadcast([torch.zeros(HEADER_BYTES, dtype=torch.uint8, device="cpu")], self._host)

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

    def _gather(self, own: torch.Tensor, gathered: torch.Tensor, counts: Sequence[int]) -> None:
        if self._apart is not None:
            self._apart.allgather([own], [gathered], [counts])
            return
        targets = gathered.split(list(counts))
        overlap(
            self._gather_piece(own[piece], [target[piece] for target in targets], turn)
            for turn, piece in pieces(counts, _PORTION_BYTES // own.itemsize)
        )

    def _gather_piece(self, own: torch.Tensor, targets: Tensors, turn: int) -> InTwoHalves:
        counts = [target.numel() for target in targets]
        shares, members = self._shares(counts), [counts[member] for member in self._here]
        # Inside the host: the members' data becomes the host's block, which all of them get.
        block = self._buffers.get(f"block{turn}", sum(members), own.dtype)
        self._local.allgather([own], [block], [members])
        # Between hosts: each slice leader sends its share of this host's block, and gets the same share of all blocks.
        mine, pending = [of_host[self._index] for of_host in shares], None
        slices = self._buffers.get(f"slices{turn}", sum(mine), own.dtype)
        if self._between is not None and any(mine):
            pending = self._between.start_gather(block.split(shares[self._host])[self._index], slices, mine)
        yield
        if self._between is not None and pending is not None:
            self._between.group.finish(pending)
        # Inside the host: the slice leaders' shares together are all hosts' blocks.
        sizes = [sum(of_host) for of_host in shares]
        blocks = self._buffers.get(f"blocks{turn}", sum(sizes), own.dtype).split(sizes)
        self._local.allgather(slices.split(mine), blocks, shares)
        for block, host in zip(blocks, self._hosts, strict=True):
            unpack(block, [targets[member] for member in host])

    def _broadcast(self, tensor: torch.Tensor, root: int) -> None:
        if self._apart is not None:
            self._apart.broadcast([tensor], root)
            return
        (source,) = (h for h, host in enumerate(self._hosts) if root in host)
        counts = self._carried(tensor.numel())
        if self._host == source:
            self._local.broadcast([tensor], self._here.index(root))
            own = tensor.split(counts)[self._index]
        else:
            own = torch.empty(counts[self._index], dtype=tensor.dtype, device="cpu")
        if self._between is not None:
            self._between.broadcast([own], source)
        if self._host != source:
            self._local.allgather([own], [tensor], [counts])

    def alltoall(
        self, input: torch.Tensor, output: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        """Exchange inside the host through memory, the rest directly between the members concerned."""
        if self._apart is not None:
            self._apart.alltoall(input, output, send_counts, receive_counts)
            return
        sent, received = input[: sum(send_counts)].split(list(send_counts)), output.split(list(receive_counts))
        beyond = ([part[:0] if m in self._here else part for m, part in enumerate(all_)] for all_ in (received, sent))
        group = self._between_all().group
        assert isinstance(group, StreamGroup), group
        pending = group.start_exchange(*beyond)
        self._local.exchange([received[m] for m in self._here], [sent[m] for m in self._here])
        group.finish(pending)

    def _scatter(self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int], reduce: Reduce) -> None:
        if self._apart is not None:
            self._apart.reducescatter([source], [output], [counts], reduce)
            return
        parts = source.split(list(counts))
        overlap(
            self._scatter_piece([part[piece] for part in parts], output[piece], reduce, turn)
            for turn, piece in pieces(counts, _PORTION_BYTES // source.itemsize)
        )

    def _scatter_piece(self, parts: Tensors, output: torch.Tensor, reduce: Reduce, turn: int) -> InTwoHalves:
        counts, dtype = [part.numel() for part in parts], output.dtype
        shares = self._shares(counts)
        # Inside the host: each slice leader gets its share of all hosts' blocks, combined over this host's members.
        mine = [of_host[self._index] for of_host in shares]
        blocks = [torch.cat([parts[member] for member in host]) for host in self._hosts]
        slices = self._buffers.get(f"slices{turn}", sum(mine), dtype)
        inside, between, end = stages(reduce, dtype, self._num_members)
        self._local.reducescatter(blocks, slices.split(mine), shares, inside)
        # Between hosts: each slice leader gets its share of this host's block, combined over the hosts.
        here, under_way = shares[self._host], None
        reduced = self._buffers.get(f"reduced{turn}", here[self._index], dtype)
        if self._between is not None and any(mine):
            under_way = self._between.start_scatter(slices, reduced, mine, between, turn)
            next(under_way)
        yield
        if under_way is not None:
            complete(under_way)
            end.finish(reduced, reduced)
        # Inside the host: the slice leaders' shares together are the host's block, of which each member takes its part.
        block = self._buffers.get(f"block{turn}", sum(here), dtype)
        self._local.allgather([reduced], [block], [here])
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
            self._flat = DistributedTransport(group, hosts=self._hosts)
        return self._flat

    def _carried(self, total: int) -> list[int]:
        """Return how many of `total` elements each member of this host carries."""
        idle = len(self._here) - self._num_leaders
        return spread(total, self._num_leaders) + [0] * idle

    def _shares(self, counts: Sequence[int]) -> list[list[int]]:
        """Return how much each member of this host carries of every host's block, the data of the host's members."""
        return [self._carried(sum(counts[member] for member in host)) for host in self._hosts]


def pieces(counts: Sequence[int], limit: int) -> Iterator[tuple[int, slice]]:
    """Yield pieces of all members' parts of these sizes, of about `limit` elements together, in alternating turns."""
    most = max(counts)
    step = most if sum(counts) <= limit else max(limit // len(counts), 1)
    return ((number % 2, slice(start, start + step)) for number, start in enumerate(range(0, most, step)))
