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
from dataclasses import dataclass

import torch

from hora.engine.request import Reduce, ReduceOp
from hora.engine.transport.arithmetic import HALVES, arithmetic_of
from hora.engine.transport.base import Tensors, Transport
from hora.engine.transport.distributed import DistributedTransport
from hora.engine.transport.group import Group
from hora.engine.transport.packing import Buffers, InTwoHalves, complete, overlap, portions, spread, unpack

__all__ = ["HierarchicalTransport"]

# What goes through a host's memory and between hosts at a time: a carrier's slice is a part of it.
_PORTION_BYTES = 8 * 2**20


@dataclass(frozen=True)
class _Division:
    """How one tensor is divided among members, hosts and the carriers of this host.

    `counts[m]` elements belong to member m. A host's block is what belongs to its members, one after another, and
    `shares[h][c]` elements of host h's block are carried by carrier c of every host.
    """

    hosts: Sequence[Sequence[int]]
    counts: Sequence[int]
    shares: Sequence[Sequence[int]]

    @property
    def carried(self) -> list[int]:
        """How much each member of this host carries, of all blocks together."""
        return [sum(shares) for shares in zip(*self.shares, strict=True)]

    def block(self, host: int) -> list[int]:
        """How much of a host's block belongs to each of its members."""
        return [self.counts[member] for member in self.hosts[host]]

    def by_carrier(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rearranged from member order: for each carrier, its share of every host's block."""
        members = tensor.split(list(self.counts))
        blocks = [torch.cat([members[member] for member in host]) for host in self.hosts]
        shares = [block.split(list(sizes)) for block, sizes in zip(blocks, self.shares, strict=True)]
        return torch.cat([share for carrier in zip(*shares, strict=True) for share in carrier])

    def by_member(self, arranged: torch.Tensor, out: torch.Tensor) -> None:
        """Undo `by_carrier`."""
        shares = arranged.split([size for carrier in zip(*self.shares, strict=True) for size in carrier])
        members = out.split(list(self.counts))
        for number, host in enumerate(self.hosts):
            block = torch.cat(shares[number :: len(self.hosts)])
            unpack(block, [members[member] for member in host])


class HierarchicalTransport:
    """See `Transport`. `hosts` lists each host's members; `local` connects those of this member's host, and `connect` makes
    a group, with a name, of members that call it together."""

    def __init__(
        self,
        local: Transport,
        hosts: Sequence[Sequence[int]],
        member: int,
        connect: Callable[[str, Sequence[int]], Group],
    ) -> None:
        self._local = local
        self._hosts = sorted((sorted(host) for host in hosts), key=lambda host: host[0])
        self._member = member
        self._num_members = sum(len(host) for host in self._hosts)
        (self._host,) = (h for h, host in enumerate(self._hosts) if member in host)
        self._here = self._hosts[self._host]
        self._index = self._here.index(member)
        self._num_carriers = min(len(host) for host in self._hosts)
        self._connect = connect
        self._between: DistributedTransport | None = None
        self._flat: DistributedTransport | None = None
        self.name = local.name
        if self._index < self._num_carriers:
            group = connect(f"carrier{self._index}", [host[self._index] for host in self._hosts])
            sizes = tuple(len(host) for host in self._hosts)
            self._between = DistributedTransport(group, self._host, len(self._hosts), weights=sizes)
            self.name = f"{local.name}+{group.backend}"
        self._buffers = Buffers(torch.device("cpu"), 2 * _PORTION_BYTES)

    def allreduce(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        limit = _PORTION_BYTES // inputs[0].dtype.itemsize
        # One portion is between the hosts while others go through this host's memory.
        overlap(
            self._reduce(sources, results, number % 2, reduce)
            for number, (sources, results) in enumerate(portions(inputs, outputs, limit))
            if any(source.numel() for source in sources)
        )

    def adasum(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        self._between_all().adasum(inputs, outputs, reduce)

    def allgather(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]]) -> None:
        dtype, divisions = inputs[0].dtype, [self._divide(each) for each in counts]
        # Inside the host: what its members have becomes the host's block, which all of them get.
        members = [division.block(self._host) for division in divisions]
        blocks = [torch.empty(sum(sizes), dtype=dtype, device="cpu") for sizes in members]
        self._local.allgather(inputs, blocks, members)
        # Between hosts: each carrier sends its share of this host's block, and gets the same share of all blocks.
        slices = self._slices([division.carried for division in divisions], dtype)
        if self._between is not None:
            own = [
                block.split(list(division.shares[self._host]))[self._index]
                for block, division in zip(blocks, divisions, strict=True)
            ]
            self._between.allgather(own, slices, self._own_shares(divisions))
        # Inside the host: the carriers' slices together are all blocks.
        carried = [division.carried for division in divisions]
        arranged = [torch.empty(sum(sizes), dtype=dtype, device="cpu") for sizes in carried]
        self._local.allgather(slices, arranged, carried)
        for division, tensor, output in zip(divisions, arranged, outputs, strict=True):
            division.by_member(tensor, output)

    def broadcast(self, tensors: Tensors, root: int) -> None:
        (source,) = (h for h, host in enumerate(self._hosts) if root in host)
        counts = [self._carried(tensor.numel()) for tensor in tensors]
        if self._host == source:
            self._local.broadcast(tensors, self._here.index(root))
            slices = [tensor.split(each)[self._index] for tensor, each in zip(tensors, counts, strict=True)]
        else:
            slices = self._slices(counts, tensors[0].dtype)
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
        sent = input[: sum(send_counts)].split(list(send_counts))
        received = output.split(list(receive_counts))
        inside = list(self._here)
        arrived = torch.empty(sum(receive_counts[m] for m in inside), dtype=input.dtype, device="cpu")
        self._local.alltoall(
            torch.cat([sent[m] for m in inside]),
            arrived,
            [send_counts[m] for m in inside],
            [receive_counts[m] for m in inside],
        )
        unpack(arrived, [received[m] for m in inside])
        outside = [m for m in range(self._num_members) if m not in inside]
        arrived = torch.empty(sum(receive_counts[m] for m in outside), dtype=input.dtype, device="cpu")
        self._between_all().alltoall(
            torch.cat([sent[m] for m in outside]),
            arrived,
            [0 if m in inside else count for m, count in enumerate(send_counts)],
            [0 if m in inside else count for m, count in enumerate(receive_counts)],
        )
        unpack(arrived, [received[m] for m in outside])

    def reducescatter(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]], reduce: Reduce) -> None:
        dtype, divisions = inputs[0].dtype, [self._divide(each) for each in counts]
        # Inside the host: each carrier gets its share of all hosts' blocks, combined over this host's members.
        carried = [division.carried for division in divisions]
        slices = self._slices(carried, dtype)
        arranged = [division.by_carrier(source) for division, source in zip(divisions, inputs, strict=True)]
        inside, between = self._stages(reduce, dtype)
        self._local.reducescatter(arranged, slices, carried, inside)
        # Between hosts: each carrier gets its share of this host's block, combined over the hosts.
        here = [division.shares[self._host] for division in divisions]
        reduced = self._slices(here, dtype)
        if self._between is not None:
            self._between.reducescatter(slices, reduced, self._own_shares(divisions), between)
            for part in reduced:
                self._finish_(part, reduce)
        # Inside the host: the carriers' shares together are the host's block, of which each member takes its own part.
        blocks = [torch.empty(sum(shares), dtype=dtype, device="cpu") for shares in here]
        self._local.allgather(reduced, blocks, here)
        for division, block, output in zip(divisions, blocks, outputs, strict=True):
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

    def _reduce(self, sources: Tensors, results: Tensors, turn: int, reduce: Reduce) -> InTwoHalves:
        """One portion of an allreduce. Two are under way at a time, in different turns."""
        total, dtype = sum([source.numel() for source in sources]), sources[0].dtype
        source, result = sources[0], results[0]
        if len(sources) > 1:
            source = result = torch.cat(list(sources), out=self._buffers.take(f"packed{turn}", total, dtype))
        counts = self._carried(total)
        part = self._buffers.take(f"slice{turn}", counts[self._index], dtype)
        inside, between = self._stages(reduce, dtype)
        self._local.reducescatter([source], [part], [counts], inside)
        under_way = None
        if self._between is not None and part.numel():
            under_way = self._between.start_reduction(part, turn, between)
            next(under_way)
        yield
        if under_way is not None:
            complete(under_way)
            self._finish_(part, reduce)
        self._local.allgather([part], [result], [counts])
        if len(sources) > 1:
            unpack(result, results)

    def _stages(self, reduce: Reduce, dtype: torch.dtype) -> tuple[Reduce, Reduce]:
        """What is done to the members of a host, and what to the hosts."""
        op, prescale, postscale = reduce
        if dtype not in HALVES:  # an average is a sum that is divided at the very end, by `_finish_`
            op = int(ReduceOp.SUM) if op == ReduceOp.AVERAGE else op
            return Reduce(op, prescale), Reduce(op)
        return Reduce(op, prescale), Reduce(op, 1.0, postscale)

    def _finish_(self, tensor: torch.Tensor, reduce: Reduce) -> None:
        """What is left to do with what has been combined over all members."""
        if tensor.dtype not in HALVES:
            arithmetic_of(reduce._replace(prescale=1.0), tensor.dtype, self._num_members).finish_(tensor)

    def _between_all(self) -> DistributedTransport:
        """A connection between all members, made when an operation first needs one."""
        if self._flat is None:
            group = self._connect("members", range(self._num_members))
            self._flat = DistributedTransport(group, self._member, self._num_members)
        return self._flat

    def _carried(self, total: int) -> list[int]:
        """How many of `total` elements each member of this host carries."""
        idle = len(self._here) - self._num_carriers
        return spread(total, self._num_carriers) + [0] * idle

    def _divide(self, counts: Sequence[int]) -> _Division:
        blocks = [sum(counts[member] for member in host) for host in self._hosts]
        return _Division(self._hosts, counts, [self._carried(size) for size in blocks])

    def _own_shares(self, divisions: Sequence[_Division]) -> list[list[int]]:
        """What this carrier carries of each host's block."""
        return [[shares[self._index] for shares in division.shares] for division in divisions]

    def _slices(self, counts: Sequence[Sequence[int]], dtype: torch.dtype) -> list[torch.Tensor]:
        """Room for this member's slice of each tensor."""
        sizes = [each[self._index] for each in counts]
        return list(torch.empty(sum(sizes), dtype=dtype, device="cpu").split(sizes))
