"""Decisions about a job, without any process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hora.launch.control.policy import (
    LINGER_LIMIT_S,
    ROOT_CAUSE_WAIT_S,
    Facts,
    Fail,
    Failure,
    Finish,
    GiveUp,
    Wait,
    decide,
    modules_to_preload,
)

BEGUN = Facts(num_workers=3, needs_results=True, start_deadline=30.0, start_timeout_s=30.0)
RUNNING = replace(BEGUN, started=frozenset({0, 1, 2}), joined=frozenset({0, 1, 2}))


def test_waits_until_the_start_deadline_for_workers_to_connect():
    assert decide(replace(BEGUN, started=frozenset({0, 1, 2})), 1.0) == Wait(30.0)


def test_waits_without_limit_once_all_are_there():
    assert decide(RUNNING, 1e6) == Wait(None)


def test_gives_up_on_workers_that_do_not_connect_and_names_them():
    decision = decide(replace(BEGUN, joined=frozenset({1})), 30.0)
    assert isinstance(decision, GiveUp)
    assert decision.message.startswith("Timed out waiting for 2 of 3 processes to connect")
    assert "[0, 2]" in decision.message
    assert decision.message.endswith("Timeout after 30 seconds.")


def test_commands_need_not_connect():
    facts = replace(BEGUN, needs_results=False, started=frozenset({0, 1, 2}))
    assert decide(facts, 1e6) == Wait(None)


def test_a_command_that_is_over_already_is_not_missing():
    facts = replace(BEGUN, needs_results=False, started=frozenset({0, 1}), exited={2: 0})
    assert decide(facts, 1e6) == Wait(None)


def test_finishes_when_everybody_has_ended_well():
    assert decide(replace(RUNNING, exited={0: 0, 1: 0, 2: 0}), 5.0) == Finish()
    assert decide(replace(RUNNING, exited={0: 0, 1: 0}), 5.0) == Wait(None)


def test_a_process_that_lingers_after_the_last_result_does_not_keep_the_results():
    returned = replace(RUNNING, returned_at={0: 1.0, 1: 5.0, 2: 2.0}, exited={0: 0})
    assert decide(returned, 6.0) == Wait(5.0 + LINGER_LIMIT_S)
    assert decide(returned, 5.0 + LINGER_LIMIT_S) == Finish()


def failure(worker: int, at: float, *, consequence: bool = False) -> Failure:
    return Failure(worker=worker, at=at, code=1, consequence=consequence)


def test_the_first_failure_ends_the_job_at_once():
    first, second = failure(2, 1.0), failure(0, 1.1)
    assert decide(replace(RUNNING, failures=[first, second]), 1.2) == Fail(first)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_complaint_about_a_lost_peer_is_not_the_root_cause(order: tuple[int, int]):
    both = [failure(0, 1.0, consequence=True), failure(1, 1.1)]
    failures = [both[i] for i in order]
    assert decide(replace(RUNNING, failures=failures), 1.2) == Fail(both[1])


def test_waits_a_moment_for_the_root_cause_then_takes_what_there_is():
    facts = replace(RUNNING, failures=[failure(0, 1.0, consequence=True), failure(2, 1.5, consequence=True)])
    assert decide(facts, 1.6) == Wait(1.0 + ROOT_CAUSE_WAIT_S)
    assert decide(facts, 1.0 + ROOT_CAUSE_WAIT_S) == Fail(facts.failures[0])


def test_does_not_wait_for_a_root_cause_when_nobody_is_left():
    facts = replace(RUNNING, failures=[failure(0, 1.0, consequence=True)], exited={0: 1, 1: 0, 2: 0})
    assert decide(facts, 1.1) == Fail(facts.failures[0])


def test_workers_are_forked_with_what_their_function_names():
    assert modules_to_preload(b"... import numpy ...") == ()
    assert modules_to_preload(b"... torch ...") == ("torch",)
    assert modules_to_preload(b"... torch ... horovod.torch ...") == ("torch", "horovod.torch")


def test_workers_are_started_afresh_where_their_function_sets_what_torch_reads_while_it_is_loaded():
    assert modules_to_preload(b"... OMP_NUM_THREADS ... torch ...") is None
