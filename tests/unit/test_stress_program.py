"""The pure parts of the engine's stress test: programs from seeds, expected results, the judge, and shrinking."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
from stress.generate import generate
from stress.judge import Outcome, Record, judge
from stress.program import AT_THE_END, Death, Operation, Phase, Program, listing, segments
from stress.reference import check, expectation, expected, inputs, last_to_join, participants
from stress.shrink import candidates, is_valid, shrink

SOME = [(seed, 2 + seed % 3) for seed in range(60)]


def program_of(*operations: Operation, num_ranks: int = 2, **phase) -> Program:
    return Program(num_ranks=num_ranks, phases=(Phase(operations=operations, **phase),))


def good_records(program: Program) -> dict[int, Record]:
    """Return the records of all ranks in a run without errors."""
    records = {rank: Record() for rank in range(program.num_ranks)}
    for phase, operation in program.operations():
        wanted = expectation(program, phase, operation)
        for rank in wanted.ranks:
            records[rank].outcomes[operation.label] = Outcome(min(wanted.statuses))
    for number, phase in enumerate(program.phases):
        for record in records.values():
            if phase.stamina:
                record.joined[number] = last_to_join(program, phase) or 0
    return records


# Programs.


def test_a_program_is_a_function_of_its_seed_and_can_be_saved_as_text():
    for seed, num_ranks in SOME:
        program = generate(seed, num_ranks, victim=seed % 2)
        assert program == generate(seed, num_ranks, victim=seed % 2)
        assert Program.from_text(program.to_text()) == program
        assert is_valid(program)
        assert str(num_ranks) in listing(program)
    assert generate(1, 2) != generate(2, 2)


def test_programs_cover_all_features():
    programs = [generate(seed, 2 + seed % 3) for seed in range(300)]
    operations = [operation for program in programs for _, operation in program.operations()]
    phases = [phase for program in programs for phase in program.phases]
    kinds = {operation.kind for operation in operations}
    assert kinds == {"allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier"}
    assert {operation.thread for operation in operations} == {0, 1, 2}
    assert {len(program.sets) for program in programs} >= {0, 1, 2, 3}
    for name in (
        "blocking",
        "in_place",
        "grouped",
        "mistake",
        "absent",
        "lags",
        "polls",
        "name",
        "mode",
        "process_set",
    ):
        values = {bool(getattr(operation, name)) for operation in operations}
        assert values == {True, False}, name
    assert {operation.values for operation in operations} == {"whole", "real", "large"}
    assert any(phase.stamina and not phase.waits_first for phase in phases)
    assert any(phase.removes and not phase.waits_first for phase in phases)
    assert {operation.mistake for operation in operations} >= {
        "shape",
        "dtype",
        "scale",
        "op",
        "root",
        "count",
        "stranger",
    }


def test_programs_cannot_deadlock():
    """Every program ends if its collectives only synchronise threads."""
    for seed, num_ranks in SOME[:20]:
        program = generate(seed, num_ranks)
        for phase in program.phases:
            _meet(program, phase)


def _meet(program: Program, phase: Phase) -> None:
    """Run all ranks and threads of a phase as threads; a blocking operation waits for all members."""
    arrived: dict[int, set[int]] = {}
    changed = threading.Condition()

    def script(rank: int, thread: int) -> None:
        mine = [operation for operation in phase.operations if operation.thread == thread]
        for operation in mine:
            ranks = participants(program, phase, operation)
            if rank not in ranks or operation.mistake == "stranger":
                continue
            with changed:
                arrived.setdefault(operation.label, set()).add(rank)
                changed.notify_all()
                if operation.blocking:
                    seen = changed.wait_for(lambda o=operation, r=ranks: arrived[o.label] >= set(r), 10)
                    assert seen, operation

    threads = [threading.Thread(target=script, args=(r, t)) for r in range(program.num_ranks) for t in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    for operation in phase.operations:
        ranks = participants(program, phase, operation)
        assert operation.mistake == "stranger" or arrived.get(operation.label, set()) == set(ranks)


def test_segments_end_with_blocking_operations():
    a, b, c = (Operation(label=label, kind="allreduce", blocking=label == 2) for label in (1, 2, 3))
    assert segments([a, b, c]) == [[a, b], [c]]


# The reference.


def test_reductions():
    def give(**arguments) -> list[float]:
        operation = Operation(label=5, kind="allreduce", shapes=((4,),), **arguments)
        ((tensor, tolerance),) = expected(operation, (0, 1), (0, 1), 0)
        assert tolerance is None
        return tensor.tolist()

    a, b = (inputs(Operation(label=5, kind="allreduce", shapes=((4,),)), (0, 1), rank)[0].tolist() for rank in (0, 1))
    assert a != b
    assert give() == [x + y for x, y in zip(a, b, strict=True)]
    assert give(prescale=0.5, postscale=3.0) == [1.5 * (x + y) for x, y in zip(a, b, strict=True)]
    assert give(reduce_op="Average") == [(x + y) / 2 for x, y in zip(a, b, strict=True)]
    assert give(reduce_op="Min") == [min(x, y) for x, y in zip(a, b, strict=True)]
    assert give(dtypes=("int32",), prescale=0.5) == [int(x / 2) + int(y / 2) for x, y in zip(a, b, strict=True)]
    assert give(dtypes=("int32",), reduce_op="Average") == [int((x + y) / 2) for x, y in zip(a, b, strict=True)]


def test_a_joined_rank_adds_nothing_but_counts_for_the_average():
    operation = Operation(label=5, kind="allreduce", shapes=((4,),), reduce_op="Average")
    alone = inputs(operation, (0, 1), 0)[0]
    ((tensor, _),) = expected(operation, (0, 1), (0,), 0)
    assert torch.equal(tensor, alone / 2)


def test_results_of_data_movement():
    gather = Operation(label=1, kind="allgather", shapes=((9, 2),), rows=(0, 3))
    ((tensor, _),) = expected(gather, (0, 2), (0, 2), 0)
    assert torch.equal(tensor, inputs(gather, (0, 2), 2)[0])
    assert tensor.shape == (3, 2)
    scatter = Operation(label=2, kind="reducescatter", shapes=((3,),))
    whole = inputs(scatter, (0, 2), 0)[0] + inputs(scatter, (0, 2), 2)[0]
    assert expected(scatter, (0, 2), (0, 2), 0)[0][0].tolist() == whole[:2].tolist()
    assert expected(scatter, (0, 2), (0, 2), 2)[0][0].tolist() == whole[2:].tolist()
    exchange = Operation(label=3, kind="alltoall", splits=((1, 2), (0, 1)))
    (tensor, _), (received, _) = expected(exchange, (0, 1), (0, 1), 1)
    first, second = (inputs(exchange, (0, 1), rank)[0] for rank in (0, 1))
    assert tensor.tolist() == [*first[1:3].tolist(), second[0].item()]
    assert received.tolist() == [2, 1]


def test_a_wrong_element_dtype_or_shape_is_found():
    operation = Operation(label=1, kind="allreduce", shapes=((4,),))
    program = program_of(operation)
    (phase,) = program.phases
    right = expected(operation, (0, 1), (0, 1), 0)[0][0]
    assert check(program, phase, operation, 0, [right]) == ""
    wrong = right.clone()
    wrong[2] += 1e-5
    assert "1 of 4 elements" in check(program, phase, operation, 0, [wrong])
    assert "float64" in check(program, phase, operation, 0, [right.double()])
    assert "[2, 2]" in check(program, phase, operation, 0, [right.reshape(2, 2)])
    assert "2 tensors" in check(program, phase, operation, 0, [right, right])
    real = replace(operation, values="real")
    near = expected(real, (0, 1), (0, 1), 0)[0][0]
    assert check(program, phase, real, 0, [near * (1 + 1e-7)]) == ""
    assert check(program, phase, real, 0, [near * (1 + 1e-4)])
    assert check(program, phase, real, 0, [near * torch.nan])


def test_expectations():
    gather = Operation(label=1, kind="allgather", patience=AT_THE_END)
    plain = program_of(gather)
    assert expectation(plain, plain.phases[0], gather).statuses == {"value"}
    mismatch = replace(gather, mistake="dtype")
    assert expectation(plain, Phase(operations=(mismatch,)), mismatch).statuses == {"mismatch"}
    joining = Phase(operations=(gather,), stamina=(0, 0), waits_first=False)
    assert expectation(plain, joining, gather).statuses == {"value", "join"}
    extra = Phase(extras=(gather,), stamina=(0, 1))
    assert expectation(plain, extra, gather).statuses == {"join"}
    assert expectation(plain, extra, gather).ranks == (1,)
    in_set = replace(gather, process_set=1)
    program = Program(num_ranks=3, sets=((0, 2),))
    removing = Phase(adds=(1,), operations=(in_set,), removes=(1,), waits_first=False)
    assert expectation(program, removing, in_set).statuses == {"value", "removed"}
    orphan = replace(in_set, absent=(2,))
    assert expectation(program, removing, orphan).statuses == {"removed"}
    stranger = replace(in_set, mistake="stranger", mistaken=1)
    assert expectation(program, removing, stranger).ranks == (1,)
    assert expectation(program, removing, stranger).statuses == {"refused"}


# The judge.


def test_the_judge_accepts_correct_records():
    for seed, num_ranks in SOME:
        program = generate(seed, num_ranks)
        records = good_records(program)
        assert judge(program, {rank: Record.from_text(record.to_text()) for rank, record in records.items()}) == []


def test_the_judge_finds_errors():
    operation = Operation(label=1, kind="allreduce")
    program = program_of(operation, stamina=(0, 0))
    bad = {
        "saw wrong (12 instead of 8)": lambda r: r[1].outcomes.update({1: Outcome("wrong", "12 instead of 8")}),
        "saw mismatch": lambda r: r[0].outcomes.update({1: Outcome("mismatch")}),
        "did not come to it": lambda r: r[1].outcomes.clear(),
        "different bits": lambda r: r[1].outcomes.update({1: Outcome("value", digest=7)}),
        "no record": lambda r: r.pop(1),
        "rank 0: a leak": lambda r: r[0].problems.append("a leak"),
        "do not agree who joined last": lambda r: r[0].joined.update({0: 1}),
    }
    for words, spoil in bad.items():
        records = good_records(program)
        spoil(records)
        (text,) = judge(program, records)[:1]
        assert words in text


def test_the_judge_requires_agreement_of_the_ranks():
    operation = Operation(label=1, kind="allgather", patience=AT_THE_END)
    program = program_of(operation, stamina=(0, 0), waits_first=False)
    records = good_records(program)
    records[0].outcomes[1], records[1].outcomes[1] = Outcome("value"), Outcome("join")
    (text,) = judge(program, records)
    assert "do not agree how it ended" in text


def test_a_death_may_end_operations_but_not_the_survivors():
    program = replace(program_of(Operation(label=1, kind="allreduce"), num_ranks=3), death=Death(rank=2))
    records = good_records(program)
    del records[2]
    records[0].outcomes[1] = Outcome("ended")
    assert judge(program, records) == []
    del records[0]
    assert judge(program, records) == ["rank 0: no record"]


# Shrinking.


def test_a_failing_program_is_shrunk():
    """A program 'fails' if a broadcast in a process set precedes a barrier."""

    def fails(program: Program) -> bool:
        seen = False
        for _, operation in program.operations():
            seen = seen or (operation.kind == "broadcast" and operation.process_set > 0)
            if seen and operation.kind == "barrier":
                return True
        return False

    failing = [p for seed in range(200) if fails(p := generate(seed, 4))]
    assert len(failing) > 5
    for program in failing[:10]:
        small = shrink(program, fails, max_attempts=2000)
        assert fails(small)
        assert is_valid(small)
        assert small.num_operations == 2
        assert sum(len(phase.adds) for phase in small.phases) == 1
        assert not any(phase.stamina or phase.removes for phase in small.phases)


def test_shrinking_stops_after_a_number_of_attempts():
    attempts = []
    program = generate(3, 4)
    assert shrink(program, lambda candidate: bool(attempts.append(candidate)), max_attempts=7) == program
    assert len(attempts) <= 7


def test_candidates_for_shrinking_are_valid():
    for seed, num_ranks in SOME[:20]:
        program = generate(seed, num_ranks, victim=seed % 2)
        for candidate in candidates(program):
            if is_valid(candidate):
                assert judge(candidate, good_records(candidate)) == []
                assert Program.from_text(candidate.to_text()) == candidate
