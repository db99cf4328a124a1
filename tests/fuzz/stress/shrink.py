"""Shrink a failing program. Pure: `fails` runs a program and returns whether it still fails.

Greedy: remove phases, operations and ranks, then simplify the rest, as long as it still fails; restart after every
success, until nothing more can be removed. `fails` sees a program only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from stress.program import AT_THE_END, Operation, Phase, Program


def shrink(program: Program, fails: Callable[[Program], bool], *, max_attempts: int = 300) -> Program:
    """Return the smallest failing program found within `max_attempts`."""
    tried = {program}
    while True:
        for candidate in candidates(program):
            if candidate in tried or not is_valid(candidate):
                continue
            if len(tried) > max_attempts:
                return program
            tried.add(candidate)
            if fails(candidate):
                program = candidate
                break
        else:
            return program


def candidates(program: Program) -> Iterator[Program]:
    """Yield smaller programs, the much smaller ones first."""
    phases = program.phases
    for index in range(len(phases)):
        yield _without_phase(program, index)
    for number in range(1, len(program.sets) + 1):
        yield replace(program, phases=tuple(_without_set(phase, number) for phase in phases))
    for index, phase in enumerate(phases):
        for smaller in _smaller_phases(phase):
            yield _with_phase(program, index, smaller)
    yield from _without_rank(program)
    if program.settings:
        yield replace(program, settings=())
    for index, phase in enumerate(phases):
        for plainer in _plainer_phases(phase):
            yield _with_phase(program, index, plainer)


def is_valid(program: Program) -> bool:
    """Return whether sets are used only between their addition and their removal, and no operation can deadlock."""
    live: set[int] = set()
    for phase in program.phases:
        if live & set(phase.adds):
            return False
        older, live = set(live), live | set(phase.adds)
        if not set(phase.removes) <= live or len({program.members(number) for number in live}) < len(live):
            return False
        for operation in (*phase.operations, *phase.extras):
            known = {0} | (live if operation.thread == 0 else older - set(phase.removes))
            if operation.process_set not in known or not _ends(phase, operation):
                return False
        live -= set(phase.removes)
    return bool(program.phases)


def _ends(phase: Phase, operation: Operation) -> bool:
    """Return whether an operation ends although some members do not submit it, because its set is removed."""
    if not operation.absent:
        return True
    in_flight = not operation.blocking and operation.patience == AT_THE_END and not phase.waits_first
    return in_flight and operation.process_set in phase.removes


def _without_phase(program: Program, index: int) -> Program:
    death = program.death
    if death is not None and index < death.phase:
        death = replace(death, phase=death.phase - 1)
    return replace(program, phases=program.phases[:index] + program.phases[index + 1 :], death=death)


def _without_set(phase: Phase, number: int) -> Phase:
    keep = [index for index, operation in enumerate(phase.extras) if operation.process_set != number]
    return replace(
        phase,
        adds=tuple(n for n in phase.adds if n != number),
        removes=tuple(n for n in phase.removes if n != number),
        operations=tuple(operation for operation in phase.operations if operation.process_set != number),
        extras=tuple(phase.extras[index] for index in keep),
        stamina=tuple(sum(index < stamina for index in keep) for stamina in phase.stamina),
    )


def _with_phase(program: Program, index: int, phase: Phase) -> Program:
    return replace(program, phases=(*program.phases[:index], phase, *program.phases[index + 1 :]))


def _smaller_phases(phase: Phase) -> Iterator[Phase]:
    operations = phase.operations
    size = len(operations)
    while size > 0:  # halves first, single operations last
        for start in range(0, len(operations), size):
            yield replace(phase, operations=operations[:start] + operations[start + size :])
        size //= 2
    if phase.stamina:
        yield replace(phase, stamina=(), extras=())
        yield replace(phase, stamina=(), extras=(), operations=operations + phase.extras)
    for index in range(len(phase.extras)):
        stamina = tuple(s - (s > index) for s in phase.stamina)
        yield replace(phase, stamina=stamina, extras=phase.extras[:index] + phase.extras[index + 1 :])
    for number in phase.removes:
        yield replace(phase, removes=tuple(n for n in phase.removes if n != number))
    for number in phase.adds:
        yield replace(phase, adds=tuple(n for n in phase.adds if n != number))


def _without_rank(program: Program) -> Iterator[Program]:
    """Yield the program without its last rank, if nothing depends on it."""
    last = program.num_ranks - 1
    if last < 2 or (program.death is not None and program.death.rank == last):
        return
    if any(last in program.members(number) for phase in program.phases for number in phase.adds):
        return
    phases = []
    for phase in program.phases:
        parts = {}
        for name in ("operations", "extras"):
            parts[name] = tuple(_without_last(o, last) for o in getattr(phase, name))
        if any(last in (o.root, o.mistaken) for o in (*phase.operations, *phase.extras)):
            return
        phases.append(replace(phase, stamina=phase.stamina[:last], **parts))
    yield replace(program, num_ranks=last, phases=tuple(phases))


def _without_last(operation: Operation, last: int) -> Operation:
    cut = {name: getattr(operation, name)[:last] for name in ("pauses_ms", "lags")}
    if operation.process_set == 0:
        cut["rows"] = operation.rows[:last]
        cut["splits"] = tuple(row[:last] for row in operation.splits[:last])
        if operation.kind == "alltoall" and not operation.splits:
            ((rows, *others),) = operation.shapes
            cut["shapes"] = ((rows // (last + 1) * last, *others),)
    return replace(operation, **cut)


def _plainer_phases(phase: Phase) -> Iterator[Phase]:
    for name in ("operations", "extras"):
        operations = getattr(phase, name)
        for index, operation in enumerate(operations):
            for plainer in _plainer(operation):
                yield replace(phase, **{name: (*operations[:index], plainer, *operations[index + 1 :])})
    if not phase.waits_first:
        yield replace(phase, waits_first=True)


_PLAIN = {item.name: item.default for item in fields(Operation)}


def _plainer(operation: Operation) -> Iterator[Operation]:
    for name in ("mode", "mistake", "layout", "values", "polls", "in_place", "lags", "pauses_ms", "absent", "rows"):
        if getattr(operation, name) != _PLAIN[name]:
            yield replace(operation, **{name: _PLAIN[name]})
    for name in ("prescale", "postscale"):
        if getattr(operation, name) != 1.0:
            yield replace(operation, **{name: 1.0})
    if operation.grouped:
        yield replace(operation, grouped=False, shapes=operation.shapes[:1], dtypes=operation.dtypes[:1])
    if operation.thread:
        yield replace(operation, thread=0)
    if operation.process_set and operation.kind != "alltoall" and operation.mistake != "stranger":
        yield replace(operation, process_set=0, rows=(), absent=())
    if operation.kind in ("allreduce", "allgather", "reducescatter", "broadcast"):
        if any(shape != (1,) for shape in operation.shapes):
            yield replace(operation, shapes=((1,),) * len(operation.shapes))
        if any(dtype != "float32" for dtype in operation.dtypes):
            yield replace(operation, dtypes=("float32",) * len(operation.dtypes))
