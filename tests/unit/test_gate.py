"""Gates, with the members as threads of one process."""

from __future__ import annotations

import logging
import threading

import pytest

from hora.engine.shm.barrier import Gate
from hora.engine.shm.segment import Segment
from hora.errors import HorovodInternalError

LIMIT_S = 20


def gates(size, guard=lambda: None, **options):
    segment = Segment.create(Gate.num_bytes(size))
    options = {"warning_s": 0.0, "shutdown_s": 0.0, "stalled": lambda ranks, text: None, **options}
    return [
        Gate(segment, 0, member=m, ranks=list(range(10, 10 + size)), name="bucket", guard=guard, **options)
        for m in range(size)
    ]


def together(*functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_nobody_passes_before_all_have_come():
    size, seen = 3, []
    members = gates(size)
    came = [0] * size

    def visit(member):
        for number in range(1, 51):
            came[member] = number
            assert members[member].pass_through() == []
            seen.append(min(came) >= number)

    together(*[lambda m=m: visit(m) for m in range(size)])
    assert seen == [True] * 150


def test_who_has_joined_is_absent_until_all_come_back():
    first, second, third = gates(3)
    together(first.pass_through, second.pass_through, third.pass_through)
    second.leave()
    absent = []
    together(lambda: absent.append(first.pass_through()), lambda: absent.append(third.pass_through()))
    assert absent == [[1], [1]]
    third.leave()
    first.leave()
    for gate in (first, second, third):
        gate.come_back()
    assert {gate.num_passed for gate in (first, second, third)} == {2}
    together(first.pass_through, second.pass_through, third.pass_through)


def test_data_of_a_member_that_came_and_then_joined_still_counts():
    first, second = gates(2)
    together(first.pass_through, second.pass_through)
    second.num_passed += 1  # it came a second time, took its result, and joined before the first one looked
    second.leave()
    assert first.pass_through() == []
    assert first.pass_through() == [1]


def test_a_late_member_is_named_and_a_fault_ends_the_wait(caplog):
    calls = []

    def guard():
        calls.append(1)
        if len(calls) > 8:
            raise HorovodInternalError("rank 11 was lost")

    gate = gates(2, guard=guard, warning_s=0.05)[0]
    with caplog.at_level(logging.WARNING, logger="hora"), pytest.raises(HorovodInternalError, match="rank 11"):
        gate.pass_through()
    assert "11: [bucket]" in caplog.text


def test_a_stall_shuts_down():
    told = []

    def stalled(ranks, text):
        told.append((list(ranks), text))
        raise HorovodInternalError(text)

    gate = gates(2, warning_s=0.05, shutdown_s=0.1, stalled=stalled)[0]
    with pytest.raises(HorovodInternalError, match="stalled for more than"):
        gate.pass_through()
    assert told[0][0] == [11]
