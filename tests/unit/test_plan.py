"""All members derive the same batches from any interleaving of announcements; nothing is lost or runs twice."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hora.engine.plan import BatchPlanner
from hora.engine.request import Kind, Reduce, ReduceOp, Signature, Validator


def allreduce(name, *, dtype="float32", shape=(4,), op=ReduceOp.SUM, operation="allreduce", prescale=1.0, **more):
    dtypes, reduce = (dtype,) if isinstance(dtype, str) else tuple(dtype), Reduce(int(op), prescale)
    return Signature(Kind.ALLREDUCE, operation, name, dtypes, (tuple(shape),) * len(dtypes), reduce, **more)


JOIN = Signature(Kind.JOIN, "join", None)


def planner(size, threshold=1 << 20, **more):
    return BatchPlanner(range(size), fusion_threshold_bytes=threshold, **more)


def shape_of(batches):
    """Return the operations that a member would execute, comparable between members."""
    return [(b.kind, b.error, b.last_joined, [(p.key, p.index) for p in b.parts]) for b in batches]


@st.composite
def histories(draw):
    """Generate the members' announcement lists, in rounds; each observer sees a round's members in any order."""
    size = draw(st.integers(1, 4))
    names = draw(st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8))
    repeats = {name: draw(st.integers(1, 3)) for name in names}
    logs = []
    for _ in range(size):
        order = [(n, k) for n in names for k in range(repeats[n])]
        order = draw(st.permutations(order))
        # A name may be announced again only after the round in which it ran, so its occurrences stay in order.
        seen = Counter()
        log = []
        for name, _ in order:
            log.append((name, seen[name]))
            seen[name] += 1
        logs.append(log)
    signatures = {
        name: allreduce(name, dtype=draw(st.sampled_from(["float32", "float64"])), shape=(draw(st.integers(0, 5)),))
        for name in names
    }
    return size, logs, signatures, draw(st.integers(0, 2**32)), draw(st.integers(0, 64))


@settings(max_examples=300, deadline=None)
@given(histories())
def test_every_member_derives_the_same_batches(history):
    size, logs, signatures, seed, threshold = history
    random = Random(seed)
    planners = [planner(size, threshold) for _ in range(size)]
    position = [0] * size
    in_flight = [set() for _ in range(size)]
    ran = Counter()
    submitted = Counter()
    for _ in range(200):
        arrivals = []
        for member in range(size):
            for _ in range(random.randint(0, 4)):
                if position[member] < len(logs[member]):
                    name, _ = logs[member][position[member]]
                    if name in in_flight[member]:
                        break  # the engine rejects a name that is still in flight
                    in_flight[member].add(name)
                    submitted[member, name] += 1
                    arrivals.append((member, name))
                    position[member] += 1
        plans = []
        for observer in planners:
            queues = {m: [name for member, name in arrivals if member == m] for m in range(size)}
            while any(queues.values()):
                member = random.choice([m for m in queues if queues[m]])
                observer.feed(member, signatures[queues[member].pop(0)], 0)
            plans.append(shape_of(observer.close_round()))
        assert all(plan == plans[0] for plan in plans)
        for _, error, _, parts in plans[0]:
            assert error is None
            for (_, name), _ in parts:
                ran[name] += 1
                for member in range(size):
                    in_flight[member].remove(name)  # KeyError: it ran unannounced, or twice
    for name, signature in signatures.items():
        times = {submitted[member, name] for member in range(size)}
        assert ran[name] == min(times), (name, signature, times)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 4), st.data())
def test_join_completes_operations_that_joined_members_never_announce(size, data):
    """Members announce different numbers of steps and then join; all observers agree, and every step runs once."""
    steps = [data.draw(st.integers(0, 5)) for _ in range(size)]
    random = Random(data.draw(st.integers(0, 2**32)))
    planners = [planner(size) for _ in range(size)]
    logs = [[*(allreduce(f"s{i}") for i in range(n)), JOIN] for n in steps]
    ran, last = Counter(), []
    while any(logs):
        arrivals = [(m, logs[m].pop(0)) for m in range(size) for _ in range(random.randint(0, 2)) if logs[m]]
        plans = []
        for observer in planners:
            queues = {m: [s for member, s in arrivals if member == m] for m in range(size)}
            while any(queues.values()):
                member = random.choice([m for m in queues if queues[m]])
                observer.feed(member, queues[member].pop(0), 0)
            plans.append(shape_of(observer.close_round()))
        assert all(plan == plans[0] for plan in plans)
        for kind, error, last_joined, parts in plans[0]:
            assert error is None
            if kind is Kind.JOIN:
                last.append(last_joined)
            ran.update(name for (_, name), _ in parts)
    assert len(last) == 1
    assert ran == Counter({f"s{i}": 1 for i in range(max(steps))})


@pytest.mark.parametrize(
    ("left", "right", "words"),
    [
        (allreduce("x"), allreduce("x", dtype="float64"), ["Mismatched data types", "float32", "float64"]),
        (allreduce("x"), allreduce("x", shape=(5,)), ["Mismatched ALLREDUCE tensor shapes", "[4]", "[5]"]),
        (allreduce("x"), allreduce("x", op=ReduceOp.MAX), ["Mismatched reduction operation", "SUM", "MAX"]),
        (
            allreduce("x"),
            allreduce("x", op=ReduceOp.ADASUM),
            ["Mismatched operations", "ALLREDUCE", "ADASUM"],
        ),
        (allreduce("x"), allreduce("x", prescale=2.0), ["Mismatched prescale", "1.0/1.0", "2.0/1.0"]),
        (allreduce("x"), allreduce("x", device="cuda"), ["CPU/GPU device selection", "cpu", "cuda"]),
    ],
)
def test_disagreement_is_an_error_with_both_values(left, right, words):
    p = planner(3)
    p.feed(0, left, 0)
    p.feed(1, left, 0)
    p.feed(2, right, 0)
    (batch,) = p.close_round()
    for word in [*words, "rank 0", "rank 2", "allreduce.x"]:
        assert word in batch.error
    for member in range(3):  # the name can be used again
        p.feed(member, left, 0)
    (batch,) = p.close_round()
    assert batch.error is None


def test_fusion_respects_the_threshold_and_the_order():
    p = planner(2, threshold=40)
    for member in range(2):
        for name in "abcde":
            p.feed(member, allreduce(name), 0)
    batches = p.close_round()
    assert [[part.key[1] for part in b.parts] for b in batches] == [["a", "b"], ["c", "d"], ["e"]]


def test_a_threshold_of_zero_disables_fusion():
    p = planner(1, threshold=0)
    for name in "abc":
        p.feed(0, allreduce(name), 0)
    assert [len(b.parts) for b in p.close_round()] == [1, 1, 1]


def test_groups_of_mixed_dtypes_run_together_or_apart_on_request():
    group = allreduce("g", dtype=("float32", "float64", "float32"), operation="grouped_allreduce")
    for fusion, expected in ((True, [3, 1]), (False, [1, 2, 1])):
        p = planner(1, group_fusion=fusion)
        p.feed(0, allreduce("single"), 0)
        p.feed(0, group, 0)
        assert [len(b.parts) for b in p.close_round()] == expected


def test_a_group_runs_only_when_complete():
    group = allreduce("g", dtype=("float32",) * 4, operation="grouped_allreduce")
    p = planner(2)
    p.feed(0, group, 0)
    assert p.close_round() == []
    p.feed(1, group, 0)
    (batch,) = p.close_round()
    assert [part.index for part in batch.parts] == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER, Kind.BARRIER])
def test_operations_unsupported_by_join_fail_and_the_next_succeed(kind):
    p = planner(2)
    p.feed(1, JOIN, 0)
    p.feed(0, Signature(kind, kind.name.lower(), "x", ("float32",), ((4,),), extra=(2, 2)), 0)
    (batch,) = p.close_round()
    assert "not supported with Join" in batch.error
    p.feed(0, JOIN, 0)
    (batch,) = p.close_round()
    assert (batch.kind, batch.last_joined) == (Kind.JOIN, 0)


def test_a_completed_join_has_the_highest_unnamed_number():
    p = planner(2)
    unnamed = allreduce(None)
    for instance in range(5):
        p.feed(0, unnamed, instance)
    p.feed(1, unnamed, 0)
    p.feed(1, JOIN, 0)
    p.feed(0, JOIN, 0)
    p.close_round()
    assert p.unnamed["allreduce"] == 5


@pytest.mark.parametrize("signature", [allreduce("x"), allreduce(None), allreduce("b", extra=(1,))])
def test_the_short_path_equals_the_long_path(signature):
    long, short = planner(3), planner(3)
    for instance in (0, 1):
        for member in range(3):
            long.feed(member, signature, instance)
        short.feed_all(signature, instance)
        (expected,), (found,) = long.close_round(), short.close_round()
        assert shape_of([found]) == shape_of([expected])
        assert found.signature is expected.signature
        assert list(found.parts[0].signatures) == list(expected.parts[0].signatures)
    assert short.unnamed == long.unnamed
    assert (short.idle, long.idle) == (True, True)
    short.feed(0, signature, 5)
    assert not short.idle


def test_the_short_path_fuses_several_requests_like_the_long_path():
    kinds = [
        allreduce("x"),
        allreduce(None),
        allreduce("y", dtype="float64"),
        allreduce("z", extra=(3, 0)),
        allreduce("w"),
    ]
    kinds += [allreduce("large", shape=(100,)), allreduce("v"), allreduce("max", op=ReduceOp.MAX)]
    long, short = planner(3, threshold=400), planner(3, threshold=400)
    for first in (0, 5):
        instances = [first + number if kind.name is None else 0 for number, kind in enumerate(kinds)]
        for member in range(3):
            for kind, instance in zip(kinds, instances, strict=True):
                long.feed(member, kind, instance)
        for kind, instance in zip(kinds, instances, strict=True):
            short.feed_all(kind, instance)
        expected, found = long.close_round(), short.close_round()
        assert shape_of(found) == shape_of(expected)
        assert [batch.num_bytes for batch in found] == [batch.num_bytes for batch in expected]
    assert short.unnamed == long.unnamed


def on_two_gpus(threshold=1 << 20):
    """Return a plan in which rank 1 has one of three tensors on another GPU than the others."""
    plan = planner(2, threshold)
    for name in "abc":
        plan.feed(0, allreduce(name, device="cuda"), 0)
        plan.feed(1, allreduce(name, device="cuda/2" if name == "b" else "cuda"), 0)
    return plan


def test_tensors_on_two_gpus_of_a_rank_are_not_fused():
    batches = on_two_gpus().close_round()
    assert [[part.key[1] for part in batch.parts] for batch in batches] == [["a", "c"], ["b"]]
    assert [batch.devices for batch in batches] == ["cuda", "cuda,cuda/2"]
    assert [batch.error for batch in batches] == [None, None]
    assert [len(batch.parts) for batch in on_two_gpus(threshold=0).close_round()] == [1, 1, 1]


def test_a_joined_rank_takes_part_on_its_first_gpu():
    plan = planner(2)
    plan.feed(1, JOIN, 0)
    plan.feed(0, allreduce("a", device="cuda"), 0)
    plan.feed(0, allreduce("b", device="cuda/2"), 0)
    assert [batch.devices for batch in plan.close_round()] == ["cuda", "cuda/2,cuda"]
    plan = planner(2)
    for member, device in enumerate(("cuda", "cpu")):
        plan.feed(member, allreduce("a", device=device), 0)
    (batch,) = plan.close_round()
    assert "CPU/GPU device selection: rank 0 has cuda, rank 1 has cpu" in str(batch.error)


def test_gpus_are_numbered_in_the_order_of_their_first_use():
    """Ranks that use one GPU each then announce the same label, whatever its number."""
    validator = Validator([0, 1])
    gpus = [torch.device("cuda", number) for number in (3, 1, 3, 0)]
    assert [validator.device_label(gpu) for gpu in gpus] == ["cuda", "cuda/2", "cuda", "cuda/3"]
    assert validator.device_label(torch.device("cpu")) == "cpu"
    assert validator.home_gpu == gpus[0]
    validator.set_home_gpu(gpus[1])
    assert validator.home_gpu == gpus[0]
    fresh = Validator([0, 1])
    assert fresh.home_gpu is None
    fresh.set_home_gpu(gpus[1])
    assert (fresh.home_gpu, fresh.device_label(gpus[1])) == (gpus[1], "cuda")
