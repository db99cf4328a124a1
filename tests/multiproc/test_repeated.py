"""The fast path of repeated blocking allreduces (`hora.engine.repeated`): when it is taken and when it is left."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import threading
import time
import traceback

import numpy as np
import pytest
import torch

import horovod.torch as hvd
from hora import engine
from hora.engine.shm.native import absence, library
from hora.errors import HorovodInternalError
from waiting import wait_until

pytestmark = pytest.mark.skipif(library() is None, reason=f"no native part: {absence()}")

SHAPES = [(), (7,), (3, 5), (16384,), (300_000,)]  # the last one is too large for staging


class Counts:
    """The numbers of calls that took the fast path, and that tried it in vain."""

    def __init__(self, sets) -> None:
        self._paths = [each.repeated for each in sets._sets.values() if each.repeated is not None]

    @property
    def taken(self) -> int:
        return sum(path.calls.num_done for path in self._paths)

    @property
    def void(self) -> int:
        return sum(path.calls.num_void for path in self._paths)


@contextlib.contextmanager
def running(**options):
    """Run a session in which repeated allreduces are counted."""
    hvd.init(**options)
    try:
        yield Counts(engine.current_runtime().sets)
        hvd.barrier()
    finally:
        hvd.shutdown()


def ones(count=5):
    return torch.ones(count, dtype=torch.float64)


@pytest.mark.ranks(2, 3)
def test_repeated_operations_take_the_fast_path_with_equal_results():
    with running() as counts:
        rank, size, kinds = hvd.rank(), hvd.size(), 0
        for shape in SHAPES:
            for dtype, op in [(torch.float32, hvd.Average), (torch.float16, hvd.Average), (torch.int64, hvd.Sum)]:
                for name in (None, "named"):
                    whole = torch.arange(torch.Size(shape).numel() * size) % 11
                    mine = whole.reshape(size, *shape)[rank].to(dtype)
                    results = [hvd.allreduce(mine, op=op, name=name) for _ in range(3)]
                    inside = mine.clone()
                    version, kinds = inside._version, kinds + 1
                    assert hvd.allreduce_(inside, op=op, name=name) is inside
                    assert inside._version > version
                    for result in (*results[1:], inside):
                        assert torch.equal(result, results[0])
                        assert result.shape == shape
        # The first call is negotiated, and so is one during the control tree's inspection of the queue, once a second.
        assert counts.taken >= 2 * kinds
        assert counts.taken + counts.void <= 3 * kinds


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.ranks(2)
def test_the_fast_path_divides_an_average_like_the_ordinary_one(dtype):
    """Only extreme values show the difference: shares are added, so nothing overflows."""
    limits = torch.finfo(dtype)
    with running() as counts:
        mine = torch.tensor([limits.max, -limits.max, limits.tiny * 1.5, hvd.rank() + 0.5], dtype=dtype)
        asynchronous = hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Average, name="a"))
        results = [hvd.allreduce(mine, op=hvd.Average, name="a") for _ in range(3)]
        assert asynchronous.tolist() == [limits.max, -limits.max, limits.tiny * 1.5, 1.0]
        assert all(torch.equal(result, asynchronous) for result in results)
        assert counts.taken


@pytest.mark.ranks(2)
def test_a_factor_that_the_program_changes_in_place():
    """A tensor or an array as factor: each call uses the value of its own time."""
    with running():
        for factor in (torch.tensor(1.0), np.array(1.0)):
            for number in range(9):
                if number % 3 == 2:
                    factor *= 0.5
                for name in ("prescale_factor", "postscale_factor"):
                    scaled = {"op": hvd.Sum, name: factor}
                    found = [
                        hvd.allreduce(ones(), **scaled),
                        hvd.allreduce_(ones(), **scaled),
                        hvd.synchronize(hvd.allreduce_async_(ones(), **scaled)),
                    ]
                    for result in found:
                        assert result.tolist() == [hvd.size() * float(factor)] * 5
        op = torch.tensor(hvd.Sum)
        for wanted in (hvd.Sum, hvd.Sum, hvd.Sum, hvd.Max, hvd.Max):
            op.fill_(wanted)
            assert hvd.allreduce(ones(), op=op).tolist() == [hvd.size() if wanted == hvd.Sum else 1] * 5


@pytest.mark.ranks(2, 3)
def test_the_fast_path_is_taken_again_after_another_operation():
    with running() as counts:
        size = hvd.size()
        for step in range(30):
            tensor = ones()
            if step % 3 == 1 and hvd.rank() == size - 1:  # this rank submits another operation first
                other = hvd.allreduce_async(ones(), name="other", op=hvd.Sum)
                hvd.allreduce_(tensor, name="lone", op=hvd.Sum)
                assert hvd.synchronize(other)[0] == size
            else:
                hvd.allreduce_(tensor, name="lone", op=hvd.Sum)
                if step % 3 == 1:
                    assert hvd.allreduce(ones(), name="other", op=hvd.Sum)[0] == size
            assert tensor.tolist() == [size] * 5
        assert counts.taken >= 5


@pytest.mark.ranks(2, 3)
def test_a_mismatch_is_an_error_on_all_ranks_which_then_continue():
    with running() as counts:
        rank, size = hvd.rank(), hvd.size()
        for count in (5, 6):
            hvd.allreduce(ones(count), name="same", op=hvd.Sum)
        for _ in range(2):
            with pytest.raises(
                HorovodInternalError, match=r"Mismatched ALLREDUCE tensor shapes: rank 0 has .5., rank 1"
            ):
                hvd.allreduce(ones(5 if rank == 0 else 6), name="same", op=hvd.Sum)
            for _ in range(3):
                assert hvd.allreduce(ones(5), name="same", op=hvd.Sum)[0] == size
        assert counts.taken >= 2


@pytest.mark.ranks(2, 3)
def test_a_repeated_call_does_not_block_another_threads_operation():
    """One thread of rank 0 waits in it; rank 0's main thread and the other ranks execute another operation first."""
    with running():
        size = hvd.size()
        for _ in range(2):
            hvd.allreduce(ones(), name="lone", op=hvd.Sum)
        for step in range(10):
            tensor = ones()
            if hvd.rank() == 0:
                thread = threading.Thread(target=hvd.allreduce_, args=(tensor,), kwargs={"name": "lone", "op": hvd.Sum})
                thread.start()
                handle = hvd.allreduce_async(ones(), name=f"first.{step}", op=hvd.Sum)
                assert hvd.synchronize(handle)[0] == size
                thread.join()
            else:
                assert hvd.allreduce(ones(), name=f"first.{step}", op=hvd.Sum)[0] == size
                hvd.allreduce_(tensor, name="lone", op=hvd.Sum)
            assert tensor.tolist() == [size] * 5


def _play(thread: str, steps, ranks_own: random.Random, wrong: list) -> None:
    """Run steps of one to three names: each rank submits them in its own order and waits for the last one or all."""
    size = hvd.size()
    for number, names in enumerate(steps):
        mine = list(names)
        ranks_own.shuffle(mine)
        value = float(number % 7 + 1)
        tensors = {name: torch.full((1 + 37 * int(name),), value) for name in mine}
        *early, last = mine
        handles = [hvd.allreduce_async_(tensors[name], name=f"{thread}{name}", op=hvd.Sum) for name in early]
        if ranks_own.random() < 0.8:
            hvd.allreduce_(tensors[last], name=f"{thread}{last}", op=hvd.Sum)
        else:
            handles.append(hvd.allreduce_async_(tensors[last], name=f"{thread}{last}", op=hvd.Sum))
        for handle in handles:
            hvd.synchronize(handle)
        wrong += [(number, name) for name in mine if set(tensors[name].tolist()) != {value * size}]
        if ranks_own.random() < 0.05:
            time.sleep(ranks_own.random() * 0.004)  # ranks are late now and then, as the test intends


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.ranks(2, 3, 4)
def test_random_mixtures_give_correct_results(num_threads):
    with running() as counts:
        for seed in range(3):
            agreed, wrong = random.Random(seed), []
            plays = []
            for thread in "ab"[:num_threads]:
                steps = [agreed.sample("0123", 1 if agreed.random() < 0.8 else 3) for _ in range(60)]
                own = random.Random(f"{seed} {thread} {hvd.rank()}")
                plays.append(threading.Thread(target=_play, args=(thread, steps, own, wrong)))
            for play in plays:
                play.start()
            for play in plays:
                play.join()
            assert not wrong
            hvd.join()
        if num_threads == 1:
            assert counts.taken


def _sleeps(group, peer) -> bool:
    return ctypes.c_int64.from_address(group.words + peer * group.stride + 120).value != 0


def _waiting(negotiation) -> int:
    """Return the number of ranks that wait in a repeated call."""
    return sum(signature is not None for row in negotiation.waiting_requests().values() for signature in row)


@pytest.mark.parametrize("size", [5, 300_000])  # staged or not
@pytest.mark.ranks(3, lost=(1,))
def test_ranks_waiting_in_a_repeated_call_notice_a_death(size):
    """A wait that ends only at its own limit would outlast the test."""
    hvd.init()
    for _ in range(3):
        hvd.allreduce(ones(size), name="lone", op=hvd.Sum)
    if hvd.rank() == 1:
        negotiation = engine.current_runtime().sets.queue(0).negotiation
        wait_until("the others wait", lambda: _waiting(negotiation) == 2)
        others = [peer for peer in range(hvd.size()) if peer != hvd.rank()]
        wait_until("they sleep", lambda: all(_sleeps(negotiation.tickets.group, peer) for peer in others))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(HorovodInternalError, match="rank 1") as caught:
        hvd.allreduce(ones(size), name="lone", op=hvd.Sum)
    assert "go_on" in {frame.name for frame in traceback.extract_tb(caught.tb)}
    hvd.shutdown()


@pytest.mark.ranks(3)
def test_process_sets_have_their_own_fast_paths():
    sets = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])]
    with running(process_sets=sets):
        for step in range(20):
            for each in sets:
                if each.included():
                    assert hvd.allreduce(ones(), name="x", op=hvd.Sum, process_set=each)[0] == 2, step
            assert hvd.allreduce(ones(), name="x", op=hvd.Sum)[0] == 3


@pytest.mark.parametrize("size", [5, 300_000])  # staged or not
@pytest.mark.parametrize("same", [True, False], ids=["the same", "something else first"])
@pytest.mark.ranks(2)
def test_ctrl_c_while_waiting_in_a_repeated_call_affects_no_rank(place, size, same):
    """As on the ordinary path, the request stays in flight, so it completes when the other rank calls it later."""
    hvd.init()
    queue = engine.current_runtime().sets.queue(0)
    queue.inspect = lambda: None  # an inspection of the queue would divert the call from the fast path
    negotiation = queue.negotiation
    for _ in range(3):
        hvd.allreduce(ones(size), name="lone", op=hvd.Sum)
    if hvd.rank() == 0:
        tensor = ones(size)
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)

        def interrupt():
            wait_until("this rank waits alone", lambda: _waiting(negotiation) == 1)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                hvd.allreduce_(tensor, name="lone", op=hvd.Sum)
        finally:
            signal.signal(signal.SIGALRM, before)
        thread.join()
        place.store.set("interrupted", "")
        if not same:
            assert hvd.allreduce(ones(), name="first", op=hvd.Sum)[0] == 2
        wait_until("the request is done", lambda: not queue.in_flight)
        assert tensor[0] == 2
    else:
        place.store.wait(["interrupted"])
        if not same:
            assert hvd.allreduce(ones(), name="first", op=hvd.Sum)[0] == 2
        assert set(hvd.allreduce(ones(size), name="lone", op=hvd.Sum).tolist()) == {2}
    for _ in range(3):
        assert hvd.allreduce(ones(size), name="lone", op=hvd.Sum)[-1] == 2
    hvd.barrier()
    hvd.shutdown()


@pytest.mark.ranks(2)
def test_ctrl_c_as_the_other_member_arrives_does_not_repeat_the_call(place):
    """The signal comes at any place of a call that has begun: before, while or after its data moves."""
    hvd.init()
    queue, tensor, num_interrupted = engine.current_runtime().sets.queue(0), ones(), 0
    negotiation = queue.negotiation
    for _ in range(3):
        hvd.allreduce_(ones(), name="lone", op=hvd.Sum)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    for step in range(60):
        if hvd.rank() == 0:

            def interrupt(step: int = step) -> None:
                wait_until("this rank waits alone", lambda: _waiting(negotiation) == 1 or queue.in_flight)
                place.store.set(f"waits {step}", "")
                time.sleep(0.0001 * (step % 8))
                signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

            thread = threading.Thread(target=interrupt)
            try:
                thread.start()
                hvd.allreduce_(tensor, name="lone", op=hvd.Sum)
                thread.join()
            except KeyboardInterrupt:
                num_interrupted += 1
                wait_until("the request is done", lambda: not queue.in_flight)
            thread.join()
        else:
            place.store.wait([f"waits {step}"])
            hvd.allreduce_(tensor, name="lone", op=hvd.Sum)
        assert tensor.tolist() == [2.0] * 5, step
        tensor.fill_(1.0)
    signal.signal(signal.SIGALRM, before)
    assert num_interrupted == (0 if hvd.rank() else 60)
    hvd.barrier()
    hvd.shutdown()


@pytest.mark.ranks(2)
def test_a_name_that_another_thread_waits_for_is_rejected_and_the_wait_continues(place):
    hvd.init()
    negotiation = engine.current_runtime().sets.queue(0).negotiation
    for _ in range(3):
        hvd.allreduce_(ones(), name="lone", op=hvd.Sum)
    tensor = ones()
    if hvd.rank() == 0:
        thread = threading.Thread(target=hvd.allreduce_, args=(tensor,), kwargs={"name": "lone", "op": hvd.Sum})
        thread.start()
        wait_until("the thread waits alone", lambda: _waiting(negotiation) == 1)
        with pytest.raises((ValueError, HorovodInternalError), match=r"same name as another tensor .* allreduce\.lone"):
            hvd.synchronize(hvd.allreduce_async(ones(), name="lone", op=hvd.Sum))
        place.store.set("refused", "")
        thread.join()
    else:
        place.store.wait(["refused"])
        hvd.allreduce_(tensor, name="lone", op=hvd.Sum)
    assert tensor.tolist() == [2.0] * 5
    hvd.barrier()
    hvd.shutdown()
