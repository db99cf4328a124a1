"""Barriers in shared memory, with the members as threads of one process."""

from __future__ import annotations

import logging
import threading

import pytest

from hora.engine.shm.barrier import SharedMemoryBarrier
from hora.engine.shm.futex import Counter
from hora.engine.shm.native import library
from hora.engine.shm.segment import Segment
from hora.errors import HorovodInternalError
from waiting import wait_until

LIMIT_S = 20


@pytest.fixture(autouse=True, params=["native", "python"])
def way(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr("hora.engine.shm.barrier.library", lambda: None)
    elif library() is None:
        pytest.skip("no native part")
    return request.param


def barriers(size, guard=lambda: None, **options):
    segment = Segment.create(SharedMemoryBarrier.num_bytes(size))
    options = {"warning_s": 0.0, "shutdown_s": 0.0, "stalled": lambda ranks, text: None, **options}
    return [
        SharedMemoryBarrier(
            segment, 0, member=m, ranks=list(range(10, 10 + size)), name="bucket", guard=guard, **options
        )
        for m in range(size)
    ]


def together(*functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_no_member_passes_before_all_have_come():
    size, seen = 3, []
    members = barriers(size)
    came = [0] * size

    def visit(member):
        for number in range(1, 51):
            came[member] = number
            assert members[member].wait() == []
            seen.append(min(came) >= number)

    together(*[lambda m=m: visit(m) for m in range(size)])
    assert seen == [True] * 150


def test_only_a_member_that_sleeps_is_woken(way, monkeypatch):
    woken, wake = [], Counter.wake
    monkeypatch.setattr(Counter, "wake", lambda counter: (woken.append(counter), wake(counter)))
    first, second = barriers(2)

    def come_late():
        wait_until("the first one sleeps", lambda: first._own_sleep.value)
        second.wait()

    for _ in range(3):  # the first one comes when no member sleeps
        together(first.wait, come_late)
        assert not first._own_sleep.value
    assert woken == ([second._came[1]] * 3 if way == "python" else [])  # the native part wakes them itself


def test_a_member_that_has_joined_is_absent_until_all_come_back():
    first, second, third = barriers(3)
    together(first.wait, second.wait, third.wait)
    second.leave()
    absent = []
    together(lambda: absent.append(first.wait()), lambda: absent.append(third.wait()))
    assert absent == [[1], [1]]
    third.leave()
    first.leave()
    for barrier in (first, second, third):
        barrier.come_back()
    assert {barrier.num_passed for barrier in (first, second, third)} == {2}
    together(first.wait, second.wait, third.wait)


def test_data_of_a_member_that_came_and_then_joined_still_counts():
    first, second = barriers(2)
    together(first.wait, second.wait)
    second.num_passed += 1  # it came a second time, took its result, and joined before the first one looked
    second.leave()
    assert first.wait() == []
    assert first.wait() == [1]


def test_a_late_member_is_named_and_a_fault_ends_the_wait(caplog):
    calls = []

    def guard():
        calls.append(1)
        if len(calls) > 8:
            raise HorovodInternalError("rank 11 was lost")

    barrier = barriers(2, guard=guard, warning_s=0.05)[0]
    with caplog.at_level(logging.WARNING, logger="hora"), pytest.raises(HorovodInternalError, match="rank 11"):
        barrier.wait()
    assert "11: [bucket]" in caplog.text


def test_a_stall_shuts_down():
    told = []

    def stalled(ranks, text):
        told.append((list(ranks), text))
        raise HorovodInternalError(text)

    barrier = barriers(2, warning_s=0.05, shutdown_s=0.1, stalled=stalled)[0]
    with pytest.raises(HorovodInternalError, match="stalled for more than"):
        barrier.wait()
    assert told[0][0] == [11]


def test_a_member_that_sleeps_sees_that_another_one_leaves():
    """It watches the low half of the number alone: that must not be the one it has seen."""
    first, second = barriers(2)
    second.leave()
    assert first._came[1].value & 0xFFFFFFFF not in range(2**24)
