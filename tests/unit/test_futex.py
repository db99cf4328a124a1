"""Counters between threads of one process: publishing, sleeping, giving up, and learning when to spin."""

from __future__ import annotations

import mmap
import threading

import pytest

from hora.engine.shm import futex
from hora.engine.shm.futex import Counter
from hora.errors import HorovodInternalError


@pytest.fixture
def pair():
    """Two views of one word, as two processes would have."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    return Counter.at(memory, 64), Counter.at(memory, 64)


def wait(counter, target, check_alive=lambda: None, limit_s=30.0):
    counter.wait_for(target, check_alive=check_alive, limit_s=limit_s, what="member 3")


def once(action):
    """A liveness check that does this at its first call."""
    calls = []
    return lambda: calls.append(1) if calls else (calls.append(1), action())


def test_what_one_sets_the_other_sees(pair):
    owner, reader = pair
    owner.set(2**40 + 7)
    assert reader.value == 2**40 + 7
    wait(reader, 2**40)
    owner.store(3)
    assert reader.value == 3


def test_a_sleeper_is_woken_at_once(pair):
    owner, reader = pair
    waker = threading.Thread(target=owner.set, args=(1,))
    wait(reader, 1, once(waker.start))  # the liveness check is called when looking was in vain, before the first sleep
    assert reader.value == 1
    waker.join()


def test_a_sleeper_goes_on_sleeping_until_its_target_is_reached(pair):
    owner, reader = pair
    wakers = [threading.Thread(target=owner.set, args=(value,)) for value in (1, 2, 3)]
    wait(reader, 3, lambda: wakers[reader.value].start() if not wakers[reader.value].ident else None)
    assert reader.value == 3
    for waker in wakers:
        waker.join()


def test_wait_beyond_returns_on_change_and_after_a_while_without_one(pair):
    owner, reader = pair
    reader.wait_beyond(0)
    owner.set(5)
    reader.wait_beyond(0)


def test_the_guard_ends_a_wait(pair):
    calls = []

    def check_alive():
        calls.append(1)
        if len(calls) == 3:  # it has slept twice
            raise HorovodInternalError("rank 3 died")

    with pytest.raises(HorovodInternalError, match="rank 3 died"):
        wait(pair[1], 1, check_alive)


def test_a_limit_ends_a_wait_and_says_what_was_waited_for(pair):
    pair[0].set(4)
    with pytest.raises(TimeoutError, match=r"waited 0\.1 s for member 3 \(at 4, needs 5\)"):
        wait(pair[1], 5, limit_s=0.1)


def test_short_sleeps_make_it_look_longer_and_vain_looks_shorter(pair):
    reader = pair[1]
    for _ in range(futex._LEAST_PATIENCE - 1):
        reader.learn(futex._SOON_S / 2)
    assert reader._looks == futex._FEW_LOOKS
    reader.learn(futex._SOON_S / 2)
    assert reader._looks == futex._MANY_LOOKS

    reader.learn(1.0)
    reader.learn(1.0)
    pair[0].set(1)
    wait(reader, 1)  # found while looking: the misses before don't count any more
    reader.learn(1.0)
    reader.learn(1.0)
    assert reader._looks == futex._MANY_LOOKS
    reader.learn(1.0)
    assert reader._looks == futex._FEW_LOOKS

    for _ in range(2 * futex._LEAST_PATIENCE - 1):
        reader.learn(futex._SOON_S / 2)
    assert reader._looks == futex._FEW_LOOKS
    reader.learn(2 * futex._SOON_S)  # a long sleep begins the count anew
    for _ in range(2 * futex._LEAST_PATIENCE):
        reader.learn(futex._SOON_S / 2)
    assert reader._looks == futex._MANY_LOOKS


def test_this_machine_is_supported_or_says_so():
    import platform

    assert futex.supported() == (platform.machine() in ("x86_64", "aarch64"))
