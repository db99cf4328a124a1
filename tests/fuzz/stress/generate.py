"""Generates a program from a seed: a pure function of the seed and the sizes, without processes and tensors.

A program first draws a small palette of dtypes and factors and then reuses it, so that operations meet the
conditions for fusion.
"""

from __future__ import annotations

import random
from dataclasses import replace

from stress.program import AT_THE_END, Death, Operation, Phase, Program
from stress.reference import MISMATCHES, REDUCTIONS

FLOATS = ("float16", "bfloat16", "float32", "float64")
SMALL = ("uint8", "int8", "int16")
REDUCED = ("int32", "int64", *FLOATS)
MOVED = (*REDUCED, *SMALL, "bool")
KINDS = ("allreduce",) * 5 + ("allgather", "broadcast", "alltoall", "reducescatter", "barrier")
SHAPES = ((), (0,), (1,), (3,), (17,), (5, 3), (2, 3, 4), (1000,), (0, 4), (70_001,))
SHAPE_WEIGHTS = (3, 1, 4, 6, 6, 5, 4, 3, 1, 1)
SETTINGS = (
    (),
    (("HORA_TRANSPORT", "tcp"),),
    (("HOROVOD_FUSION_THRESHOLD", "64"),),
    (("HOROVOD_FUSION_THRESHOLD", "0"), ("HOROVOD_CACHE_CAPACITY", "0")),
    (("HOROVOD_CACHE_CAPACITY", "2"),),
    (("HOROVOD_DISABLE_GROUP_FUSION", "1"),),
)
SETTING_WEIGHTS = (10, 4, 2, 1, 2, 1)


def generate(
    seed: int,
    num_ranks: int,
    *,
    num_operations: int = 20,
    victim: int | None = None,
) -> Program:
    """Return the program of a seed. `victim`: a rank that dies."""
    return _Generator(seed, num_ranks, num_operations).program(victim)


class _Generator:
    def __init__(self, seed: int, num_ranks: int, num_operations: int) -> None:
        self._random = random.Random(f"{seed}/{num_ranks}/{num_operations}")
        self._num_ranks = num_ranks
        self._num_operations = num_operations
        self._label = 0
        self._sets: list[tuple[int, ...]] = []  # every set that is ever added
        self._live: list[int] = []
        self._last_reduction: Operation | None = None
        self._num_threads = self._random.choice((1, 1, 2, 3))
        self._dtypes = self._random.sample(REDUCED, 2)
        self._factors = [(1.0, 1.0), (self._random.choice((0.5, 2.0)), 1.0), self._factor_pair()]
        self._ops = ["Sum", self._random.choice(("Average", "Min", "Max", "Product", "Adasum"))]

    def program(self, victim: int | None) -> Program:
        some = self._random
        phases = []
        num_phases = some.randint(1, 5)
        for _ in range(num_phases):
            phases.append(self._phase(max(self._num_operations // num_phases, 1)))
        death = None
        if victim is not None:
            phase = some.randrange(num_phases)
            places = sum(operation.thread == 0 for operation in phases[phase].operations)
            death = Death(rank=victim, phase=phase, place=some.randint(0, places))
        settings = some.choices(SETTINGS, SETTING_WEIGHTS)[0]
        return Program(
            num_ranks=self._num_ranks, sets=tuple(self._sets), settings=settings, phases=tuple(phases), death=death
        )

    def _factor_pair(self) -> tuple[float, float]:
        return self._random.choice((0.5, 1.0, 2.0)), self._random.choice((0.5, 1.0, 2.0, 3.0))

    # Phases.

    def _phase(self, num_operations: int) -> Phase:
        some = self._random
        self._last_reduction = None
        older = tuple(self._live)  # other threads do not wait for the sets that thread 0 adds
        end = some.choices(("plain", "join", "remove", "orphan"), (4, 4, 3, 2))[0]
        adds = self._additions(at_least_one=end in ("remove", "orphan") and not self._live)
        waits_first = some.random() < 0.5
        removes: tuple[int, ...] = ()
        if end in ("remove", "orphan"):
            removes = (some.choice(self._live),)
        operations = tuple(self._operation(older, removes, end, place) for place in range(num_operations))
        if removes and not waits_first and some.random() < 0.5:
            operations = (*operations, self._last_before_removal(removes[0]))
        phase = Phase(adds=adds, operations=operations, removes=removes, waits_first=waits_first)
        if end == "orphan" and removes and not waits_first:
            phase = replace(phase, operations=tuple(self._orphaned(o, removes) for o in operations))
        for number in removes:
            self._live.remove(number)
        return self._with_join(phase) if end == "join" else phase

    def _last_before_removal(self, number: int) -> Operation:
        """Return a slow operation without a waiting thread."""
        self._label += 1
        operation = Operation(label=self._label, kind="allreduce", process_set=number, shapes=((70_001,),), name="last")
        return replace(operation, patience=AT_THE_END)

    def _additions(self, *, at_least_one: bool) -> tuple[int, ...]:
        some = self._random
        adds: list[int] = []
        while (some.random() < 0.4 or (at_least_one and not adds)) and len(self._live) < 3:
            largest = self._num_ranks - 1  # the world itself exists already
            size = largest if some.random() < 0.5 else some.randint(1, largest)
            ranks = tuple(sorted(some.sample(range(self._num_ranks), size)))
            if ranks in [self._sets[number - 1] for number in self._live]:
                break
            self._sets.append(ranks)
            self._live.append(len(self._sets))
            adds.append(len(self._sets))
        return tuple(adds)

    def _orphaned(self, operation: Operation, removes: tuple[int, ...]) -> Operation:
        """Sometimes remove a member's part from an operation on a set that is about to be removed."""
        members = self._members(operation.process_set)
        if operation.process_set not in removes or operation.blocking or len(members) < 2 or operation.mistake:
            return operation
        if operation.name is None or operation.patience != AT_THE_END or self._random.random() < 0.5:
            return operation
        return replace(operation, absent=(self._random.choice(members),))

    def _with_join(self, phase: Phase) -> Phase:
        some = self._random
        stamina = tuple(some.randint(0, 3) for _ in range(self._num_ranks))
        extras = tuple(self._operation((), (), "extra", place) for place in range(max(stamina)))
        return replace(phase, stamina=stamina, extras=extras)

    def _layout(self) -> str:
        return self._random.choices(("plain", "transposed", "strided"), (8, 1, 1))[0]

    # Operations.

    def _members(self, number: int) -> tuple[int, ...]:
        return self._sets[number - 1] if number else tuple(range(self._num_ranks))

    def _operation(self, older: tuple[int, ...], removes: tuple[int, ...], end: str, place: int) -> Operation:
        some = self._random
        self._label += 1
        thread = 0 if end == "extra" else some.randrange(self._num_threads)
        allowed = [number for number in (self._live if thread == 0 else older) if thread == 0 or number not in removes]
        number = some.choice(allowed) if allowed and some.random() < 0.4 else 0
        if removes and thread == 0 and some.random() < 0.5:
            number = removes[0]
        kind = some.choice(KINDS)
        if kind == "barrier" and thread:
            kind = "allreduce"
        operation = Operation(label=self._label, kind=kind, process_set=number, thread=thread)
        earlier = self._last_reduction
        if kind == "allreduce" and earlier is not None and earlier.process_set == number and some.random() < 0.4:
            # Equal to an earlier one in everything that matters for fusion with it.
            shapes = some.choices(SHAPES, SHAPE_WEIGHTS)
            layout = self._layout()
            operation = replace(earlier, label=self._label, thread=thread, shapes=tuple(shapes), layout=layout)
        else:
            operation = self._with_arguments(operation)
        if kind == "allreduce" and not operation.grouped:
            self._last_reduction = operation
        operation = self._with_timing(operation, end, place)
        if end != "extra" and kind != "barrier":
            operation = self._with_mistake(operation)
        return operation

    def _with_arguments(self, operation: Operation) -> Operation:
        some, kind = self._random, operation.kind
        if kind == "barrier":
            return replace(operation, blocking=True, dtypes=(), shapes=())
        members = self._members(operation.process_set)
        grouped = kind in ("allreduce", "allgather", "reducescatter") and some.random() < 0.25
        shapes = [some.choices(SHAPES, SHAPE_WEIGHTS)[0] for _ in range(some.randint(1, 4) if grouped else 1)]
        if kind != "allreduce" and kind != "broadcast":
            shapes = [shape or (2,) for shape in shapes]
        operation = replace(
            operation,
            grouped=grouped,
            shapes=tuple(shapes),
            dtypes=tuple(self._dtype(kind) for _ in shapes),
            in_place=kind in ("allreduce", "broadcast") and some.random() < 0.5,
            layout=self._layout(),
        )
        if kind in REDUCTIONS:
            return self._with_reduction(operation, len(members))
        if kind == "broadcast":
            return replace(operation, root=some.choice(members))
        if kind == "allgather" and some.random() < 0.5:
            return replace(operation, rows=tuple(some.randint(0, 4) for _ in members))
        if kind == "alltoall":
            return self._with_splits(operation, len(members))
        return operation

    def _dtype(self, kind: str) -> str:
        some = self._random
        if some.random() < 0.6:
            return some.choice(self._dtypes)
        return some.choice(REDUCED if kind in REDUCTIONS else MOVED)

    def _with_reduction(self, operation: Operation, num_members: int) -> Operation:
        some = self._random
        reduce_op = some.choice(self._ops) if operation.kind == "allreduce" else some.choice(("Sum", "Average"))
        prescale, postscale = some.choice(self._factors)
        floating = all(dtype in FLOATS for dtype in operation.dtypes)
        if reduce_op == "Adasum" and (operation.process_set or num_members not in (2, 4) or not floating):
            reduce_op = "Sum"
        values = "real" if some.random() < 0.25 else "whole"
        if some.random() < 0.1:
            operation = replace(operation, dtypes=("float16",) * len(operation.shapes))
            reduce_op, prescale, postscale, values = "Average", 1.0, 1.0, "large"
        small = operation.kind == "allreduce" and not operation.grouped and reduce_op in ("Sum", "Min", "Max")
        if small and values == "whole" and some.random() < 0.1:
            operation = replace(operation, dtypes=(some.choice(SMALL),))
            postscale = min(postscale, 2.0)  # 3 × 2 × 16 overflows int8
        return replace(operation, reduce_op=reduce_op, prescale=prescale, postscale=postscale, values=values)

    def _with_splits(self, operation: Operation, num_members: int) -> Operation:
        some = self._random
        (shape,) = operation.shapes
        if some.random() < 0.5:
            return replace(operation, shapes=((some.randint(0, 3) * num_members, *shape[1:]),))
        splits = tuple(tuple(some.randint(0, 3) for _ in range(num_members)) for _ in range(num_members))
        return replace(operation, splits=splits)

    def _with_timing(self, operation: Operation, end: str, place: int) -> Operation:
        some = self._random
        named = operation.kind != "barrier" and (operation.thread > 0 or some.random() < 0.6)
        ranks = range(self._num_ranks)
        if some.random() < 0.3:
            operation = replace(operation, pauses_ms=tuple(some.choice((0, 0, 1, 5, 20)) for _ in ranks))
        if operation.kind == "barrier":
            return operation
        operation = replace(operation, blocking=some.random() < 0.35, name=f"{end}{place}" if named else None)
        if operation.blocking:
            return operation
        if named and end != "extra" and some.random() < 0.4:
            operation = replace(operation, lags=tuple(some.randint(0, 3) for _ in ranks))
        patience = some.choice((0, 0, 1, AT_THE_END, AT_THE_END, AT_THE_END))
        return replace(operation, patience=patience, polls=some.random() < 0.2)

    def _with_mistake(self, operation: Operation) -> Operation:
        some = self._random
        members = self._members(operation.process_set)
        chance = some.random()
        if chance < 0.08 and len(members) > 1:
            wrong = _possible_mismatches(operation)
            return replace(operation, mistake=some.choice(wrong), mistaken=some.choice(members)) if wrong else operation
        if chance < 0.11:
            return self._refused(operation, members)
        if operation.grouped or some.random() > 0.15:
            return operation
        return replace(operation, mode=some.choice(MODES))

    def _refused(self, operation: Operation, members: tuple[int, ...]) -> Operation:
        strangers = [rank for rank in range(self._num_ranks) if rank not in members]
        if strangers and self._random.random() < 0.5:
            return replace(operation, mistake="stranger", mistaken=self._random.choice(strangers))
        mistake = {"broadcast": "bad root", "alltoall": "bad splits"}.get(operation.kind, "complex")
        return replace(operation, mistake=mistake)


MODES = ("inference", "default_device")


def _possible_mismatches(operation: Operation) -> list[str]:
    possible = ["shape", "dtype"]
    if operation.kind in REDUCTIONS and operation.reduce_op != "Adasum":
        possible += ["scale", "op"]
    if operation.kind == "broadcast":
        possible.append("root")
    if operation.grouped:
        possible.append("count")
    return [kind for kind in possible if kind in MISMATCHES]
