"""Schedules, with members as threads of one process: order, waking, joining, stalls, faults."""

from __future__ import annotations

import logging
import threading
import weakref
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from hora.engine.queue import QueueWorld
from hora.engine.request import Kind, Reduce, Signature
from hora.engine.schedule import ReductionSchedule
from hora.engine.shm.counters import OPEN
from hora.engine.shm.native import absence, library
from hora.engine.shm.reduction import SharedMemoryReduction
from hora.engine.shm.segment import Segment, SharedMemory
from hora.engine.status import StallLimits, TimelineRecorder, WorldStatus
from hora.errors import HorovodInternalError
from waiting import wait_until

pytestmark = pytest.mark.skipif(library() is None, reason=f"no native part: {absence()}")

LIMIT_S = 20


@pytest.fixture(autouse=True)
def no_schedule_outlives_its_test():
    Queue.of_this_test.clear()
    yield
    for queue in Queue.of_this_test:
        for schedule in list(queue.schedules):
            queue.status.close("the test is over")
            schedule.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hora-schedule")]


class Queue:
    """The part of a queue that a schedule needs."""

    of_this_test: ClassVar[list[Queue]] = []

    def __init__(self, member, size):
        self.of_this_test.append(self)
        self.told = []
        self.status = WorldStatus(10 + member, tell=self.told.append, wake=lambda: None)
        self.recorder = TimelineRecorder(10 + member)
        self.ranks, self.member, self.process_set_id = tuple(range(10, 10 + size)), member, 0
        self.world = QueueWorld(10 + member, self.status, self.recorder, lambda batch: None, lambda: None, None)
        self.schedules, self.bound = weakref.WeakSet(), {}

    def check_open(self):
        self.status.check_open()

    def broke(self, error):
        pass

    def idle_if_closing(self):
        pass


class Noted:
    """A reduction that records its executions."""

    def __init__(self, name, log):
        self.signature = Signature(int(Kind.ALLREDUCE), "allreduce", name, ("float32",), ((1,),))
        self.num_bytes = 4
        self.log = log

    def execute_scheduled(self, number, absent):
        self.log.append((self.signature.name, number, list(absent)))
        return True


def schedules(size, *, warning_s=0.0, shutdown_s=0.0):
    segment = Segment.create(ReductionSchedule.num_bytes(size))
    limits = StallLimits(warning_s, shutdown_s)
    return [ReductionSchedule(Queue(member, size), segment, 0, limits=limits) for member in range(size)]


def together(*functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def meet(*members):
    found = {}
    together(
        *[lambda schedule=schedule: found.update({schedule.member: list(schedule.meet("x"))}) for schedule in members]
    )
    return [found[schedule.member] for schedule in members]


def test_no_member_passes_before_all_have_arrived():
    size, seen = 3, []
    members = schedules(size)
    came = [0] * size

    def visit(member):
        for number in range(1, 51):
            came[member] = number
            assert list(members[member].meet("x")) == []
            seen.append(min(came) >= number)

    together(*[lambda m=m: visit(m) for m in range(size)])
    assert seen == [True] * 150


def test_items_run_in_the_fixed_order_whatever_the_order_of_their_start():
    members, logs = schedules(2), [[], []]
    for schedule, log in zip(members, logs, strict=True):
        for name in "abc":
            schedule.add(Noted(name, log))

    def step(schedule, order):
        items = [schedule.start(index, background=index != order[-1]) for index in order]
        for item in sorted(items, key=lambda item: item.name):
            schedule.wait(item)

    for first, second in [((0, 1, 2), (2, 1, 0)), ((1, 0, 2), (0, 2, 1))]:
        together(partial(step, members[0], first), partial(step, members[1], second))
    expected = [(name, number, []) for number, name in enumerate("abcabc", 1)]
    assert logs == [expected, expected]
    for schedule in members:
        assert schedule.num_in_flight == 0
        schedule.close()


def test_a_sleeping_member_is_woken():
    first, second = schedules(2)

    def come_late():
        wait_until("the first one sleeps", lambda: first._counters._own_sleep.value)
        second.meet("x")

    for _ in range(3):
        together(lambda: first.meet("x"), come_late)
        assert not first._counters._own_sleep.value


def test_a_joined_member_is_absent_until_all_return():
    first, second, third = members = schedules(3)
    meet(*members)
    second.leave()
    assert meet(first, third) == [[1], [1]]
    third.leave()
    first.leave()
    together(*[schedule.come_back for schedule in members])
    assert {schedule._num_items for schedule in members} == {2}
    assert meet(*members) == [[], [], []]


def test_a_joining_member_completes_its_started_items():
    first, second = members = schedules(2)
    logs = [[], []]
    for schedule, log in zip(members, logs, strict=True):
        schedule.add(Noted("a", log))
    second.start(0, background=False)
    second.leave()  # before the first one has arrived
    for _ in range(2):
        first.wait(first.start(0, background=False))
    wait_until("the second one has left", lambda: second._counters.own.value == OPEN)
    assert logs == [[("a", 1, []), ("a", 2, [1])], [("a", 1, [])]]


@pytest.mark.parametrize(("dtype", "prescale"), [(torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.bfloat16, 0.25)])
@pytest.mark.parametrize("way_to_reduce", ["sliced", "direct"])
def test_a_joined_member_contributes_zeros_to_an_allreduce(dtype, way_to_reduce, prescale):
    size, count = 3, 200
    segment = Segment.create(2**20)
    memory = SharedMemory(segment)
    offset = memory.reserve(ReductionSchedule.num_bytes(size))
    places = [memory.allocate(count, dtype, copied=False) for _ in range(size)]
    members = [ReductionSchedule(Queue(m, size), segment, offset, limits=StallLimits(0, 0)) for m in range(size)]
    reductions, values = [], [torch.arange(count) % 7 + m for m in range(size)]
    for schedule in members:
        out = torch.zeros(count, dtype=dtype) if way_to_reduce == "direct" else None
        reduce = Reduce(prescale=prescale)
        reductions.append(SharedMemoryReduction(schedule, Kind.ALLREDUCE, [places], name="x", reduce=reduce, out=out))

    def step(member, results):
        places[member].copy_(values[member])
        results[member] = reductions[member].wait().clone()

    for present in ([0, 1, 2], [0, 2]):
        if len(present) < size:
            members[1].leave()
        results = {}
        together(*[partial(step, m, results) for m in present])
        expected = (sum(values[m] for m in present) * prescale).to(dtype)
        for member in present:
            assert torch.equal(results[member], expected), (present, member)


def test_a_late_member_is_named_and_a_fault_ends_the_wait(caplog):
    schedule = schedules(2, warning_s=0.05)[0]
    schedule.add(Noted("bucket", []))

    def break_world():
        wait_until("the late one is named", lambda: "11: [allreduce.bucket]" in caplog.text)
        schedule.queue.status.fault("rank 11 was lost")

    with caplog.at_level(logging.WARNING, logger="hora"):
        thread = threading.Thread(target=break_world)
        thread.start()
        with pytest.raises(HorovodInternalError, match="rank 11"):
            schedule.wait(schedule.start(0, background=False))
        thread.join()


def test_a_stall_shuts_down():
    schedule = schedules(2, warning_s=0.05, shutdown_s=0.1)[0]
    with pytest.raises(HorovodInternalError, match=r"rank\(s\) 11 stalled for more than"):
        schedule.meet("x")
    assert len(schedule.queue.told) == 1


def test_an_item_published_by_all_completes_after_one_of_them_has_left_the_world():
    first, second = schedules(2)
    logs = [[], []]
    for schedule, log in zip((first, second), logs, strict=True):
        schedule.add(Noted("a", log))
    item = second.start(0, background=True)
    first.wait(first.start(0, background=False))
    first.queue.status.close("rank 10 has shut down")
    first.close()
    second.wait(item)
    assert logs == [[("a", 1, [])]] * 2


def test_the_counter_of_a_leaving_member_differs_from_all_others_for_a_sleeper():
    """A sleeper compares only the low half of the counter."""
    assert OPEN & 0xFFFFFFFF not in range(2**24)


def test_an_item_in_flight_cannot_be_started_again():
    segment = Segment.create(2**16)
    memory = SharedMemory(segment)
    schedule = ReductionSchedule(
        Queue(0, 2), segment, memory.reserve(ReductionSchedule.num_bytes(2)), limits=StallLimits(0, 0)
    )
    places = [[memory.allocate(8, torch.float32, copied=False) for _ in range(2)]]
    reduction = SharedMemoryReduction(schedule, Kind.ALLREDUCE, places, name="x", reduce=Reduce())
    reduction.start(background=False)
    with pytest.raises(ValueError, match=r"same name as another tensor .* allreduce.x"):
        reduction.start(background=False)
    reduction.release()
    with pytest.raises(HorovodInternalError, match="shut down"):
        reduction.wait()


def test_an_item_that_cannot_run_scheduled_is_negotiated():
    """This happens across hosts when another host executes something else."""
    done = []
    reduction = SimpleNamespace(
        signature=Signature(int(Kind.ALLREDUCE), "allreduce", "x", ("float32",), ((1,),)),
        num_bytes=4,
        execute_scheduled=lambda number, absent: False,
        execute_negotiated=done.append,
    )
    first, second = schedules(2)
    for schedule in (first, second):
        schedule.add(reduction)
    together(
        *[lambda schedule=schedule: schedule.wait(schedule.start(0, background=False)) for schedule in (first, second)]
    )
    assert done == [1, 1]


def test_a_member_that_has_closed_a_schedule_does_not_block_a_join():
    """Python may collect an optimizer before a join on some ranks, and after it on others."""
    first, second = schedules(2)
    meet(first, second)
    second.close()
    first.leave()
    first.finish_leaving()
    first.come_back()
    second.leave()
    second.finish_leaving()
    second.come_back()


def test_a_leaving_member_may_check_other_hosts_meanwhile():
    """This happens when it notifies a host that has already closed the schedule."""
    (schedule,) = schedules(1)
    told = []

    class Link:
        def leave(self, *, tell):
            schedule.look_beyond(lambda key: [0])
            told.append(tell)

        def close(self):
            pass

    schedule.link = Link()
    schedule.leave()
    schedule.finish_leaving()
    assert told == [True]
