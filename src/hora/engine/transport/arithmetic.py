"""Arithmetic of reductions: scale, combine in member order, finish; Adasum's pair rule.

Every transport that computes uses it, so that results do not depend on the transport. It does not communicate, and does
not allocate in the plain cases; all tensors are flat and on one device.

Order: multiply by `prescale` (each member's own data), combine members 0, 1, 2, …, then multiply by `postscale`;
Average also divides by the number of members. Integers are scaled in float64 and truncated toward zero. Sums, averages
and products of half precision are computed in float32, including factors, and rounded once at the end. NaN propagates
and integers wrap, as in torch.

If data is copied on its way (`staged`), an average over a power of two of members is a sum of numbers that were divided
while being copied: the same bits, without a pass over the result. Numbers that the division makes subnormal may lose
their last bits, and sums that would overflow do not.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from hora.engine.request import Reduce, ReduceOp
from hora.engine.shm.native import DIVIDE, DTYPE_NUMBERS, MULTIPLY, NOTHING, Library, Sum, library

# torch divides an element-wise operation on more elements among threads.
SERIAL_ELEMENTS = 32768
# A sum of this many elements is never divided among threads: it has the same bits on every rank.
_SUM_ELEMENTS = SERIAL_ELEMENTS // 2
# Below this squared norm a vector counts as zero for Adasum: dividing by it would overflow.
_TINY_SQUARED_NORM = math.sqrt(sys.float_info.min)

COMBINE: dict[int, Callable[..., torch.Tensor]] = {
    ReduceOp.AVERAGE: torch.add,
    ReduceOp.SUM: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}

HALVES = (torch.float16, torch.bfloat16)

_Step = Callable[[torch.Tensor, torch.Tensor], object]


class Arithmetic:
    """One reduction for one dtype and number of members; created and cached by `arithmetic_of`.

    `prepare(source, out)` writes the prescaled source, and `finish(source, out)` applies postscale and the division of
    Average; `out` may be `source`. `prescales`: each member applies the prescale to its own data with `prepare` before
    `reduce` sees it; otherwise `reduce` does it. `stage`: the factor of `prepare`, None if there is more to it.
    `elsewhere`: something else combines, and `prepare` and `finish` do what comes before and after. `weights`: each
    member's weight in an average of half precision. `compiled`: the native part, which sums CPU tensors if present;
    `sum` is its parameter, None for unsupported cases.
    """

    def __init__(
        self,
        reduce: Reduce,
        dtype: torch.dtype,
        num_members: int,
        elsewhere: bool,
        weights: tuple[int, ...],
        compiled: Library | None,
    ) -> None:
        op, prescale, postscale, _ = reduce
        assert op in COMBINE, f"{op} is not an element-wise reduction"
        self.dtype = dtype
        self.num_members = num_members
        self._combine = COMBINE[op]
        first = _scaling(prescale, dtype)
        weighted = bool(weights) and op == ReduceOp.AVERAGE and dtype in HALVES
        self._weights = [weight / sum(weights) for weight in weights] if weighted else []
        last = _finishing(num_members if op == ReduceOp.AVERAGE and not weighted else 1, postscale, dtype)
        # Two members without factors are rounded once anyway, and some factors are exact.
        rounds = first is not None and not _is_exact(prescale, dtype)
        several_steps = num_members > 2 or weighted or rounds or last is not None
        self._widens = dtype in HALVES and op not in (ReduceOp.MIN, ReduceOp.MAX) and several_steps and not elsewhere
        self._wide_prescale: _Step | None = None
        if self._widens and rounds and op != ReduceOp.PRODUCT:  # a joined rank contributes 1, which must stay 1
            first, self._wide_prescale = None, first
        self.prescales = first is not None
        self.prepare: _Step = first or _copied
        self.finish: _Step = last or _copied
        scales_floats = self.prescales and dtype.is_floating_point
        self.stage = prescale if scales_floats else None if self.prescales else 1.0
        self.sum: Sum | None = None
        self._compiled = compiled
        sums = op in (ReduceOp.SUM, ReduceOp.AVERAGE) and not weighted and not elsewhere
        if compiled is not None and sums and compiled.sums(dtype):
            how, factor = _ending(num_members if op == ReduceOp.AVERAGE else 1, postscale)
            if dtype.is_floating_point or how == NOTHING:
                self.sum = Sum(prescale if self._wide_prescale else 1.0, factor, DTYPE_NUMBERS[dtype], how)

    def reduce(self, operands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Combine the (prepared) operands of members 0, 1, 2, … into `out`, which may be one of them, and finish it."""
        if self.sum is not None and self._compiled is not None and out.is_cpu:
            self._compiled.reduction(self.sum, operands, out)()
        else:
            _in_pieces(self._reduce_widely if self._widens else self._reduce_plainly, operands, out)

    def _reduce_plainly(self, operands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        if len(operands) == 1:
            out.copy_(operands[0])
        else:
            so_far, scratch = operands[0], None
            for operand in operands[1:-1]:
                so_far = scratch = self._combine(so_far, operand, out=scratch)
            self._combine(so_far, operands[-1], out=out)
        self.finish(out, out)

    def _reduce_widely(self, operands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Reduce in float32."""
        total, other = torch.empty(2, out.numel(), dtype=torch.float32, device=out.device)
        self._widen(operands[0], total, 0)
        for member, operand in enumerate(operands[1:], 1):
            self._widen(operand, other, member)
            self._combine(total, other, out=total)
        self.finish(total, total)
        out.copy_(total)

    def _widen(self, tensor: torch.Tensor, wide: torch.Tensor, member: int) -> None:
        wide.copy_(tensor)
        if self._wide_prescale is not None:
            self._wide_prescale(wide, wide)
        if self._weights:
            wide.mul_(self._weights[member])


@lru_cache(maxsize=512)
def arithmetic_of(
    reduce: Reduce, dtype: torch.dtype, num_members: int, *, elsewhere: bool = False, weights: tuple[int, ...] = ()
) -> Arithmetic:
    """Return the arithmetic of a reduction; the same object for the same arguments."""
    return Arithmetic(reduce, dtype, num_members, elsewhere, weights, library())


def staged(reduce: Reduce, dtype: torch.dtype, num_members: int) -> Reduce:
    """Return the same reduction for data that is copied on its way, which can be scaled at no cost."""
    exactly = dtype in (torch.float32, torch.float64, torch.bfloat16) and num_members & (num_members - 1) == 0
    if reduce.op != ReduceOp.AVERAGE or not exactly:
        return reduce
    return reduce._replace(op=ReduceOp.SUM, prescale=reduce.prescale / num_members)


def stages(reduce: Reduce, dtype: torch.dtype, num_members: int) -> tuple[Reduce, Reduce, Arithmetic]:
    """Return the stages over several hosts: within each host, between the hosts, and the last step (`finish`).

    An average is a sum that is divided at the end; half precision, which could overflow, is averaged twice.
    """
    op, prescale, postscale, _ = reduce
    if dtype in HALVES:
        return Reduce(op, prescale), Reduce(op, 1.0, postscale), arithmetic_of(Reduce(), dtype, 1)
    op = int(ReduceOp.SUM) if op == ReduceOp.AVERAGE else op
    return Reduce(op, prescale), Reduce(op), arithmetic_of(Reduce(reduce.op, 1.0, postscale), dtype, num_members)


class HostwiseArithmetic:
    """A reduction of all members' data at once, with the bits of one that goes through each host first.

    Created by `hostwise_arithmetic`. It has the methods of `Arithmetic`; `prepare` is for a member of host `here`.
    """

    def __init__(self, reduce: Reduce, dtype: torch.dtype, hosts: Sequence[Sequence[int]], here: int) -> None:
        self.dtype, self._hosts = dtype, hosts
        sizes = [len(host) for host in hosts]
        inside, between, self._end = stages(reduce, dtype, sum(sizes))
        self._inside = [arithmetic_of(staged(inside, dtype, size), dtype, size) for size in sizes]
        weights = () if min(sizes) == max(sizes) else tuple(sizes)
        self._between = arithmetic_of(between, dtype, len(hosts), weights=weights)
        self.prescales = self._inside[here].prescales
        self.prepare = self._inside[here].prepare

    def reduce(self, operands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Combine the (prepared) operands of all members into `out`, and finish it."""
        _in_pieces(self._reduce_piece, operands, out)

    def _reduce_piece(self, operands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        parts = [torch.empty_like(out) for _ in self._hosts]
        for host, arithmetic, part in zip(self._hosts, self._inside, parts, strict=True):
            arithmetic.reduce([operands[member] for member in host], part)
        self._between.reduce(parts, out)
        self._end.finish(out, out)


def _in_pieces(
    reduce: Callable[[Sequence[torch.Tensor], torch.Tensor], None], operands: Sequence[torch.Tensor], out: torch.Tensor
) -> None:
    """Reduce on the CPU in pieces that stay in the cache between steps, and on one thread; on a GPU all at once."""
    count = out.numel()
    step = SERIAL_ELEMENTS if out.is_cpu else max(count, 1)
    for start in range(0, count, step):
        piece = slice(start, start + step)
        reduce([operand[piece] for operand in operands], out[piece])


@lru_cache(maxsize=512)
def hostwise_arithmetic(
    reduce: Reduce, dtype: torch.dtype, hosts: tuple[tuple[int, ...], ...], member: int
) -> Arithmetic | HostwiseArithmetic:
    """Return the arithmetic of a reduction over the members of these hosts, in the order of the hosts."""
    num_members = sum(len(host) for host in hosts)
    if len(hosts) == 1:
        return arithmetic_of(staged(reduce, dtype, num_members), dtype, num_members)
    if len(hosts) == num_members:
        return arithmetic_of(reduce, dtype, num_members)
    (here,) = (number for number, host in enumerate(hosts) if member in host)
    return HostwiseArithmetic(reduce, dtype, hosts, here)


def _is_exact(factor: float, dtype: torch.dtype) -> bool:
    """Return whether multiplying by it preserves all bits; float16 has too few exponents for that."""
    return dtype is not torch.float16 and abs(math.frexp(factor)[0]) == 0.5


def _copied(source: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(source)


def _scaling(factor: float, dtype: torch.dtype) -> _Step | None:
    """Multiply by `factor` as the dtype requires; None if there is nothing to do."""
    if factor == 1.0:
        return None
    if not dtype.is_floating_point:
        return lambda source, out: out.copy_(source.double().mul_(factor).trunc_())
    # A zero-dimensional tensor costs less per call than a Python number, and defines the precision.
    scalar = torch.tensor(factor, dtype=torch.promote_types(dtype, torch.float32), device="cpu")
    return lambda source, out: torch.mul(source, scalar, out=out)


def _ending(divisor: int, postscale: float) -> tuple[int, float]:
    """Return how floats are finished.

    They are divided exactly if there is nothing else to do; with a postscale the two become one factor.
    """
    if divisor == 1:
        return (NOTHING, 1.0) if postscale == 1.0 else (MULTIPLY, postscale)
    if postscale != 1.0:
        return MULTIPLY, postscale / divisor
    if divisor & (divisor - 1) == 0:
        return MULTIPLY, 1.0 / divisor  # exactly the division, and several times faster
    return DIVIDE, float(divisor)


def _finishing(divisor: int, postscale: float, dtype: torch.dtype) -> _Step | None:
    """Divide and apply postscale; None if there is nothing to do."""
    if dtype.is_floating_point:
        how, factor = _ending(divisor, postscale)
        if how != DIVIDE:
            return _scaling(factor, dtype)
        scalar = torch.tensor(factor, dtype=torch.promote_types(dtype, torch.float32), device="cpu")
        return lambda source, out: torch.div(source, scalar, out=out)
    if divisor == 1:
        return _scaling(postscale, dtype)
    if postscale == 1.0:
        return lambda source, out: torch.div(source, divisor, rounding_mode="trunc", out=out)
    return lambda source, out: out.copy_(source.double().mul_(postscale).div_(divisor).trunc_())


def identity(op: int, dtype: torch.dtype) -> float | int | bool:
    """Return the neutral value that a joined rank contributes, with prescale 1."""
    if op == ReduceOp.PRODUCT:
        return 1
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return 0
    if dtype == torch.bool:
        return op == ReduceOp.MIN
    if dtype.is_floating_point:
        return math.inf if op == ReduceOp.MIN else -math.inf
    limits = torch.iinfo(dtype)
    return limits.max if op == ReduceOp.MIN else limits.min


def adasum_pair(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Compute Adasum of two vectors: `(1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b`. `out` may be either of them.

    `a` belongs to the lower member; the result has the same bits on any member.
    """
    pieces = list(zip(a.split(_SUM_ELEMENTS), b.split(_SUM_ELEMENTS), out.split(_SUM_ELEMENTS), strict=True))
    dot = norm_a = norm_b = 0.0
    for piece_a, piece_b, _ in pieces:
        wide_a, wide_b = piece_a.double(), piece_b.double()
        dot += float((wide_a * wide_b).sum())
        norm_a += float(wide_a.square().sum())
        norm_b += float(wide_b.square().sum())
    share_a = 1.0 if norm_a < _TINY_SQUARED_NORM else 1.0 - dot / (2.0 * norm_a)
    share_b = 1.0 if norm_b < _TINY_SQUARED_NORM else 1.0 - dot / (2.0 * norm_b)
    for piece_a, piece_b, piece_out in pieces:
        piece_out.copy_(piece_a.double() * share_a + piece_b.double() * share_b)
