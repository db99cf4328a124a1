"""Programs of the stress test, and their form as text. Pure data.

A program has phases, in sequence on every rank. In a phase, thread 0 first adds process sets; then every thread
executes its operations; then thread 0 may let the ranks join, or remove sets. Remaining handles are waited for at
the end of the phase.

Programs cannot deadlock. All ranks call the blocking operations of a thread in the same order; such an operation
ends a *segment* of its thread. Asynchronous operations change places only inside their segment (`lags`), and
handles are waited for only at the ends of segments. Unnamed operations and barriers belong to thread 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

AT_THE_END = 99  # patience of a handle that is waited for at the end of its phase


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One collective, as called on all ranks."""

    label: int  # unique in its program; kept when other operations are removed
    kind: str  # allreduce, allgather, broadcast, alltoall, reducescatter or barrier
    process_set: int = 0  # 0 is the world, n is `Program.sets[n - 1]`
    thread: int = 0
    blocking: bool = False
    in_place: bool = False
    grouped: bool = False
    name: str | None = None
    dtypes: tuple[str, ...] = ("float32",)  # one per tensor
    shapes: tuple[tuple[int, ...], ...] = ((1,),)
    reduce_op: str = "Sum"
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0  # a global rank
    rows: tuple[int, ...] = ()  # allgather: dimension 0 per member; it replaces that of the shapes
    splits: tuple[tuple[int, ...], ...] = ()  # alltoall: rows that a member (first index) sends to each one
    values: str = "whole"  # whole: small integers, exact in every dtype; real; large: sums overflow float16
    layout: str = "plain"  # or transposed, strided: not contiguous
    mode: str = ""  # inference, default_device: the caller's mode of torch
    mistake: str = ""  # see `reference.MISTAKES`
    mistaken: int = 0  # the rank with the mistake
    absent: tuple[int, ...] = ()  # members that never submit it
    pauses_ms: tuple[int, ...] = ()  # per rank, before it submits
    lags: tuple[int, ...] = ()  # per rank: the number of places that it is moved back in its segment
    patience: int = 0  # the number of further segments before the handle is waited for
    polls: bool = False  # call hvd.poll until it returns true, then synchronize


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase of a program, the same on all ranks."""

    adds: tuple[int, ...] = ()
    operations: tuple[Operation, ...] = ()
    stamina: tuple[int, ...] = ()  # a join: per rank, the number of `extras` in which it takes part before it joins
    extras: tuple[Operation, ...] = ()
    removes: tuple[int, ...] = ()
    waits_first: bool = True  # for all handles, before the join or the removals


@dataclass(frozen=True, kw_only=True)
class Death:
    """A rank is killed by SIGKILL before the operation at this place of its thread 0."""

    rank: int
    phase: int = 0
    place: int = 0


@dataclass(frozen=True, kw_only=True)
class Program:
    num_ranks: int
    sets: tuple[tuple[int, ...], ...] = ()
    settings: tuple[tuple[str, str], ...] = ()  # environment variables
    phases: tuple[Phase, ...] = ()
    death: Death | None = None

    def members(self, number: int) -> tuple[int, ...]:
        return self.sets[number - 1] if number else tuple(range(self.num_ranks))

    def operations(self) -> Iterator[tuple[Phase, Operation]]:
        for phase in self.phases:
            for operation in (*phase.operations, *phase.extras):
                yield phase, operation

    @property
    def num_operations(self) -> int:
        return sum(1 for _ in self.operations())

    def to_text(self) -> str:
        return json.dumps(_plain(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Program:
        raw = json.loads(text)
        phases = []
        for phase in raw.pop("phases", ()):
            parts = {key: [_made(Operation, o) for o in phase.pop(key, ())] for key in ("operations", "extras")}
            phases.append(replace(_made(Phase, phase), **{key: tuple(value) for key, value in parts.items()}))
        death = raw.pop("death", None)
        program: Program = _made(cls, raw)
        return replace(program, phases=tuple(phases), death=None if death is None else _made(Death, death))


def segments(operations: list[Operation]) -> list[list[Operation]]:
    """Split a thread's operations after every blocking one."""
    cut: list[list[Operation]] = [[]]
    for operation in operations:
        cut[-1].append(operation)
        if operation.blocking:
            cut.append([])
    return cut


def listing(program: Program) -> str:
    """Return the program in readable form."""
    lines = [f"{program.num_ranks} ranks" + "".join(f", {name}={value}" for name, value in program.settings)]
    if program.death is not None:
        death = program.death
        lines.append(f"rank {death.rank} dies in phase {death.phase} before operation {death.place} of thread 0")
    for index, phase in enumerate(program.phases):
        lines.append(f"phase {index}")
        lines += [f"  add set {number}: ranks {list(program.members(number))}" for number in phase.adds]
        lines += [f"  {described(operation)}" for operation in phase.operations]
        if phase.waits_first and (phase.stamina or phase.removes):
            lines.append("  wait for all handles")
        if phase.stamina:
            lines.append(f"  ranks join after {list(phase.stamina)} of these:")
            lines += [f"    {described(operation)}" for operation in phase.extras]
        lines += [f"  remove set {number}" for number in phase.removes]
    return "\n".join(lines)


def function_name(operation: Operation) -> str:
    """Return the name of an operation in `hvd`."""
    if operation.kind == "barrier":
        return "barrier"
    grouped, blocking = "grouped_" if operation.grouped else "", "" if operation.blocking else "_async"
    return f"{grouped}{operation.kind}{blocking}{'_' if operation.in_place else ''}"


def described(operation: Operation) -> str:
    default = Operation(label=0, kind="")
    tensors = ", ".join(f"{d}{list(s)}" for d, s in zip(operation.dtypes, operation.shapes, strict=True))
    shown = {"label", "kind", "dtypes", "shapes", "blocking", "in_place", "grouped"}
    others = [
        f"{item.name}={getattr(operation, item.name)!r}"
        for item in fields(Operation)
        if item.name not in shown and getattr(operation, item.name) != getattr(default, item.name)
    ]
    return f"#{operation.label} {function_name(operation)}({', '.join([tensors, *others])})"


def _plain(value: Any) -> Any:
    """Convert dataclasses to dictionaries without default values."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not hasattr(value, "__dataclass_fields__"):
        return value
    return {f.name: _plain(v) for f in fields(value) if (v := getattr(value, f.name)) != f.default}


def _made(cls: type[Any], raw: dict[str, Any]) -> Any:
    return cls(**{name: _tuples(value) for name, value in raw.items()})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
