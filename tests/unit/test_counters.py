"""Counters between threads of one process: publishing, sleeping, timeouts, and when to spin."""

from __future__ import annotations

import mmap
import threading

import pytest

from hora.engine.shm import counters
from hora.engine.shm.counters import Counter
from hora.engine.shm.native import absence, library
from hora.errors import HorovodInternalError

pytestmark = pytest.mark.skipif(library() is None, reason=f"no native part: {absence()}")


@pytest.fixture
def pair():
    """Two views of one word, as two processes have them."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    return Counter(memory, 64), Counter(memory, 64)


def wait(counter, target, check_alive=lambda: None):
    counter.wait_for(target, check_alive=check_alive, what="member 3")


def once(action):
    """Return a liveness check that runs `action` at its first call."""
    calls = []
    return lambda: calls.append(1) if calls else (calls.append(1), action())


def test_one_view_sees_the_values_set_by_the_other(pair):
    owner, reader = pair
    owner.set(2**40 + 7)
    assert reader.value == 2**40 + 7
    wait(reader, 2**40)
    owner.store(3)
    assert reader.value == 3


def test_a_sleeper_is_woken_at_once(pair):
    owner, reader = pair
    waker = threading.Thread(target=owner.set, args=(1,))
    wait(reader, 1, once(waker.start))  # the liveness check is called after spinning fails, before the first sleep
    assert reader.value == 1
    waker.join()


def test_a_sleeper_wakes_only_when_its_target_is_reached(pair):
    owner, reader = pair
    wakers = [threading.Thread(target=owner.set, args=(value,)) for value in (1, 2, 3)]
    wait(reader, 3, lambda: wakers[reader.value].start() if not wakers[reader.value].ident else None)
    assert reader.value == 3
    for waker in wakers:
        waker.join()


def test_wait_beyond_returns_on_a_change_or_after_a_limit(pair):
    owner, reader = pair
    reader.wait_beyond(0)
    owner.set(5)
    reader.wait_beyond(0)


def test_the_liveness_check_ends_a_wait(pair):
    calls = []

    def check_alive():
        calls.append(1)
        if len(calls) == 3:  # the wait has slept twice
            raise HorovodInternalError("rank 3 died")

    with pytest.raises(HorovodInternalError, match="rank 3 died"):
        wait(pair[1], 1, check_alive)


def test_a_limit_ends_a_wait_and_says_what_was_waited_for(pair, monkeypatch):
    monkeypatch.setattr(counters, "COLLECTIVE_LIMIT_S", 0.1)
    pair[0].set(4)
    with pytest.raises(TimeoutError, match=r"waited 0\.1 s for member 3 \(at 4, needs 5\)"):
        wait(pair[1], 5)


def test_a_fruitless_wait_does_not_extend_spinning(pair):
    reader = pair[1]
    for _ in range(6):
        reader.wait_beyond(0)
    assert (reader._policy.looks, reader._policy.tally) == (30, 0)
