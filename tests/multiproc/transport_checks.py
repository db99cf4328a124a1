"""Checks that every transport must pass, against results computed in the slow and obvious way.

`check_everything` runs on each member and returns fingerprints of all results; the caller compares them between
members. Expected values are computed from the inputs of all members, which each member derives from the seed.
"""

from __future__ import annotations

import hashlib

import torch

from hora.engine.request import Reduce, ReduceOp

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)
ALL_DTYPES = (*INTEGERS, *FLOATS, torch.bool)


def data(seed: int, member: int, count: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Return input number `seed` of a member."""
    generator = torch.Generator().manual_seed(1000 * seed + member)
    if dtype == torch.bool:
        return (torch.rand(count, generator=generator) > 0.5).to(device)
    if dtype.is_floating_point:
        return (torch.rand(count, generator=generator, dtype=torch.float64) * 4 - 2).to(dtype).to(device)
    low = 0 if dtype == torch.uint8 else -9
    return torch.randint(low, 10, (count,), generator=generator).to(dtype).to(device)


def fingerprint(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def combined(parts: list[torch.Tensor], op: int) -> torch.Tensor:
    """Combine in member order; each step is rounded to the dtype, but half precision only at the end."""
    wide = [part.float() if part.dtype in HALVES else part for part in parts]
    total = wide[0]
    for part in wide[1:]:
        if op in (ReduceOp.SUM, ReduceOp.AVERAGE):
            total = total + part
        elif op == ReduceOp.PRODUCT:
            total = total * part
        else:
            total = torch.minimum(total, part) if op == ReduceOp.MIN else torch.maximum(total, part)
    return total.to(parts[0].dtype)


def truncated(values: torch.Tensor, divisor: int) -> torch.Tensor:
    magnitude = torch.div(values.abs().long(), divisor, rounding_mode="floor")
    return (magnitude * values.sign()).to(values.dtype)


class Checker:
    """Runs all operations on one member."""

    def __init__(self, transport, member: int, size: int, *, device: str = "cpu", same_order: bool = True):
        self.transport, self.member, self.size, self.device = transport, member, size, device
        self.same_order = same_order  # float sums are combined in member order, bit for bit
        self.results: list[str] = []

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.cpu()
        self.results.append(fingerprint(tensor))
        return tensor

    def equal(self, got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        got, expected = got.cpu(), expected.cpu()
        if self.same_order or not got.dtype.is_floating_point:
            assert torch.equal(got, expected), f"{what}: {got[:8]} is not {expected[:8]}"
        else:
            limit = {torch.float16: 2e-2, torch.bfloat16: 1e-1}.get(got.dtype, 1e-5)
            torch.testing.assert_close(got, expected, rtol=limit, atol=limit, msg=f"{what}: {got} / {expected}")

    def inputs(self, seed: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [data(seed, m, count, dtype) for m in range(self.size)]

    def own(self, seed: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return data(seed, self.member, count, dtype, self.device)

    def allreduce(self, dtype: torch.dtype, op: int, counts: list[int], *, in_place: bool = False) -> None:
        sources = [self.own(i, count, dtype) for i, count in enumerate(counts)]
        outputs = sources if in_place else [torch.empty_like(source) for source in sources]
        self.transport.allreduce(sources, outputs, Reduce(op))
        for i, count in enumerate(counts):
            expected = combined(self.inputs(i, count, dtype), op)
            what = f"{ReduceOp(op).name} of {counts} {dtype}"
            if op == ReduceOp.AVERAGE and not dtype.is_floating_point:
                expected = truncated(expected, self.size)
            elif op == ReduceOp.AVERAGE:
                expected = (expected.double() / self.size).to(dtype)
                torch.testing.assert_close(self.keep(outputs[i]), expected, rtol=1e-2, atol=1e-2)
                continue
            self.equal(self.keep(outputs[i]), expected, what)

    def scaling(self) -> None:
        source = self.own(1, 33, torch.int32)
        self.transport.allreduce([source], [source], Reduce(ReduceOp.SUM, 0.5, 3.0))
        parts = [(t.double() * 0.5).trunc().to(torch.int32) for t in self.inputs(1, 33, torch.int32)]
        self.equal(self.keep(source), combined(parts, ReduceOp.SUM) * 3, "scaled integers")
        source = self.own(2, 3000, torch.float32)
        self.transport.allreduce([source], [source], Reduce(ReduceOp.SUM, 0.5, 0.25))
        parts = [t * 0.5 for t in self.inputs(2, 3000, torch.float32)]
        self.equal(self.keep(source), combined(parts, ReduceOp.SUM) * 0.25, "scaled floats")

    def gather(self, dtype: torch.dtype, counts: list[list[int]]) -> None:
        sources = [self.own(i, each[self.member], dtype) for i, each in enumerate(counts)]
        outputs = [torch.empty(sum(each), dtype=dtype, device=self.device) for each in counts]
        self.transport.allgather(sources, outputs, counts)
        for i, each in enumerate(counts):
            expected = torch.cat([data(i, m, count, dtype) for m, count in enumerate(each)])
            assert torch.equal(self.keep(outputs[i]), expected), f"allgather of {counts} {dtype}"

    def broadcast(self, dtype: torch.dtype, counts: list[int], root: int) -> None:
        tensors = [self.own(i, count, dtype) for i, count in enumerate(counts)]
        self.transport.broadcast(tensors, root)
        for i, count in enumerate(counts):
            expected = data(i, root, count, dtype)
            assert torch.equal(self.keep(tensors[i]), expected), f"broadcast {counts} {dtype} from {root}"

    def alltoall(self, dtype: torch.dtype, splits: list[list[int]], unsent: int = 0) -> None:
        """Send `splits[s][r]` elements from member s to member r."""
        me = self.member
        source = self.own(5, sum(splits[me]) + unsent, dtype)
        received = [row[me] for row in splits]
        output = torch.empty(sum(received), dtype=dtype, device=self.device)
        self.transport.alltoall(source, output, splits[me], received)
        parts = []
        for sender, row in enumerate(splits):
            start = sum(row[:me])
            parts.append(data(5, sender, sum(row) + unsent, dtype)[start : start + row[me]])
        assert torch.equal(output.cpu(), torch.cat(parts)), f"alltoall {splits} {dtype}"

    def reducescatter(self, dtype: torch.dtype, op: int, counts: list[list[int]], prescale: float = 1.0) -> None:
        sources = [self.own(i, sum(each), dtype) for i, each in enumerate(counts)]
        outputs = [torch.empty(each[self.member], dtype=dtype, device=self.device) for each in counts]
        self.transport.reducescatter(sources, outputs, counts, Reduce(op, prescale=prescale))
        for i, each in enumerate(counts):
            wide = torch.promote_types(dtype, torch.float32) if dtype in HALVES else dtype
            whole = combined([t.to(wide) * prescale for t in self.inputs(i, sum(each), dtype)], ReduceOp.SUM)
            start = sum(each[: self.member])
            expected = whole[start : start + each[self.member]]
            if op == ReduceOp.AVERAGE:
                got, expected = outputs[i].cpu(), expected.double() / self.size
                torch.testing.assert_close(got.double(), expected, rtol=1e-2, atol=1e-2)
            else:
                self.equal(outputs[i], expected.to(dtype), f"reducescatter {counts} {dtype}")

    def adasum(self, dtype: torch.dtype) -> None:
        """Orthogonal vectors are added, parallel ones averaged; tensors of one batch are independent."""
        orthogonal = torch.zeros(self.size, dtype=dtype, device=self.device)
        orthogonal[self.member] = self.member + 1.0
        parallel = torch.full((7,), 2.0, dtype=dtype, device=self.device)
        outputs = [torch.empty_like(orthogonal), torch.empty_like(parallel)]
        self.transport.allreduce([orthogonal, parallel], outputs, Reduce(ReduceOp.ADASUM))
        self.equal(self.keep(outputs[0]), torch.arange(1, self.size + 1).to(dtype), "Adasum, orthogonal")
        self.equal(self.keep(outputs[1]), torch.full((7,), 2.0, dtype=dtype), "Adasum, parallel")

    def everything(self) -> list[str]:
        n = self.size
        for dtype in (*INTEGERS, *FLOATS):
            self.allreduce(dtype, ReduceOp.SUM, [1, 0, 300, 7])
            self.allreduce(dtype, ReduceOp.AVERAGE, [41])
            self.allreduce(dtype, ReduceOp.MIN, [12], in_place=True)
            self.allreduce(dtype, ReduceOp.MAX, [12])
            self.reducescatter(dtype, ReduceOp.SUM, [[m + 1 for m in range(n)], [4] * n, [0] * n])
        self.allreduce(torch.float64, ReduceOp.PRODUCT, [50, 3], in_place=True)
        self.allreduce(torch.float32, ReduceOp.SUM, [60000, 17, 12 * 5000], in_place=True)
        self.allreduce(torch.float32, ReduceOp.SUM, [600_001])
        self.allreduce(torch.float32, ReduceOp.MIN, [400_000, 0, 400_000])  # portions overlap
        self.allreduce(torch.int64, ReduceOp.AVERAGE, [200_000, 5, 0], in_place=True)
        self.allreduce(torch.float32, ReduceOp.SUM, [0])
        self.scaling()
        self.reducescatter(torch.float64, ReduceOp.AVERAGE, [[3] * n])
        self.reducescatter(torch.float32, ReduceOp.SUM, [[0] * (n - 1) + [5]], prescale=0.5)
        self.reducescatter(torch.float32, ReduceOp.SUM, [[100_000 + m for m in range(n)]])
        for dtype in ALL_DTYPES:
            self.gather(dtype, [list(range(n)), [4] * n, [0] * n])
            self.broadcast(dtype, [3, 0, 500], root=n - 1)
            self.alltoall(dtype, [[s + r for r in range(n)] for s in range(n)], unsent=2)
        self.gather(torch.float32, [[70_000 * (m + 1) for m in range(n)]])
        self.gather(torch.float32, [[150_000] * n, [1] * n])
        self.broadcast(torch.float32, [600_001, 2], root=0)
        self.alltoall(torch.int64, [[0] * n for _ in range(n)])
        self.alltoall(torch.float32, [[20_000 * s for _ in range(n)] for s in range(n)])
        if n & (n - 1) == 0:
            for dtype in FLOATS:
                self.adasum(dtype)
        if hasattr(self.transport, "barrier"):  # only the CPU's transports have one
            self.transport.barrier()
        return self.results


# Transports split batches into portions of megabytes; tests use this size, so that small tensors have many.
PORTION_BYTES = 2**20


def check_everything(transport, member: int, size: int, **options) -> list[str]:
    return Checker(transport, member, size, **options).everything()
