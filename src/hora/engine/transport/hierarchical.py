"""The transport of a set whose members are on several hosts: memory inside a host, gloo between hosts.

Every host has carriers, as many as the smallest host has members. Carrier i of all hosts form a gloo group
and carry slice i of everything, so that each byte crosses the network once per host and all carriers work
at the same time.

Reductions combine the members of each host in member order, then the hosts in the order of their first
members; every element is combined that way on all hosts, so results are bit-identical on all members. They
may differ in the last bit from a one-host run of the same numbers, which combines 0, 1, 2, …. The engine
makes it and gives it `local`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from hora.engine.request import ReduceOp
from hora.engine.transport.arithmetic import Reduction, reduction
from hora.engine.transport.base import Guard, Tensors, Transport
from hora.engine.transport.gloo import DistributedTransport
from hora.engine.transport.packing import Buffers, InTwoHalves, complete, overlap, pieces, spread, unpack

__all__ = ["HierarchicalTransport"]

# What goes through a host's memory and between hosts at a time: a carrier's slice is a part of it.
_PIECE_BYTES = 8 * 2**20


class HierarchicalTransport:
    """See `Transport`. `hosts` lists each host's members; `local` connects those of this member's host."""

    def __init__(
        self,
        local: Transport,
        hosts: Sequence[Sequence[int]],
        member: int,
        store: Store,
        guard: Guard,
        limit_s: float,
        address: str | None = None,
    ) -> None:
        self._local = local
        self._hosts = sorted((sorted(host) for host in hosts), key=lambda host: host[0])
        self._member = member
        self._num_members = sum(len(host) for host in self._hosts)
        (self._host,) = (h for h, host in enumerate(self._hosts) if member in host)
        self._here = self._hosts[self._host]
        self._index = self._here.index(member)
        self._num_carriers = min(len(host) for host in self._hosts)
        self._store, self._guard, self._limit_s, self._address = store, guard, limit_s, address
        self._between: DistributedTransport | None = None
        self._flat: DistributedTransport | None = None
        if self._index < self._num_carriers:
            self._between = self._connect(f"carrier{self._index}", self._host, len(self._hosts))
        self._buffers = Buffers(torch.device("cpu"), 2 * _PIECE_BYTES)
        self.name = f"{local.name}+gloo"

    def allreduce(self, inputs: Tensors, outputs: Tensors, *, op: int, prescale: float, postscale: float) -> None:
        limit = _PIECE_BYTES // inputs[0].dtype.itemsize
        rule = reduction(op, inputs[0].dtype, 1.0, postscale, self._num_members)
        # One piece is between the hosts while others go through this host's memory.
        overlap(
            self._reduce(sources, results, number % 2, op, prescale, rule)
            for number, (sources, results) in enumerate(pieces(inputs, outputs, limit))
            if any(source.numel() for source in sources)
        )

    def adasum(self, inputs: Tensors, outputs: Tensors, *, prescale: float, postscale: float) -> None:
        self._everybody().adasum(inputs, outputs, prescale=prescale, postscale=postscale)

    def allgather(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]]) -> None:
        dtype = inputs[0].dtype
        blocks = [[sum(each[m] for m in host) for host in self._hosts] for each in counts]
        mine = [torch.empty(block[self._host], dtype=dtype) for block in blocks]
        self._local.allgather(inputs, mine, [[each[m] for m in self._here] for each in counts])
        # parts[i][h][c]: how much of host h's block of tensor i carrier c carries
        parts = [[self._carried(size) for size in block] for block in blocks]
        carried = [[sum(part[c] for part in each) for c in range(len(self._here))] for each in parts]
        slices = self._slices(carried, dtype)
        if self._between is not None:
            own = [block.split(each[self._host])[self._index] for block, each in zip(mine, parts, strict=True)]
            self._between.allgather(own, slices, [[part[self._index] for part in each] for each in parts])
        gathered = [torch.empty(sum(each), dtype=dtype) for each in carried]
        self._local.allgather(slices, gathered, carried)
        for i, output in enumerate(outputs):
            pieces = gathered[i].split([part[c] for c in range(len(self._here)) for part in parts[i]])
            targets = output.split(list(counts[i]))
            for h, host in enumerate(self._hosts):
                block = torch.cat(pieces[h :: len(self._hosts)])
                for m, part in zip(host, block.split([counts[i][m] for m in host]), strict=True):
                    targets[m].copy_(part)

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
        arrived = torch.empty(sum(receive_counts[m] for m in inside), dtype=input.dtype)
        self._local.alltoall(
            torch.cat([sent[m] for m in inside]),
            arrived,
            [send_counts[m] for m in inside],
            [receive_counts[m] for m in inside],
        )
        unpack(arrived, [received[m] for m in inside])
        outside = [m for m in range(self._num_members) if m not in inside]
        arrived = torch.empty(sum(receive_counts[m] for m in outside), dtype=input.dtype)
        self._everybody().alltoall(
            torch.cat([sent[m] for m in outside]),
            arrived,
            [0 if m in inside else count for m, count in enumerate(send_counts)],
            [0 if m in inside else count for m, count in enumerate(receive_counts)],
        )
        unpack(arrived, [received[m] for m in outside])

    def reducescatter(
        self,
        inputs: Tensors,
        outputs: Tensors,
        counts: Sequence[Sequence[int]],
        *,
        op: int,
        prescale: float,
        postscale: float,
    ) -> None:
        dtype = inputs[0].dtype
        whole = ReduceOp.SUM if op == ReduceOp.AVERAGE else op
        # The block of a host is what its members shall get. parts[i][h][c]: carrier c's share of host h's
        # block.
        blocks = [[sum(each[m] for m in host) for host in self._hosts] for each in counts]
        parts = [[self._carried(size) for size in block] for block in blocks]
        carried = [[sum(part[c] for part in each) for c in range(len(self._here))] for each in parts]
        arranged = [self._by_carrier(*each) for each in zip(inputs, counts, parts, strict=True)]
        slices = self._slices(carried, dtype)
        self._local.reducescatter(arranged, slices, carried, op=whole, prescale=prescale, postscale=1.0)
        reduced = self._slices([each[self._host] for each in parts], dtype)
        if self._between is not None:
            shares = [[part[self._index] for part in each] for each in parts]
            self._between.reducescatter(slices, reduced, shares, op=whole, prescale=1.0, postscale=1.0)
            rule = reduction(op, dtype, 1.0, postscale, self._num_members)
            for part in reduced:
                rule.finish_(part)
        mine = [torch.empty(block[self._host], dtype=dtype) for block in blocks]
        self._local.allgather(reduced, mine, [each[self._host] for each in parts])
        for block, each, output in zip(mine, counts, outputs, strict=True):
            output.copy_(block.split([each[m] for m in self._here])[self._index])

    def barrier(self) -> None:
        self._local.barrier()
        if self._between is not None and self._index == 0:
            self._between.barrier()
        self._local.barrier()

    def close(self) -> None:
        for transport in (self._flat, self._between, self._local):
            if transport is not None:
                transport.close()

    def _reduce(
        self, sources: Tensors, results: Tensors, slot: int, op: int, prescale: float, rule: Reduction
    ) -> InTwoHalves:
        total, dtype = sum([source.numel() for source in sources]), sources[0].dtype
        whole = ReduceOp.SUM if op == ReduceOp.AVERAGE else op
        source, result = sources[0], results[0]
        if len(sources) > 1:
            source = result = torch.cat(list(sources), out=self._buffers.take(f"packed{slot}", total, dtype))
        counts = self._carried(total)
        part = self._buffers.take(f"slice{slot}", counts[self._index], dtype)
        self._local.reducescatter([source], [part], [counts], op=whole, prescale=prescale, postscale=1.0)
        between = None
        if self._between is not None and part.numel():
            between = self._between.reduce_piece(part, slot, op=whole)
            next(between)
        yield
        if between is not None:
            complete(between)
            rule.finish_(part)
        self._local.allgather([part], [result], [counts])
        if len(sources) > 1:
            unpack(result, results)

    def _everybody(self) -> DistributedTransport:
        """A connection between all members, made when an operation first needs one."""
        if self._flat is None:
            self._flat = self._connect("everybody", self._member, self._num_members)
        return self._flat

    def _connect(self, prefix: str, member: int, num_members: int) -> DistributedTransport:
        store = PrefixStore(prefix, self._store)
        return DistributedTransport(
            store, member, num_members, self._guard, self._limit_s, device="cpu", address=self._address
        )

    def _carried(self, total: int) -> list[int]:
        """How many of `total` elements each member of this host carries."""
        idle = len(self._here) - self._num_carriers
        return spread(total, self._num_carriers) + [0] * idle

    def _slices(self, counts: Sequence[Sequence[int]], dtype: torch.dtype) -> list[torch.Tensor]:
        """Room for this member's slice of each tensor."""
        return list(
            torch.empty(sum(each[self._index] for each in counts), dtype=dtype).split(
                [each[self._index] for each in counts]
            )
        )

    def _by_carrier(self, tensor: torch.Tensor, counts: Sequence[int], parts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Rearranged: for each carrier of this host, its share of every host's block."""
        members = tensor.split(list(counts))
        shares = [
            torch.cat([members[m] for m in host]).split(list(part))
            for host, part in zip(self._hosts, parts, strict=True)
        ]
        return torch.cat([share[c] for c in range(len(self._here)) for share in shares])
