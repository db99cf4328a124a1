"""Jobs whose leaders die or are deposed at any moment, in virtual time, with the real controller as each leader.

    python -m pytest tests/simulation/test_succession.py --seed 4711     replay one seed exactly

The invariants of every job hold (`test_simulation`) across all leaders: generations follow one another, no worker
starts twice, and no dropped worker gets a slot again. The store and the nodes' agents, which hold the workers, are
simulated.
"""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest
from simulated_workers import Referee, Worker
from simulator import Simulation, played
from test_simulation import Run as JobRun

from hora.errors import JobFailedError, StartTimeoutError
from hora.launch.agent.protocol import Exited
from hora.launch.controller.hosts import ElasticSpec
from hora.launch.controller.loop import run_job
from hora.launch.controller.policy import Limits
from hora.launch.job import Job, LaunchEvents, LeadershipLostError, OutputOptions, WorkerSpec
from hora.launch.limits import KILLED_S
from hora.launch.slots import get_host_assignments

LEASE_S = 3.0
RETURN_S = 600.0


class Keepers:
    """The nodes' agents and their workers, under any leader. They reject orders of earlier leaders."""

    def __init__(self, simulation: Simulation, begin: Any) -> None:
        self._simulation, self._begin = simulation, begin
        self.processes: dict[int, Worker] = {}
        self.exits: dict[int, int] = {}
        self.told_at = 0.0  # when the last exit was reported
        self.events: LaunchEvents | None = None  # of the current leader
        self.term = 0

    def order(self, term: int, function: Any) -> None:
        """Execute an order soon, unless another process leads by then."""
        late = self._simulation.rng.uniform(0.01, 1.0)
        self._simulation.after(late, lambda: function() if term == self.term else None)

    def start(self, spec: WorkerSpec) -> None:
        assert spec.worker not in self.processes, f"worker {spec.worker} was started twice"
        self.processes[spec.worker] = self._begin(spec, lambda code: self._ended(spec.worker, code))
        if self.events is not None:
            self.events.started(spec.worker)

    def _ended(self, number: int, code: int) -> None:
        self._simulation.log(f"worker {number} has ended with code {code}")
        self._simulation.after(self._simulation.rng.expovariate(5.0), lambda: self._tell(number, code))

    def _tell(self, number: int, code: int) -> None:
        self.exits[number], self.told_at = code, self._simulation.now
        if self.events is not None:
            self.events.exited(Exited(worker=number, code=code))

    def end(self, number: int, grace_s: float) -> None:
        process = self.processes.get(number)
        if process is not None and not process.dead:
            process.terminate()
            self._simulation.after(grace_s, lambda: process.die(137))


class Leader:
    """Implements `Launcher`, and the methods of `Leadership`, its agents and its launcher that a controller calls."""

    bind_address = advertised_address = "10.0.0.1"
    leaderless_s = 0.0

    def __init__(self, run: Run, term: int) -> None:
        self._run, self._keepers, self.term = run, run.keepers, term
        self.state: Mapping[str, Any] | None = None if run.saved is None else json.loads(run.saved)
        self._deposed = self.abandoned = False
        self._lost: Any = None
        self.agents = self.launcher = self

    def depose(self) -> None:
        self._deposed = True
        if self._lost is not None:
            self._lost()

    def watch(self, lost: Any) -> None:
        self._lost = lost

    def check(self) -> None:
        if self._deposed:
            raise LeadershipLostError

    def save(self, state: Mapping[str, Any]) -> None:
        self.check()
        dies = self._run.rng.random()
        if dies < 0.02:  # before it writes
            raise LeadershipLostError
        self._run.saved = json.dumps(state)
        if dies < 0.04:  # after it writes, before any worker is notified
            raise LeadershipLostError

    def adopt(self, workers: Mapping[str, Collection[int]], events: LaunchEvents) -> list[int]:
        keepers = self._keepers
        keepers.events, keepers.term = events, self.term
        numbers = sorted(set().union(*workers.values()))
        known = [number for number in numbers if number in keepers.processes]
        for number in known:
            events.started(number)
            if number in keepers.exits:
                events.exited(Exited(worker=number, code=keepers.exits[number]))
        return [number for number in numbers if number not in known]

    def meet_at(self, port: int) -> None:
        self._keepers.term = self.term

    def abandon(self) -> None:
        self.abandoned, self._keepers.events = True, None

    def start(self, workers: Sequence[WorkerSpec], events: LaunchEvents) -> None:
        self._keepers.events = events
        for spec in workers:
            self._keepers.order(self.term, lambda spec=spec: self._keepers.start(spec))

    def terminate(self, workers: Iterable[int], *, grace_s: float) -> None:
        for number in workers:
            self._keepers.order(self.term, lambda number=number: self._keepers.end(number, grace_s))

    def close(self) -> None:
        if not self.abandoned:
            for process in self._keepers.processes.values():
                process.die(137)


class OverAllLeaders(Referee):
    """Allows a new leader to publish the current generation again, but no other one."""

    def publish(self, generation: int, worlds: Any) -> None:
        if generation in self.published and generation == max(self.published):
            ranks = {number: world.rank for number, world in worlds.items()}
            assert ranks == {number: world.rank for number, world in self.published[generation].items()}
            return
        super().publish(generation, worlds)


class PatientWorker(Worker):
    """Reconnects to any leader, as long as its agent lives."""

    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        self._comes_back = True

    def _heard(self, message: Any) -> None:
        if message is None and self._joined and not self.dead and not self._cut_off:
            self._returning_until = self._returning_until or self._simulation.now + RETURN_S
        super()._heard(message)


class Run(JobRun):
    """One job and its successive leaders."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.elastic, self.stall_shutdown_s = True, None
        self.referee = OverAllLeaders(self.simulation)
        self.keepers = self.launcher = Keepers(self.simulation, self._process)  # type: ignore[assignment]
        self.saved: str | None = None
        self.num_leaders = 0

    def _process(self, spec: Any, ended: Any) -> Worker:
        return PatientWorker(self.simulation, self.referee, spec, ended, self.num_steps)

    def to_the_end(self) -> None:
        rng = self.rng
        num_slots = sum(host.slots for host in self.hosts)
        limits = Limits(num_proc=rng.randint(1, num_slots), min_num_proc=1, elastic_timeout_s=60.0)
        for _ in range(rng.choice([0, 1, 2, 4])):
            self.simulation.after(rng.uniform(0.0, 40.0), self._fault)
        with self._in_this_world():
            while not self.outcome:
                self.num_leaders += 1
                leader = Leader(self, self.num_leaders)
                if self.num_leaders < 6:
                    self.simulation.after(rng.choice([rng.uniform(0.0, 8.0), rng.uniform(5.0, 60.0)]), leader.depose)
                self.simulation.log(f"leader {leader.term}")
                self._lead(leader, limits)
        assert all(process.dead for process in self.keepers.processes.values())

    def _lead(self, leader: Leader, limits: Limits) -> None:
        job = Job(
            slots=tuple(get_host_assignments(self.hosts, limits.num_proc)),
            command=("train",),
            output=OutputOptions(stdout=io.StringIO(), stderr=io.StringIO()),
            id="job",
            secret=b"s" * 32,
        )
        spec = ElasticSpec(limits=limits, hosts=tuple(self.hosts), script=self.discovery)
        began = self.simulation.now
        try:
            run_job(job, leader, spec, leader)
            self.outcome = "done"
            if self.keepers.exits.keys() == self.keepers.processes.keys():
                waited_s = self.simulation.now - max(self.keepers.told_at, began)
                assert waited_s < KILLED_S, "the last leader waited for workers that had ended before it led"
        except LeadershipLostError:
            self.simulation.log(f"leader {leader.term} does not lead any more")
            assert leader.abandoned, "a leader of the past has ended the workers"
            self.simulation.run_until(lambda: False, self.simulation.now + self.rng.uniform(0.1, LEASE_S))
        except (JobFailedError, StartTimeoutError) as error:
            self.outcome = f"{type(error).__name__}: {str(error).splitlines()[0]}"


def played_all(seeds: Iterable[int]) -> list[Run]:
    return [played(Run, seed) for seed in seeds]


def test_invariants_hold_under_random_faults(request: pytest.FixtureRequest):
    seed = request.config.getoption("--seed")
    seeds = range(request.config.getoption("--seeds")) if seed is None else [seed]
    runs = played_all(seeds)
    if len(runs) >= 100:
        done = sum(run.outcome == "done" for run in runs)
        assert 0.3 * len(runs) < done < 0.99 * len(runs), done
        assert sum(run.num_leaders > 1 for run in runs) > 0.5 * len(runs), "leaders are deposed"


@pytest.mark.parametrize("rule", ["the state is written too late", "a deposed leader ends the workers"])
def test_a_broken_invariant_is_detected(rule: str, monkeypatch: pytest.MonkeyPatch):
    if rule == "the state is written too late":
        monkeypatch.setattr(Leader, "save", lambda leader, state: leader.check())
    else:
        monkeypatch.setattr(Leader, "abandon", lambda leader: None)
    with pytest.raises(AssertionError, match=r"seed \d+: "):
        played_all(range(100))


def test_a_seed_replays_exactly():
    for seed in range(3):
        one, other = played(Run, seed), played(Run, seed)
        assert (one.simulation.trace, one.outcome) == (other.simulation.trace, other.outcome)
