"""The expected results of every operation of a program, computed from the ranks' data without an engine.

`expectation` returns whether a value or which error is expected; `check` compares a value. Integers are small enough
for every dtype and factor here, so they are compared exactly, except after a division by three. Real numbers have a
tolerance in units of the dtype's rounding, since the engine determines the order of additions.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from stress.program import Operation, Phase, Program

# Mistakes of one rank's announcement: an error on all ranks.
MISMATCHES = ("shape", "dtype", "scale", "op", "root", "count")
# Rejected at once by the caller: invalid arguments on every member, or a call by a non-member.
REFUSALS = ("complex", "bad root", "bad splits", "stranger")
MISTAKES = (*MISMATCHES, *REFUSALS)

REDUCTIONS = ("allreduce", "reducescatter")
# Kinds with the same results on all members.
REPLICATED = ("allreduce", "allgather", "broadcast")


@dataclass(frozen=True)
class Expectation:
    """The allowed ends of an operation on the ranks that submit it; all ranks must end alike."""

    ranks: tuple[int, ...]
    statuses: frozenset[str]


def participants(program: Program, phase: Phase, operation: Operation) -> tuple[int, ...]:
    """Return the ranks that submit an operation."""
    members = program.members(operation.process_set)
    if operation.mistake == "stranger":
        return (operation.mistaken,)
    if operation in phase.extras:
        place = phase.extras.index(operation)
        return tuple(rank for rank in members if phase.stamina[rank] > place)
    return tuple(rank for rank in members if rank not in operation.absent)


def expectation(program: Program, phase: Phase, operation: Operation) -> Expectation:
    ranks = participants(program, phase, operation)
    if operation.mistake in REFUSALS:
        return Expectation(ranks, frozenset({"refused"}))
    usual = "mismatch" if operation.mistake in MISMATCHES else "value"
    statuses = {usual}
    complete = len(ranks) == len(program.members(operation.process_set))
    if operation.process_set in phase.removes and not phase.waits_first and not operation.blocking:
        statuses = {usual, "removed"} if complete else {"removed"}
    elif phase.stamina and operation.kind != "allreduce":
        if not complete:
            statuses = {"join"}
        elif operation in phase.extras:
            # Other ranks may have joined after it, unless it completes before.
            statuses = {usual} if operation.blocking else {usual, "join"}
        elif not operation.blocking and not phase.waits_first:
            statuses = {usual, "join"}
    return Expectation(ranks, frozenset(statuses))


def last_to_join(program: Program, phase: Phase) -> int | None:
    """Return the rank that certainly joins last, or None if it depends on timing."""
    longest = max(phase.stamina)
    (first, *others) = [rank for rank in range(program.num_ranks) if phase.stamina[rank] == longest]
    if others or longest == 0:
        return None
    last = phase.extras[longest - 1]  # it has no other participant, so it ends when all others have joined
    return first if last.blocking and last.process_set == 0 else None


# Data.


def inputs(operation: Operation, members: tuple[int, ...], rank: int) -> list[torch.Tensor]:
    """Return a rank's inputs, without mistakes."""
    place = members.index(rank) if rank in members else 0
    return [_values(operation, index, rank, _shape(operation, index, place)) for index in range(len(operation.shapes))]


def _shape(operation: Operation, index: int, place: int) -> tuple[int, ...]:
    shape = operation.shapes[index]
    if operation.kind == "allgather" and operation.rows:
        return (operation.rows[place], *shape[1:])
    if operation.kind == "alltoall" and operation.splits:
        return (sum(operation.splits[place]) + place % 2, *shape[1:])  # sometimes with an unsent row
    return shape


def _values(operation: Operation, index: int, rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = getattr(torch, operation.dtypes[index])
    generator = torch.Generator().manual_seed(zlib.crc32(f"{operation.label}.{index}.{rank}".encode()))
    if operation.values == "large":
        return torch.full(shape, 40_000.0).to(dtype)
    if operation.values == "real" and dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    low, high = (-2, 3) if operation.reduce_op == "Product" else (-4, 5)
    if dtype in (torch.bool, torch.uint8):
        low, high = 0, 2 if dtype is torch.bool else high
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int64).to(dtype)


# Results.


def check(program: Program, phase: Phase, operation: Operation, rank: int, results: list[torch.Tensor]) -> str:
    """Return the error in a rank's results, or an empty string."""
    members, ranks = program.members(operation.process_set), participants(program, phase, operation)
    wanted = expected(operation, members, ranks, rank)
    if len(results) != len(wanted):
        return f"{len(results)} tensors instead of {len(wanted)}"
    for index, (got, (want, tolerance)) in enumerate(zip(results, wanted, strict=True)):
        if got.dtype != want.dtype or got.shape != want.shape:
            return f"tensor {index}: {got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}"
        far = got != want if tolerance is None else ~((got.double() - want.double()).abs() <= tolerance)
        if bool(far.any()):
            place = far.reshape(-1).nonzero()[0].item()
            pair = f"{got.reshape(-1)[place].item()} instead of {want.reshape(-1)[place].item()}"
            return f"tensor {index}: {int(far.sum())} of {far.numel()} elements are wrong; element {place} is {pair}"
    return ""


Wanted = list[tuple[torch.Tensor, torch.Tensor | None]]


def expected(operation: Operation, members: tuple[int, ...], ranks: tuple[int, ...], rank: int) -> Wanted:
    """Return the results of a rank, each with its tolerance (None: exact). `ranks` are those that took part."""
    data = {peer: inputs(operation, members, peer) for peer in ranks}
    place = members.index(rank)
    if operation.kind == "barrier":
        return []
    if operation.kind == "broadcast":
        return [(tensor, None) for tensor in data[operation.root]]
    if operation.kind == "allgather":
        return [(torch.cat([data[peer][index] for peer in members]), None) for index in range(len(operation.shapes))]
    if operation.kind == "alltoall":
        return _exchanged(operation, data, members, place)
    if operation.reduce_op == "Adasum":  # a joined rank contributes zeros and keeps its place in the tree of pairs
        data |= {peer: [torch.zeros_like(tensor) for tensor in data[rank]] for peer in members if peer not in ranks}
        ranks = members
    reduced = [_reduced(operation, [data[peer][i] for peer in ranks], len(members)) for i in range(len(data[rank]))]
    if operation.kind == "allreduce":
        return reduced
    return [tuple(_share(part, len(members), place) for part in pair) for pair in reduced]  # type: ignore[misc]


def _share(tensor: torch.Tensor | None, num_members: int, place: int) -> torch.Tensor | None:
    if tensor is None:
        return None
    rows = tensor.shape[0]
    counts = [rows // num_members + (member < rows % num_members) for member in range(num_members)]
    return tensor.split(counts)[place]


def _exchanged(
    operation: Operation, data: dict[int, list[torch.Tensor]], members: tuple[int, ...], place: int
) -> Wanted:
    pieces, received = [], []
    for sender, peer in enumerate(members):
        (tensor,) = data[peer]
        splits = operation.splits[sender] if operation.splits else (tensor.shape[0] // len(members),) * len(members)
        start = sum(splits[:place])
        pieces.append(tensor[start : start + splits[place]])
        received.append(splits[place])
    results: Wanted = [(torch.cat(pieces), None)]
    if operation.splits or not operation.blocking:
        results.append((torch.tensor(received, dtype=torch.int32), None))
    return results


def _reduced(
    operation: Operation, tensors: list[torch.Tensor], num_members: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    dtype = tensors[0].dtype
    average = operation.reduce_op == "Average"
    if operation.reduce_op == "Adasum":
        return _adasum([tensor.double() * operation.prescale for tensor in tensors], operation.postscale, dtype)
    if not dtype.is_floating_point:
        scaled = [_scaled(tensor, operation.prescale) for tensor in tensors]
        total = _combined(operation.reduce_op, scaled)
        if average and operation.postscale == 1.0:
            return torch.div(total, num_members, rounding_mode="trunc").to(dtype), None
        return _scaled(total, operation.postscale, num_members if average else 1).to(dtype), None
    factor = operation.postscale / (num_members if average else 1)
    wide = [tensor.double() * operation.prescale for tensor in tensors]
    exact = _combined(operation.reduce_op, wide) * factor
    dyadic = num_members & (num_members - 1) == 0 or not average
    if operation.values == "whole" and dyadic:
        return exact.to(dtype), None
    # One rounding per factor and addition, relative to the partial sum; half precision is rounded once.
    size = _combined("Product" if operation.reduce_op == "Product" else "Sum", [tensor.abs() for tensor in wide])
    rounding = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * (len(tensors) + 3)
    last = exact.abs() * torch.finfo(dtype).eps + torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    return exact.to(dtype), size * abs(factor) * rounding + last


def _scaled(tensor: torch.Tensor, factor: float, divisor: int = 1) -> torch.Tensor:
    return tensor.to(torch.int64) if factor == divisor == 1 else (tensor.double() * factor / divisor).trunc().long()


def _combined(reduce_op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    combine = {"Min": torch.minimum, "Max": torch.maximum, "Product": torch.mul}.get(reduce_op, torch.add)
    result = tensors[0]
    for tensor in tensors[1:]:
        result = combine(result, tensor)
    return result


def _adasum(tensors: list[torch.Tensor], postscale: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine a tree of pairs; the engine rounds each pair to the dtype."""
    size = sum(tensor.norm() for tensor in tensors) * abs(postscale)
    level = tensors
    while len(level) > 1:
        level = [_adasum_pair(*level[at : at + 2]) for at in range(0, len(level), 2)]
    tolerance = torch.full_like(level[0], float(size) * torch.finfo(dtype).eps * 100)
    return (level[0] * postscale).to(dtype), tolerance


def _adasum_pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dot, norm_a, norm_b = float((a * b).sum()), float((a * a).sum()), float((b * b).sum())
    return a * (1 - dot / (2 * norm_a) if norm_a else 1) + b * (1 - dot / (2 * norm_b) if norm_b else 1)
