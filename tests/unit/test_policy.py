"""Decisions about a job of fixed size, made without processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hora.launch.controller.policy import (
    LINGER_LIMIT_S,
    LOST_LIMIT_S,
    ROOT_CAUSE_WAIT_S,
    Begin,
    Decision,
    EndJob,
    Facts,
    Fail,
    Failure,
    FixedSize,
    GiveUp,
    Wait,
    Worker,
    WorkerState,
    silent_at_the_end,
)
from hora.launch.preload import modules_to_preload

PLACES = (("a", 0), ("a", 1), ("b", 0))


def decide(facts: Facts, now: float, *, needs_results: bool = True) -> Decision:
    return FixedSize(PLACES, needs_results=needs_results, start_timeout_s=30.0).decide(facts, now)


def workers(**of_all: object) -> list[Worker]:
    found = [
        Worker(number=number, host=host, slot=slot, state=WorkerState.WORKING, generation=0, first_generation=0)
        for number, (host, slot) in enumerate(PLACES)
    ]
    return [replace(worker, **of_all) for worker in found]


def but(facts: Facts, changes: dict[int, dict[str, object]]) -> Facts:
    """Return the facts with changes to some workers."""
    return replace(facts, workers=[replace(w, **changes.get(w.number, {})) for w in facts.workers])


BEGUN = Facts(generation=0, workers=workers())
STARTED = Facts(generation=0, workers=workers(started=True))
RUNNING = Facts(generation=0, workers=workers(started=True, joined=True))
SUCCESS = {"state": WorkerState.SUCCEEDED, "exited": True}


def test_a_job_begins_with_all_its_slots():
    assert decide(Facts(), 0.0) == Begin(PLACES)


def test_workers_may_connect_until_the_start_deadline():
    assert decide(STARTED, 1.0) == Wait(30.0)
    assert decide(replace(STARTED, begun_at=5.0), 30.0) == Wait(35.0)


def test_a_complete_job_runs_without_limit():
    assert decide(RUNNING, 1e6) == Wait(None)


def test_workers_that_do_not_connect_in_time_end_the_job_and_are_named():
    decision = decide(but(BEGUN, {1: {"joined": True}}), 30.0)
    assert isinstance(decision, GiveUp)
    assert decision.message.startswith("Timed out waiting for 2 of 3 processes to connect")
    assert "[0, 2]" in decision.message
    assert decision.message.endswith("Timeout after 30 seconds.")


def test_a_worker_that_stays_disconnected_ends_the_job():
    cut_off = but(RUNNING, {1: {"lost_at": 50.0}})
    assert decide(cut_off, 51.0) == Wait(50.0 + LOST_LIMIT_S)  # it may reconnect
    decision = decide(cut_off, 50.0 + LOST_LIMIT_S)
    assert isinstance(decision, Fail)
    assert decision.failure is not None
    assert (decision.failure.worker, decision.failure.reason) == (1, "its connection to the launcher was lost")
    assert decide(cut_off, 999.0, needs_results=False) == Wait(None)  # for a command, only the exit status counts


def test_commands_need_not_connect():
    assert decide(STARTED, 1e6, needs_results=False) == Wait(None)
    decision = decide(BEGUN, 30.0, needs_results=False)
    assert isinstance(decision, GiveUp)
    assert decision.message.startswith("Timed out waiting for 3 of 3 processes to start")


def test_a_finished_command_is_not_missing():
    assert decide(but(STARTED, {2: {"started": False, **SUCCESS}}), 1e6, needs_results=False) == Wait(None)


def test_a_job_ends_when_all_workers_have_succeeded():
    assert decide(but(RUNNING, {0: SUCCESS, 1: SUCCESS, 2: SUCCESS}), 5.0) == EndJob()
    assert decide(but(RUNNING, {0: SUCCESS, 1: SUCCESS}), 5.0) == Wait(None)


def test_a_process_that_lingers_after_the_last_result_does_not_delay_the_results():
    at = {0: 1.0, 1: 5.0, 2: 2.0}
    returned = but(RUNNING, {n: {"state": WorkerState.SUCCEEDED, "since": since} for n, since in at.items()})
    returned = but(returned, {0: {"exited": True}})
    assert decide(returned, 6.0) == Wait(5.0 + LINGER_LIMIT_S)
    assert decide(returned, 5.0 + LINGER_LIMIT_S) == EndJob()


def failure(worker: int, at: float, *, consequence: bool = False, blames: int | None = None) -> Failure:
    return Failure(worker=worker, at=at, code=1, consequence=consequence, blames=blames)


def test_a_silent_worker_is_named_once_others_have_ended_and_not_before():
    silent = but(STARTED, {1: {"silent_since": 10.0}})
    assert silent_at_the_end(silent, 1000.0, 60.0) == []  # all wait for it: the ranks' own stall report names it
    ended = but(silent, {0: {"state": WorkerState.SUCCEEDED, "since": 20.0}})
    assert silent_at_the_end(ended, 79.0, 60.0) == []
    assert silent_at_the_end(ended, 80.0, 60.0) == [1]


def test_the_first_failure_ends_the_job_at_once():
    first, second = failure(2, 1.0), failure(0, 1.1)
    assert decide(replace(RUNNING, failures=[first, second]), 1.2) == Fail(first)


def test_a_failure_while_exiting_after_the_result_is_a_failure():
    everything = but(RUNNING, {0: SUCCESS, 1: SUCCESS, 2: SUCCESS})
    assert decide(replace(everything, failures=[failure(1, 1.0)]), 1.2) == Fail(failure(1, 1.0))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_complaint_about_a_lost_peer_is_not_the_root_cause(order: tuple[int, int]):
    both = [failure(0, 1.0, consequence=True), failure(1, 1.1)]
    failures = [both[i] for i in order]
    assert decide(replace(RUNNING, failures=failures), 1.2) == Fail(both[1])


def test_the_root_cause_is_waited_for_briefly():
    facts = replace(RUNNING, failures=[failure(0, 1.0, consequence=True), failure(2, 1.5, consequence=True)])
    assert decide(facts, 1.6) == Wait(1.0 + ROOT_CAUSE_WAIT_S)
    assert decide(facts, 1.0 + ROOT_CAUSE_WAIT_S) == Fail(facts.failures[0])


def test_no_root_cause_is_waited_for_when_all_have_ended():
    facts = replace(RUNNING, failures=[failure(0, 1.0, consequence=True)])
    facts = but(facts, {0: {"state": WorkerState.FAILED, "exited": True}, 1: SUCCESS, 2: SUCCESS})
    assert decide(facts, 1.1) == Fail(facts.failures[0])


def test_a_worker_that_exited_early_is_the_root_cause_of_complaints_about_it():
    complaints = [failure(0, 1.0, consequence=True, blames=1), failure(2, 1.1, consequence=True, blames=1)]
    facts = replace(RUNNING, failures=complaints)
    assert decide(facts, 1.2) == Wait(1.0 + ROOT_CAUSE_WAIT_S)  # the controller has not seen its exit yet
    found = decide(but(facts, {1: SUCCESS}), 1.3)
    assert isinstance(found, Fail)
    assert found.failure is not None
    assert (found.failure.worker, found.failure.code) == (1, 1)
    assert "status 0, while rank 0 still needed it" in found.failure.reason
    other = decide(but(facts, {2: SUCCESS}), 1.0 + ROOT_CAUSE_WAIT_S)  # a worker that no complaint names
    assert other == Fail(complaints[0])


def test_a_worker_named_by_all_complaints_is_the_root_cause():
    complaints = [failure(0, 1.0, consequence=True, blames=2), failure(2, 1.1, consequence=True, blames=2)]
    facts = replace(RUNNING, failures=complaints)
    assert decide(facts, 1.0 + ROOT_CAUSE_WAIT_S) == Fail(complaints[1])


def test_workers_preload_the_modules_that_their_function_names():
    assert modules_to_preload(b"... import numpy ...") == ()
    assert modules_to_preload(b"... torch ...") == ("torch",)
    assert modules_to_preload(b"... torch ... horovod.torch ...") == ("torch", "horovod.torch")
    estimator = "hora.spark.estimator.training"
    assert modules_to_preload(f"... {estimator} ... torch ...".encode()) == ("torch", estimator)


def test_an_optimizer_preloads_more_of_torch():
    assert modules_to_preload(b"... torch ... optim ... SGD ...") == ("torch", "torch._dynamo")
    assert modules_to_preload(b"... optimizer ...") == ()


def test_workers_are_not_forked_if_their_function_sets_variables_that_torch_reads_at_import():
    assert modules_to_preload(b"... OMP_NUM_THREADS ... torch ...") is None
