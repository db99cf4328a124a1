"""Compare the ranks' records with the expected ones. Pure: returns the differences as text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from stress.program import Operation, Phase, Program, described
from stress.reference import REPLICATED, expectation, last_to_join


@dataclass(frozen=True)
class Outcome:
    """The end of an operation on a rank: value, wrong, mismatch, refused, join, removed, ended or error."""

    status: str
    detail: str = ""
    digest: int = 0


@dataclass
class Record:
    """The results of one program on one rank."""

    outcomes: dict[int, Outcome] = field(default_factory=dict)  # by the operation's label
    joined: dict[int, int] = field(default_factory=dict)  # by the phase's number: the rank that joined last
    problems: list[str] = field(default_factory=list)  # problems of a single rank: leaks, hangs, crashes

    def to_text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Record:
        raw = json.loads(text)
        outcomes = {int(label): Outcome(**outcome) for label, outcome in raw["outcomes"].items()}
        return cls(outcomes, {int(phase): last for phase, last in raw["joined"].items()}, raw["problems"])


def judge(program: Program, records: Mapping[int, Record]) -> list[str]:
    """Return the errors, one line each. A rank that was killed has no record."""
    wrong = [f"rank {rank}: {problem}" for rank, record in records.items() for problem in record.problems]
    lost = set(range(program.num_ranks)) - set(records)
    allowed = set() if program.death is None else {program.death.rank}
    wrong += [f"rank {rank}: no record" for rank in sorted(lost - allowed)]
    for phase, operation in program.operations():
        wrong += [f"{text}: {described(operation)}" for text in _judge(program, phase, operation, records)]
    for number, phase in enumerate(program.phases):
        if phase.stamina and program.death is None:
            wrong += _judge_join(program, number, records)
    return wrong


def category(wrong: list[str]) -> str:
    """Return the kind of failure; a smaller program must fail in the same way."""
    found = [
        word for word in ("no end within", "crash", "are left", "the world ended", "agree") if word in " ".join(wrong)
    ]
    return found[0] if found else "results"


def _judge(program: Program, phase: Phase, operation: Operation, records: Mapping[int, Record]) -> list[str]:
    wanted = expectation(program, phase, operation)
    seen = {rank: records[rank].outcomes.get(operation.label) for rank in wanted.ranks if rank in records}
    allowed = wanted.statuses | ({"ended"} if program.death is not None else set())
    wrong = []
    for rank, outcome in seen.items():
        if outcome is None:
            if program.death is None and not records[rank].problems:
                wrong.append(f"rank {rank} did not come to it")
        elif outcome.status not in allowed and not (outcome.status == "ended" and records[rank].problems):
            wrong.append(f"rank {rank} saw {outcome.status} ({outcome.detail}), not {' or '.join(sorted(allowed))}")
    outcomes = {rank: outcome for rank, outcome in seen.items() if outcome is not None}
    if wrong or program.death is not None:
        return wrong
    if len({outcome.status for outcome in outcomes.values()}) > 1:
        statuses = {rank: outcome.status for rank, outcome in outcomes.items()}
        return [f"the ranks do not agree how it ended: {statuses}"]
    if operation.kind in REPLICATED and len({outcome.digest for outcome in outcomes.values()}) > 1:
        return [f"the ranks have different bits: {sorted(outcomes)}"]
    return []


def _judge_join(program: Program, number: int, records: Mapping[int, Record]) -> list[str]:
    answers = {rank: record.joined.get(number) for rank, record in records.items()}
    certain = last_to_join(program, program.phases[number])
    if len(set(answers.values())) > 1 or (certain is not None and set(answers.values()) != {certain}):
        expected = "" if certain is None else f", and it was rank {certain}"
        return [f"the ranks do not agree who joined last in phase {number}: {answers}{expected}"]
    return []
