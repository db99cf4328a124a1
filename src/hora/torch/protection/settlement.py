"""The agreement of the ranks of a new world: pure, from a report of each of them, so all come to the same result.

An allreduce gives a rank its result only if every rank has begun it. So of two survivors of a world, the one that is
further has finished a few calls that the other has begun but not finished: those since the other's last wait. Their
results are copied. The calls that no survivor has finished are begun again among the members of the new world, by each
rank when it comes to them.

A newcomer is admitted if all members are between the same two steps, where `boundary` is the number of the step's first
call: no rank has finished it, and every earlier call is finished or copied.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Report:
    """A rank's message to the others when they meet."""

    worker: int  # its number in the job
    is_member: bool  # of the group; otherwise a newcomer
    group: str  # the engine's name of the group
    digest: str  # of the models and optimizers
    next_call: int
    unfinished: tuple[int, ...]  # calls that it has begun
    kept: tuple[int, ...]  # calls whose results it has
    boundary: int  # the number of its present step's first call; -1: newcomers cannot begin with this step
    share: int = -1  # its rank in the world before
    epochs: tuple[tuple[int, int, int], ...] = ()  # of each sampler: the epoch, its number of shares, and this one's

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Report:
        fields: dict[str, Any] = json.loads(data)
        fields["epochs"] = tuple(map(tuple, fields["epochs"]))
        return cls(**fields | {name: tuple(fields[name]) for name in ("unfinished", "kept")})


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """`copies`: pairs of a call and the rank that has its result. `repeated`: calls that are begun again."""

    copies: tuple[tuple[int, int], ...]
    repeated: tuple[int, ...]
    admitted: tuple[int, ...] = ()  # ranks of newcomers
    teacher: int = -1  # the rank whose state they get
    lost: tuple[int, ...] = ()  # calls that only a dead rank could have completed


def settle(reports: Sequence[Report]) -> Settlement:
    """Return what the members of a new world do. The index of a report is its rank."""
    members = {rank: report for rank, report in enumerate(reports) if report.is_member}
    copies, repeated, lost = [], [], []
    for call in sorted({call for report in members.values() for call in report.unfinished}):
        holders = [rank for rank, report in members.items() if call in report.kept]
        if holders:
            copies.append((call, holders[0]))
        elif any(_has_finished(report, call) for report in members.values()):
            lost.append(call)
        else:
            repeated.append(call)
    settlement = Settlement(copies=tuple(copies), repeated=tuple(repeated), lost=tuple(lost))
    newcomers = [rank for rank in range(len(reports)) if rank not in members]
    boundary = max((report.boundary for report in members.values()), default=-1)
    if not newcomers or boundary < 0 or lost or not _are_between_steps(settlement, members.values(), boundary):
        return settlement
    teacher = next(rank for rank, report in members.items() if report.boundary == boundary)
    digest = members[teacher].digest
    admitted = tuple(rank for rank in newcomers if reports[rank].digest == digest)
    return Settlement(copies=tuple(copies), repeated=tuple(repeated), admitted=admitted, teacher=teacher)


def shares(reports: Sequence[Report], settlement: Settlement) -> dict[int, list[tuple[int, int, int]]]:
    """Return for each rank, and each sampler, the epoch of the rank that is furthest, the number of its shares and this
    rank's. Newcomers get the shares of the dead; without such, a share is trained on twice.
    """
    members = {rank: report for rank, report in enumerate(reports) if report.is_member}
    found: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in (*members, *settlement.admitted)}
    for sampler in range(len(next(iter(members.values())).epochs)):
        epoch, num_shares, _ = max(report.epochs[sampler] for report in members.values())
        for rank, report in members.items():
            its_epoch, _, its_share = report.epochs[sampler]
            found[rank].append((epoch, num_shares, its_share if its_epoch == epoch else report.share))
        taken = {shares[sampler][2] for shares in found.values() if len(shares) > sampler}
        free = [share for share in range(num_shares) if share not in taken] or [*range(num_shares)]
        for index, rank in enumerate(settlement.admitted):
            found[rank].append((epoch, num_shares, free[index % len(free)]))
    return found


def _has_finished(report: Report, call: int) -> bool:
    return call < report.next_call and call not in report.unfinished


def _are_between_steps(settlement: Settlement, members: Collection[Report], boundary: int) -> bool:
    if any(call < boundary for call in settlement.repeated):
        return False
    return not any(_has_finished(report, call) for report in members for call in range(boundary, report.next_call))
