"""Repeated calls as one function in C (`calls.c`): a queue with a single member, which never waits."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from hora.engine.negotiation.shared_memory import SharedMemoryNegotiation
from hora.engine.plan import BatchPlanner
from hora.engine.queue import OperationQueue, QueueWorld
from hora.engine.repeated import KnownAllreduce, KnownAllreduces, RepeatedCalls
from hora.engine.request import CollectiveCall, Kind, Reduce, Request
from hora.engine.shm.native import SHORT_BYTES, absence, library
from hora.engine.shm.segment import Segment
from hora.engine.status import TimelineRecorder, WorldStatus
from hora.engine.transport.base import Membership
from hora.engine.transport.shm import LARGE_SLOT_BYTES, ShmTransport
from hora.telemetry.meters import meter
from hora.torch.process_sets import global_process_set

pytestmark = pytest.mark.skipif(library() is None, reason=f"no native part: {absence()}")

LONG = SHORT_BYTES // 4 + 1


class Alone:
    """A queue of one member, and its plans."""

    def __init__(self) -> None:
        status = WorldStatus(0, tell=lambda reason: None, wake=lambda: None)
        world = QueueWorld(0, status, TimelineRecorder(0), lambda batch: 0, lambda: None, None)
        segment = Segment.create(SharedMemoryNegotiation.num_bytes(1))
        self.queue = OperationQueue(
            0,
            [0],
            world,
            negotiation=SharedMemoryNegotiation(segment, 0, 1, cache_capacity=64),
            planner=BatchPlanner([0], fusion_threshold_bytes=0),
            stall=None,
            make_transport=lambda devices: ShmTransport(Segment.create, Membership(0, 1, lambda: None)),
        )
        self.slots = self.queue.transport().slots
        self.path = RepeatedCalls(self.queue, self.queue.negotiation)
        self.known = KnownAllreduces()

    def plan(self, tensor, name="x"):
        call = CollectiveCall(Kind.ALLREDUCE, name, Reduce())
        return self.path.plan(self.queue.validator.request(call, [tensor], None).signature)

    @property
    def is_free(self) -> bool:
        queue = self.queue
        return not (queue._exclusive or queue.driver or queue.driving.locked() or queue.in_flight)


@pytest.fixture
def alone():
    found = Alone()
    yield found
    found.queue.close()


def carry_out(alone, tensor, name="x", wait=None):
    out = torch.empty_like(tensor)
    done = alone.path._carry_out(alone.plan(tensor, name).parts, tensor, out, wait, None)
    assert not done or torch.equal(out, tensor)
    return done


@pytest.mark.parametrize("count", [1, LONG, LARGE_SLOT_BYTES])
def test_a_call_is_counted_and_leaves_the_queue_free(alone, count):
    tensor, before = torch.rand(count), (meter.num_bytes, meter.reduce_s, meter.transport_s)
    alone.slots.make_room(tensor.nbytes)
    step, ticket = alone.slots.step, alone.path.calls.next_ticket
    assert carry_out(alone, tensor) is True
    assert alone.is_free
    assert alone.slots.step > step
    assert alone.path.calls.next_ticket == ticket + 1
    assert (alone.path.calls.num_done, alone.path.calls.num_void) == (1, 0)
    assert meter.num_bytes == before[0] + tensor.nbytes
    assert meter.reduce_s > before[1]
    assert meter.transport_s > before[2]


def test_unnamed_calls_have_running_numbers(alone):
    for number in range(3):
        assert carry_out(alone, torch.ones(2), None)
        assert alone.queue.numbers == {"allreduce": number + 1}
        assert alone.queue.planner.unnamed == {"allreduce": number + 1}
    alone.queue.numbers = {"allreduce": 2**32 - 1}  # replaced, as after a join
    alone.queue.planner.unnamed["allreduce"] = 2**32 - 1
    assert carry_out(alone, torch.ones(2), None)
    assert alone.queue.numbers == alone.queue.planner.unnamed == {"allreduce": 0}


def _busy(alone):
    alone.queue.in_flight["allreduce", "y"] = Request(alone.plan(torch.ones(1), "y").signature)


@pytest.mark.parametrize(
    "hinder",
    [
        _busy,
        lambda alone: alone.queue.planner.joined.add(0),
        lambda alone: alone.queue.planner._pending.update(x=None),
        lambda alone: setattr(alone.queue.planner, "on_arrival", print),
        lambda alone: setattr(alone.queue.recorder, "timeline", object()),
        lambda alone: alone.queue.status.close("the end"),
        lambda alone: setattr(alone.queue, "stopping", True),
        lambda alone: setattr(alone.path.calls, "void_ticket", alone.path.calls.next_ticket),
        lambda alone: alone.queue.driving.acquire(),
        lambda alone: alone.queue.lock.acquire(),
    ],
    ids=[
        "in_flight",
        "joined",
        "pending",
        "arrivals",
        "timeline",
        "closing",
        "stopping",
        "void",
        "driven",
        "submitting",
    ],
)
@pytest.mark.parametrize("count", [1, LONG])
def test_a_call_takes_the_ordinary_path_if_anything_else_goes_on(alone, hinder, count):
    hinder(alone)
    assert carry_out(alone, torch.ones(count), None) is False
    assert not alone.queue._exclusive
    assert alone.path.calls.num_done == alone.path.calls.num_void == 0
    alone.queue.in_flight.clear()
    for lock in (alone.queue.driving, alone.queue.lock):
        if lock.locked():
            lock.release()


def test_a_plan_follows_its_ring(alone):
    tensor, out = torch.rand(LARGE_SLOT_BYTES // 4), torch.zeros(LARGE_SLOT_BYTES // 4)
    plan = alone.plan(tensor)
    assert not alone.path.carry_out(plan, tensor, out)
    alone.slots.make_room(tensor.nbytes)
    assert alone.path.carry_out(plan, tensor, out)
    assert torch.equal(out, tensor)


@pytest.mark.parametrize("count", [1, LONG])
def test_a_call_that_finds_news_waits_in_the_lane(alone, count):
    tensor, waited = torch.rand(count), []
    alone.queue.negotiation.announce(alone.plan(torch.ones(1), "other").signature, 0)
    assert carry_out(alone, tensor, wait=waited.append) is None
    (request,) = waited
    assert list(alone.queue.lane) == [request]
    assert list(alone.queue.in_flight.values()) == [request]
    assert not alone.queue.driving.locked()
    alone.queue.go_on_now()
    assert alone.path.calls.num_void == 1
    assert not alone.queue.lane, "announced instead"


def test_an_error_of_the_tensor_comes_before_anything_else(alone):
    class Odd(torch.Tensor):
        def data_ptr(self):
            raise RuntimeError("it has no memory")

    tensor = torch.ones(3)
    plan, odd = alone.plan(tensor), tensor.as_subclass(Odd)
    with pytest.raises(RuntimeError, match="no memory"):
        alone.path.carry_out(plan, odd, odd)
    assert alone.is_free
    assert alone.path.carry_out(plan, tensor, tensor)


def test_an_interrupted_call_is_left_in_the_lane(alone):
    """A signal handler runs, at the earliest, as Python goes on with a call that the others have not made."""
    tensor, waited, told = torch.ones(3), [], []
    alone.queue.negotiation.announce(alone.plan(torch.ones(1), "other").signature, 0)
    plan = alone.plan(tensor)
    go_on = plan.go_on

    def interrupted(call, *details):
        told.append(details)
        if len(told) == 1:
            raise KeyboardInterrupt
        go_on(call, *details)

    plan.go_on = interrupted
    with pytest.raises(KeyboardInterrupt):
        alone.path.carry_out(plan, tensor, tensor, waited.append)
    assert told == [(), (True,)]
    assert not waited
    assert len(alone.queue.lane) == len(alone.queue.in_flight) == 1
    assert not alone.queue.driving.locked()


def test_a_long_call_announces_what_other_threads_have_submitted_meanwhile(alone):
    plan, tensor = alone.plan(torch.ones(LONG)), torch.ones(LONG)
    other = Request(alone.plan(torch.ones(1), "other").signature, [torch.ones(1)])
    alone.queue._kept_back.append(other)
    assert alone.path.carry_out(plan, tensor, tensor)
    assert not alone.queue._kept_back
    assert not alone.queue._exclusive
    assert not alone.queue.driving.locked()


def _arguments(tensor, name="x", op=1):
    return tensor, name, op, 1.0, 1.0, global_process_set


def test_what_is_known_is_found_by_what_a_call_looks_like(alone):
    known, tensor = alone.known, torch.ones(3)
    key = known.find(*_arguments(tensor))
    assert known.repeat(*_arguments(tensor)) == key
    plan = alone.plan(tensor)
    found = KnownAllreduce(alone.queue, plan.signature)
    known.add(key, found)
    assert known.find(*_arguments(torch.zeros(3))) is found
    assert known.repeat(*_arguments(tensor)) is found, "no plan yet"
    found.plan, found.parts = plan, plan.parts
    assert known.repeat(*_arguments(tensor)) is True
    alone.queue.driving.acquire()
    assert known.repeat(*_arguments(tensor)) is False
    alone.queue.driving.release()
    for other in [
        _arguments(torch.ones(4)),
        _arguments(tensor.double()),
        _arguments(tensor, "y"),
        _arguments(tensor, op=True),
        _arguments(tensor, op=1.0),
        _arguments(tensor, None),
    ]:
        assert type(known.repeat(*other)) is tuple


@pytest.mark.parametrize(
    "call",
    [
        (3,),
        _arguments(None),
        _arguments(3.0),
        _arguments(torch.nn.Parameter(torch.ones(3))),
        _arguments(torch.ones(3, requires_grad=True)),
        _arguments(torch.ones(4)[::2]),
        _arguments(torch.ones(3).to_sparse()),
        _arguments(torch.ones(3, dtype=torch.complex64).conj().imag),
        _arguments(torch.ones(3, device="meta")),
        _arguments(torch.ones(3), ["unhashable"]),
        (torch.ones(3), "x", 1, 1.0, 1.0, "no set"),
    ],
)
def test_a_call_that_the_engine_cannot_repeat_is_unknown(alone, call):
    assert alone.known.repeat(*call) is None
    assert alone.known.find(*call) is None


def test_tensors_of_inference_mode_are_unknown(alone):
    with torch.inference_mode():
        tensor = torch.ones(3)
        assert alone.known.find(*_arguments(tensor)) is None
    assert alone.known.find(*_arguments(tensor)) is None


@pytest.mark.parametrize("count", [1, LONG])
def test_calls_keep_no_references(alone, count):
    tensor, name = torch.ones(count), "a name of its own"
    plan = alone.plan(tensor, name)
    key = alone.known.find(*_arguments(tensor, name))
    found = KnownAllreduce(alone.queue, plan.signature, plan, plan.parts)
    alone.known.add(key, found)
    objects = [tensor, name, found, plan, plan.parts, key, alone.queue, None, True, False, global_process_set]

    def references():
        return [sys.getrefcount(each) for each in objects]

    before = references()
    for _ in range(1000):
        assert alone.known.repeat(*_arguments(tensor, name)) is True
        assert alone.known.find(*_arguments(tensor, name)) is found
        assert alone.path.carry_out(plan, tensor, tensor)
    assert all(abs(now - then) < 100 for now, then in zip(references(), before, strict=True))


def test_threads_that_call_at_once_get_their_turns(alone):
    plan, tensors = alone.plan(torch.ones(LONG)), [torch.ones(LONG) for _ in range(4)]
    counts = []

    def run(tensor):
        counts.append(sum(alone.path.carry_out(plan, tensor, tensor) for _ in range(300)))

    threads = [threading.Thread(target=run, args=(tensor,)) for tensor in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) == alone.path.calls.num_done > 0
    assert alone.is_free
