"""The decisions of an elastic job, made without processes: single steps, and whole random histories."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from hora.launch.controller.hosts import ElasticSpec, Hosts, parse_discovered
from hora.launch.controller.policy import (
    ADDED,
    LINGER_LIMIT_S,
    NEWCOMER_BATCH_WAIT_S,
    REMOVED,
    Begin,
    Decision,
    ElasticPolicy,
    End,
    EndJob,
    Facts,
    Fail,
    Failure,
    GiveUp,
    Limits,
    Notify,
    Publish,
    StartWorkers,
    Wait,
    Worker,
    WorkerState,
    WriteOff,
    assign,
    provisional,
)
from hora.launch.slots import HostInfo

STARTING, READY, WORKING, SUCCEEDED, FAILED, LEFT = WorkerState


@dataclass(kw_only=True)
class Case(Facts):
    """Facts about a job, and its limits."""

    limits: Limits


def decide(case: Case, now: float) -> Decision:
    return ElasticPolicy(case.limits).decide(case, now)


def hosts(text: str) -> dict[str, tuple[int, ...]]:
    """Parse hosts: `a:0-1 b:0` is host a with slots 0 and 1, host b with slot 0."""
    found: dict[str, tuple[int, ...]] = {}
    for item in text.split():
        name, _, slots = item.partition(":")
        first, _, last = slots.partition("-")
        found[name] = found.get(name, ()) + tuple(range(int(first), int(last or first) + 1))
    return found


def workers(*states: WorkerState, host: str = "a", generation: int = 0, first: int = 0) -> list[Worker]:
    """Return workers in slots 0, 1, … of a host; a starting one has no generation, a finished one has exited."""
    found = []
    for slot, state in enumerate(states):
        since = -1 if state is STARTING else generation
        found.append(
            Worker(
                number=first + slot,
                host=host,
                slot=slot,
                state=state,
                generation=since,
                first_generation=since,
                joined=state is not STARTING,
                exited=state in (SUCCEEDED, FAILED),
                written_off=state is FAILED,
            )
        )
    return found


def facts(members=(), *, where="a:0-2", generation=0, num_proc=3, min_num_proc=2, limits=None, **rest):
    limits = Limits(num_proc=num_proc, min_num_proc=min_num_proc, elastic_timeout_s=60, **(limits or {}))
    return Case(limits=limits, generation=generation, workers=tuple(members), hosts=hosts(where), **rest)


# ---- the start ------------------------------------------------------------------------------------------------------


def test_a_job_begins_as_soon_as_there_are_enough_slots():
    assert decide(facts(generation=-1, where="a:0-1"), 0) == Wait(60, waits_for_more=True)
    assert decide(facts(generation=-1, where="a:0-2"), 0) == Begin((("a", 0), ("a", 1), ("a", 2)))


def test_a_job_takes_all_slots_up_to_the_limit():
    assert decide(facts(generation=-1, where="a:0-2 b:0-2", limits={"max_num_proc": 4}), 0) == Begin(
        (("a", 0), ("a", 1), ("a", 2), ("b", 0))
    )


def test_too_few_slots_time_out():
    decision = decide(facts(generation=-1, where="a:0-1"), 60)
    assert isinstance(decision, GiveUp)
    for words in ("3 slots", "there are 2", "a:2", "--elastic-timeout", "Timeout after 60 seconds"):
        assert words in decision.message


# ---- failures -------------------------------------------------------------------------------------------------------


def test_survivors_continue_once_all_have_noticed_a_failure():
    members = workers(READY, FAILED, WORKING)
    assert isinstance(decide(facts(members, where="a:0 a:2"), 0), Wait)
    assert decide(facts(workers(READY, FAILED, READY), where="a:0 a:2"), 0) == Publish((0, 2))


def test_too_few_survivors_without_new_slots_fail():
    decision = decide(facts(workers(READY, FAILED, FAILED), where="a:0"), 0)
    assert isinstance(decision, Fail)
    assert "1 workers are left, but --min-np is 2" in decision.message


def test_too_few_survivors_wait_for_a_slot_to_return():
    short = facts(workers(READY, FAILED, FAILED), where="a:0", may_grow=True, short_since=5)
    assert decide(short, 10) == Wait(65, waits_for_more=True)
    assert isinstance(decide(short, 65), GiveUp)
    back = replace(short, hosts=hosts("a:0-1"))
    assert decide(back, 10) == StartWorkers((("a", 1),))
    booting = replace(back, workers=[*back.workers, Worker(number=3, host="a", slot=1, state=STARTING)])
    assert decide(booting, 10) == Wait(65, waits_for_more=True)
    arrived = replace(back, workers=[*back.workers, Worker(number=3, host="a", slot=1, state=READY)])
    assert decide(arrived, 10) == Publish((0, 3))


def test_a_starting_newcomer_does_not_delay_survivors():
    members = [*workers(READY, FAILED, READY), Worker(number=3, host="a", slot=1, state=STARTING)]
    assert decide(facts(members), 0) == Publish((0, 2))


def test_a_job_fails_when_all_workers_have_failed():
    failure = Failure(worker=1, at=0.0, code=1)
    assert decide(facts(workers(FAILED, FAILED, FAILED), where="", failures=[failure]), 0) == Fail(failure)
    newcomer = Worker(number=3, host="a", slot=1, state=READY)
    case = facts([*workers(FAILED, FAILED), newcomer], failures=[failure])
    assert decide(case, 0) == Fail(failure)  # the state is lost


def test_the_root_cause_is_reported_when_the_job_cannot_continue():
    complaint = Failure(worker=0, at=1.0, code=1, consequence=True)
    cause = Failure(worker=1, at=2.0, code=137)
    members = workers(FAILED, FAILED)
    assert decide(facts(members, failures=[complaint, cause]), 3) == Fail(cause, "")
    assert decide(facts(members, failures=[complaint]), 3) == Fail(complaint, "")


def test_failed_workers_are_written_off_first():
    members = workers(FAILED, READY, WORKING, FAILED)
    members[0] = replace(members[0], written_off=False)
    members[3] = replace(members[3], written_off=False, exited=False)
    assert decide(facts(members), 10**6) == WriteOff((0, 3))


def test_a_barred_host_loses_its_other_workers():
    members = workers(FAILED, WORKING) + workers(WORKING, WORKING, host="b", first=2)
    decision = decide(facts(members, where="b:0-1", barred=frozenset("a")), 0)
    assert isinstance(decision, End)
    assert (decision.workers, decision.failed) == ((1,), False)
    members = workers(FAILED, LEFT) + workers(READY, READY, host="b", first=2)
    assert decide(facts(members, where="b:0-1", barred=frozenset("a")), 0) == Publish((2, 3))


def test_the_reset_limit():
    members = workers(READY, FAILED, READY)
    assert isinstance(decide(facts(members, where="a:0 a:2", limits={"reset_limit": 1}), 0), Publish)
    for limit in (0, 1):
        decision = decide(facts(members, where="a:0 a:2", num_resets=limit, limits={"reset_limit": limit}), 0)
        assert isinstance(decision, Fail)
        assert f"number of resets during elastic job exceeded limit: {limit}" in decision.message


def test_a_worker_with_a_lost_connection_counts_as_dead_after_a_limit():
    members = workers(WORKING, WORKING)
    members[1] = replace(members[1], lost_at=100.0)
    assert decide(facts(members, where="a:0-1"), 101) == Wait(130)
    decision = decide(facts(members, where="a:0-1"), 130)
    assert isinstance(decision, End)
    assert (decision.workers, decision.failed) == ((1,), True)


def test_a_worker_that_does_not_stop_for_a_reset_is_ended_after_a_limit():
    limits = {"stuck_s": 50.0, "silent_s": 5.0}
    members = workers(READY, WORKING, WORKING)
    members[2] = replace(members[2], silent_since=3.0)
    assert decide(facts(members, limits=limits), 7) == Wait(8)
    decision = decide(facts(members, limits=limits), 8)
    assert isinstance(decision, End)
    assert (decision.workers, decision.failed) == ((2,), True)
    members[2] = replace(members[2], state=FAILED, written_off=True)
    assert decide(facts(members, where="a:0-1", limits=limits), 49) == Wait(50)
    assert decide(facts(members, where="a:0-1", limits=limits), 50).workers == (1,)


def test_silence_alone_is_tolerated_unless_a_limit_is_set():
    members = workers(WORKING, WORKING)
    members[0] = replace(members[0], silent_since=5.0)
    limits = {"stall_shutdown_s": 20.0}
    assert decide(facts(members, where="a:0-1", limits=limits), 24) == Wait(25)
    decision = decide(facts(members, where="a:0-1", limits=limits), 25)
    assert isinstance(decision, End)
    assert (decision.workers, decision.failed) == ((0,), True)


@pytest.mark.parametrize("other", [SUCCEEDED, READY])
def test_finished_and_new_workers_do_not_wait_for_a_silent_one_for_ever(other):
    """They do wait for one that answers: it may be writing a model, or commit once an epoch."""
    limits = {"stuck_s": 50.0, "silent_s": 5.0}
    members = workers(WORKING, other)
    if other is READY:
        members[1] = replace(members[1], generation=-1, first_generation=-1)
    at_work = decide(facts(members, where="a:0-1", notified=True, limits=limits), 10**6)
    assert at_work == Wait(None)
    members[0] = replace(members[0], silent_since=100.0)
    assert decide(facts(members, where="a:0-1", notified=True, limits=limits), 149) == Wait(150)
    decision = decide(facts(members, where="a:0-1", notified=True, limits=limits), 150)
    assert isinstance(decision, End)
    assert (decision.workers, decision.failed) == ((0,), True)


def test_a_ready_newcomer_does_not_wait_for_a_worker_that_never_joined():
    members = workers(WORKING, READY)
    members[0] = replace(members[0], joined=False)
    members[1] = replace(members[1], generation=-1, first_generation=-1, since=10.0)
    assert decide(facts(members, where="a:0-1", notified=True), 69) == Wait(70)  # elastic_timeout_s
    decision = decide(facts(members, where="a:0-1", notified=True), 70)
    assert isinstance(decision, End)
    assert (decision.workers, decision.failed) == ((0,), True)


def test_a_worker_that_must_connect_and_never_does_is_dropped():
    """A worker that runs a function connects first; a command may load its data before."""
    case = facts([replace(workers(WORKING)[0], joined=False, since=10.0)], where="a:0")
    assert decide(case, 10**6) == Wait(None)
    policy = ElasticPolicy(case.limits, needs_results=True)
    assert policy.decide(case, 69) == Wait(70)  # elastic_timeout_s
    decision = policy.decide(case, 70)
    assert isinstance(decision, End)
    assert (decision.workers, decision.failed) == ((0,), True)


def test_a_job_whose_last_workers_were_dismissed_fails_with_an_explanation():
    decision = decide(facts([replace(one, exited=True) for one in workers(LEFT, LEFT)], where="b:0"), 10)
    assert decision == Fail(None, decision.message)
    assert "no worker is left that has the state" in decision.message


def test_no_worker_is_stuck_while_none_waits():
    members = [replace(w, silent_since=0.0) for w in workers(WORKING, WORKING)]
    assert decide(facts(members, where="a:0-1"), 10**6) == Wait(None)


# ---- the end --------------------------------------------------------------------------------------------------------


def test_one_success_is_enough_once_no_worker_is_running():
    assert isinstance(decide(facts(workers(SUCCEEDED, WORKING)), 0), Wait)
    for other in (SUCCEEDED, READY, FAILED):
        assert decide(facts(workers(SUCCEEDED, other)), 0) == EndJob()


def test_a_process_that_lingers_after_its_success_does_not_delay_the_results():
    for other in (SUCCEEDED, READY, FAILED):
        members = [replace(worker, since=5.0) for worker in workers(SUCCEEDED, other)]
        members[0] = replace(members[0], exited=False)
        assert decide(facts(members), 6) == Wait(5 + LINGER_LIMIT_S)
        assert decide(facts(members), 5 + LINGER_LIMIT_S) == EndJob()


def test_no_worker_is_started_after_one_has_succeeded():
    assert decide(facts(workers(SUCCEEDED, WORKING), where="a:0-2"), 0) == Wait(None)


# ---- hosts join and leave -------------------------------------------------------------------------------------------


def test_newcomers_start_before_the_others_are_notified_once():
    members = workers(WORKING, WORKING)
    assert decide(facts(members, where="a:0-1 b:0-1"), 0) == StartWorkers((("b", 0), ("b", 1)))
    booting = [*members, *workers(STARTING, STARTING, host="b", first=2)]
    assert decide(facts(booting, where="a:0-1 b:0-1"), 0) == Wait(None)
    one = [*booting[:3], replace(booting[3], state=READY)]
    assert decide(facts(one, where="a:0-1 b:0-1"), 0) == Wait(NEWCOMER_BATCH_WAIT_S)
    assert decide(facts(one, where="a:0-1 b:0-1"), NEWCOMER_BATCH_WAIT_S) == Notify(ADDED)
    both = [*members, *(replace(w, state=READY) for w in booting[2:])]
    assert decide(facts(both, where="a:0-1 b:0-1"), 0) == Notify(ADDED)
    assert decide(facts(both, where="a:0-1 b:0-1", notified=True), 0) == Wait(None)
    stopped = [*workers(READY, READY), *both[2:]]
    assert decide(facts(stopped, where="a:0-1 b:0-1", notified=True), 0) == Publish((0, 1, 2, 3))


def test_the_workers_of_a_removed_host_leave():
    members = workers(WORKING, WORKING) + workers(WORKING, WORKING, host="b", first=2)
    assert decide(facts(members, where="b:0-1"), 0) == Notify(REMOVED)
    stopped = workers(READY, READY) + workers(READY, READY, host="b", first=2)
    assert decide(facts(stopped, where="b:0-1", notified=True), 0) == Publish((2, 3))


def test_a_host_is_replaced_in_one_step():
    members = workers(WORKING, WORKING) + workers(WORKING, WORKING, host="b", first=2)
    members += [replace(w, generation=-1, first_generation=-1) for w in workers(READY, READY, host="c", first=4)]
    assert decide(facts(members, where="b:0-1 c:0-1"), 0) == Notify(ADDED | REMOVED)


def test_removed_hosts_are_kept_while_too_few_would_remain():
    members = workers(WORKING, WORKING)
    assert decide(facts(members, where=""), 0) == Wait(None)
    assert decide(facts(members, where="a:0"), 0) == Wait(None)


def test_replaced_hosts_hand_the_state_over_and_then_leave():
    old, new = workers(WORKING, WORKING), workers(READY, host="b", first=2)
    booting = [replace(w, state=STARTING, generation=-1, first_generation=-1) for w in new]
    assert decide(facts([*old, *booting], where="b:0", min_num_proc=1), 0) == Wait(None), (
        "they train on until there is somebody"
    )
    loaded = [replace(w, generation=-1, first_generation=-1) for w in new]
    assert decide(facts([*old, *loaded], where="b:0", min_num_proc=1), 0) == Notify(ADDED)
    stopped = [*workers(READY, READY), *loaded]
    assert decide(facts(stopped, where="b:0", min_num_proc=1, notified=True), 0) == Publish((0, 1, 2))
    together = [replace(w, generation=1, state=WORKING) for w in [*old, *new]]
    assert decide(facts(together, where="b:0", min_num_proc=1, generation=1), 0) == Notify(REMOVED)
    handed_over = [replace(w, state=READY) for w in together]
    assert decide(facts(handed_over, where="b:0", min_num_proc=1, generation=1, notified=True), 0) == Publish((2,))


def test_handing_the_state_over_takes_two_workers_whatever_the_limit():
    loaded = [replace(w, generation=-1, first_generation=-1) for w in workers(READY, host="b", first=2)]
    assert decide(
        facts([*workers(READY, READY), *loaded], where="b:0", min_num_proc=1, limits={"max_num_proc": 1}), 0
    ) == Publish((0, 2))


def test_removed_hosts_continue_after_a_failure_if_only_they_have_the_state():
    left = workers(READY, READY, FAILED)
    left[2] = replace(left[2], written_off=True)
    assert decide(facts(left, where="b:0"), 0) == Publish((0, 1))


def test_newcomers_of_a_vanished_host_are_dismissed():
    members = workers(WORKING, WORKING) + workers(STARTING, host="b", first=2)
    assert decide(facts(members, where="a:0-1"), 0) == End((2,), "its host is barred or gone", failed=False)


def test_workers_stay_within_the_limit():
    limits = {"max_num_proc": 3}
    assert decide(facts(workers(WORKING, WORKING), where="a:0-1 b:0-3", limits=limits), 0) == StartWorkers((("b", 0),))
    assert decide(facts(workers(WORKING, WORKING, WORKING), where="a:0-3", limits=limits), 0) == Wait(None)


# ---- ranks ----------------------------------------------------------------------------------------------------------


def test_the_oldest_worker_is_rank_0_and_hosts_stay_together():
    members = workers(READY, READY, host="b", first=2) + workers(READY, host="a", first=5)
    members += workers(FAILED, FAILED, host="a", first=0)
    decision = decide(facts(members, where="a:0-1 b:0-1"), 0)
    assert decision == Publish((2, 3, 5))


def test_local_ranks_follow_slots_and_ranks_follow_age():
    members = [
        Worker(number=1, host="a", slot=1, state=READY),
        Worker(number=7, host="a", slot=0, state=READY),
        Worker(number=3, host="b", slot=4, state=READY),
    ]
    places = assign(members)
    assert [places[n].rank for n in (1, 7, 3)] == [0, 1, 2]
    assert [(places[n].local_rank, places[n].local_size) for n in (1, 7, 3)] == [(1, 2), (0, 2), (0, 1)]
    assert [(places[n].cross_rank, places[n].cross_size) for n in (1, 7, 3)] == [(0, 1), (0, 2), (1, 2)]
    assert {places[n].size for n in places} == {3}


def test_a_newcomer_knows_its_slot_and_that_it_is_not_rank_0():
    slot = provisional("a", 2, 4, num_ranks=3)
    assert (slot.rank, slot.size, slot.local_rank, slot.local_size) == (3, 4, 2, 4)
    assert provisional("a", 5, 4, num_ranks=3).local_size == 6  # the host has shrunk in the meantime


# ---- the blacklist --------------------------------------------------------------------------------------------------


def barring(cooldown_range: tuple[int, int] | None, chance: float) -> Hosts:
    spec = ElasticSpec(limits=Limits(num_proc=1, min_num_proc=1), cooldown_range=cooldown_range)
    return Hosts(spec, lambda: chance)


def test_without_a_cooldown_range_a_host_is_barred_for_ever():
    hosts = barring(None, 0.5)
    assert not hosts.is_barred("a", None, 0)
    assert hosts.bar_place(("a", None), 0) is None
    assert hosts.is_barred("a", None, 10**9)
    assert hosts.is_barred("a", 3, 10**9)
    assert not hosts.is_barred("b", 3, 0)
    assert hosts.next_return(0) is None


def test_the_cooldown_doubles_up_to_the_limit():
    hosts = barring((10, 100), 0.5)
    assert [hosts.bar_place(("a", None), 1000.0) for _ in range(5)] == [1025, 1045, 1085, 1100, 1100]
    assert hosts.is_barred("a", None, 1099.9)
    assert not hosts.is_barred("a", None, 1100)
    assert barring((10, 10), 0.9).bar_place(("a", None), 0) == 10


def test_a_single_slot_can_be_barred():
    hosts = barring((1, 5), 0.0)
    hosts.bar_place(("a", 1), 0.0)
    assert [hosts.is_barred("a", slot, 1.0) for slot in (0, 1)] == [False, True]
    assert not hosts.is_barred("a", None, 1.0)
    assert hosts.next_return(1.0) == 2.0


def test_with_several_hosts_a_whole_host_is_barred_and_otherwise_only_the_slot():
    worker = Worker(number=0, host="a", slot=1, state=FAILED, generation=0)
    limits = Limits(num_proc=2, min_num_proc=1)
    several = Hosts(ElasticSpec(limits=limits, hosts=(HostInfo("a", 2), HostInfo("b", 1))))
    several.bar(worker, 0.0)
    assert several.usable(0.0) == {"b": (0,)}
    assert several.barred(0.0) == {"a"}
    one = Hosts(ElasticSpec(limits=limits, hosts=(HostInfo("a", 1), HostInfo("a", 1))))  # its slots are added
    one.bar(worker, 0.0)
    assert (one.usable(0.0), one.barred(0.0), one.may_grow(0.0)) == ({"a": (0,)}, frozenset(), False)
    newcomer = Hosts(ElasticSpec(limits=limits, hosts=(HostInfo("a", 2), HostInfo("b", 1)), cooldown_range=(1, 5)))
    newcomer.bar(replace(worker, generation=-1), 0.0)
    assert newcomer.usable(0.0) == {"a": (0,), "b": (0,)}
    assert newcomer.may_grow(0.0)


def test_changed_hosts_are_reported_and_unreachable_ones_left_out():
    spec = ElasticSpec(limits=Limits(num_proc=2, min_num_proc=1), local_only=True)
    found = Hosts(spec)
    told = found.change([HostInfo("localhost", 2), HostInfo("192.0.2.1", 4)])
    assert told[0].startswith("host 192.0.2.1 cannot be used: the job began on this machine alone")
    assert told[1] == "the hosts are now localhost:2"
    assert (found.usable(0.0), found.num_slots("localhost"), found.num_slots("gone")) == ({"localhost": (0, 1)}, 2, 1)
    assert found.change([]) == ["the hosts are now none"]


def test_the_launcher_reads_the_same_stall_variables_as_the_workers():
    spec = ElasticSpec(limits=Limits(num_proc=2, min_num_proc=1))
    asked = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}
    assert spec.limits_for({}).stall_shutdown_s is None
    assert spec.limits_for(asked).stall_shutdown_s == 3
    assert spec.limits_for(asked | {"HOROVOD_STALL_CHECK_DISABLE": "1"}).stall_shutdown_s is None
    with pytest.raises(ValueError, match="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS must be a number of seconds"):
        spec.limits_for({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "soon"})


# ---- discovery ------------------------------------------------------------------------------------------------------


def test_the_output_of_discovery_scripts():
    assert parse_discovered("a:2\n\n  b  \na:2\n", 3) == [HostInfo("a", 2), HostInfo("b", 3)]
    assert parse_discovered("", None) == []
    with pytest.raises(ValueError, match=r"host 'b' without slots.*--slots-per-host"):
        parse_discovered("b", None)
    with pytest.raises(ValueError, match=r"discovery script printed a line that names no host. Invalid host input"):
        parse_discovered("-oProxyCommand:1", None)


# ---- whole histories ------------------------------------------------------------------------------------------------


class History:
    """A random history of a job, played without processes; checks the invariants."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        limits = Limits(num_proc=2, min_num_proc=self.random.choice((1, 2)), max_num_proc=4, elastic_timeout_s=50)
        self.facts = Case(limits=limits, hosts=hosts("a:0-1 b:0-1"), may_grow=True)
        self.members: set[int] = set()

    def update(self, number: int, **changes: object) -> None:
        changed = [replace(w, since=self.now, **changes) if w.number == number else w for w in self.facts.workers]
        self.facts = replace(self.facts, workers=changed)

    def happen(self) -> None:
        """Change the state of a random worker, or the hosts."""
        living = [w for w in self.facts.workers if w.alive]
        kind = self.random.random()
        if living and kind < 0.7:
            worker = self.random.choice(living)
            failed = self.random.random() < 0.15
            self.update(worker.number, state=FAILED if failed else READY, exited=failed)
        elif kind < 0.8:
            names = self.random.sample("abc", self.random.choice((1, 2, 2, 3)))
            self.facts = replace(self.facts, hosts=hosts(" ".join(f"{name}:0-1" for name in names)))

    def play(self) -> object:
        for _ in range(400):
            self.now += 1
            decision = decide(self.facts, self.now)
            match decision:
                case Begin(places) | StartWorkers(places):
                    self.start(places, begin=isinstance(decision, Begin))
                case Publish(numbers):
                    self.publish(numbers)
                case Notify():
                    assert not self.facts.notified
                    self.facts = replace(self.facts, notified=True)
                case WriteOff(numbers):
                    for number in numbers:
                        self.update(number, written_off=True)
                case End(numbers):
                    for number in numbers:
                        self.update(number, state=LEFT)
                case EndJob() | Fail() | GiveUp():
                    return decision
                case Wait(until):
                    assert until is None or until > self.now
                    since = self.facts.short_since if decision.waits_for_more else self.now
                    self.facts = replace(self.facts, short_since=since)
                    self.happen()
        for worker in self.facts.workers:
            self.update(worker.number, **({"state": SUCCEEDED, "exited": True} if worker.state is WORKING else {}))
        return decide(self.facts, self.now)

    def start(self, places, *, begin: bool) -> None:
        taken = {(w.host, w.slot) for w in self.facts.workers if w.alive}
        assert places
        assert not taken & set(places)
        first = len(self.facts.workers)
        new = [Worker(number=first + i, host=h, slot=s, state=STARTING) for i, (h, s) in enumerate(places)]
        self.facts = replace(self.facts, workers=[*self.facts.workers, *new])
        if begin:
            self.publish(tuple(w.number for w in new))

    def publish(self, numbers) -> None:
        limits, by_number = self.facts.limits, {w.number: w for w in self.facts.workers}
        assert limits.min_num_proc <= len(numbers) <= limits.max_num_proc
        assert all(by_number[number].alive for number in numbers)
        assert not any(w.state is WORKING for w in self.facts.workers)
        assert not self.members or numbers[0] in self.members, "rank 0 must have the state"
        places = assign([by_number[number] for number in numbers])
        assert sorted(place.rank for place in places.values()) == list(range(len(numbers)))
        generation = self.facts.generation + 1
        self.facts = replace(self.facts, generation=generation, notified=False)
        self.members = set(numbers)
        for worker in by_number.values():
            if worker.number in self.members:
                first = generation if worker.generation < 0 else worker.first_generation
                self.update(worker.number, state=WORKING, generation=generation, first_generation=first)
            elif worker.state is READY and worker.generation >= 0:
                self.update(worker.number, state=LEFT)


def test_rank_0_has_the_state_and_the_limits_hold_in_any_history():
    ends = {type(History(seed).play()) for seed in range(100)}
    assert ends >= {EndJob, Fail}


def test_survivors_do_not_wait_for_a_silent_worker_for_ever():
    limits = {"stuck_s": 50.0, "silent_s": 5.0}
    members = workers(WORKING, FAILED)
    members[0] = replace(members[0], silent_since=100.0)
    assert not isinstance(decide(facts(members, where="a:0", notified=True, limits=limits), 149), End)
    decision = decide(facts(members, where="a:0", notified=True, limits=limits), 150)
    assert isinstance(decision, End)
    assert (decision.workers, decision.failed) == ((0,), True)
