"""Jobs under every kind of fault in virtual time: the real controller, policies and rendezvous in a simulated world.

    make simulate                                     ten thousand seeds
    python -m pytest tests/simulation --seed 4711     replay one seed exactly

Invariants: generations follow one another, and each rank belongs to one worker; an operation has the same result on all
ranks; the launcher does nothing for a dropped worker; the job ends with a result or an error, and no process of it is
left.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
from simulated_workers import Referee, Worker
from simulator import LONGEST_RUN_S, Discovery, Network, Simulation, StuckError, VirtualLauncher, VirtualServer, played

from hora.errors import JobFailedError, StartTimeoutError
from hora.launch.controller import hosts as elastic
from hora.launch.controller import loop
from hora.launch.controller.hosts import ElasticSpec
from hora.launch.controller.loop import run_job
from hora.launch.controller.policy import Limits
from hora.launch.job import Job, OutputOptions
from hora.launch.slots import HostInfo, get_host_assignments
from hora.net.rendezvous import Rendezvous


class Run:
    """One job in one simulated world."""

    def __init__(self, seed: int) -> None:
        self.simulation = Simulation(seed)
        self.rng = self.simulation.rng
        self.network, self.discovery, self.referee = Network(), Discovery(), Referee(self.simulation)
        self.hosts = [HostInfo(f"host{number}", self.rng.randint(1, 3)) for number in range(self.rng.randint(1, 4))]
        self.elastic = self.rng.random() < 0.8
        self.num_steps = self.rng.randint(3, 30)
        self.launcher = VirtualLauncher(self.simulation, self._process)
        # How long a rank may be silent, whatever the other ranks do.
        self.stall_shutdown_s = self.rng.choice([None, 30.0]) if self.elastic else None
        self.outcome = ""

    def to_the_end(self) -> None:
        num_slots = sum(host.slots for host in self.hosts)
        limits = Limits(
            num_proc=self.rng.randint(1, num_slots),
            min_num_proc=1,
            max_num_proc=self.rng.choice([None, num_slots, num_slots + 2]),
            reset_limit=self.rng.choice([None, None, 3]),
            elastic_timeout_s=60.0,
        )
        stall = self.stall_shutdown_s
        env = {} if stall is None else {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(int(stall))}
        spec = ElasticSpec(
            limits=limits,
            hosts=tuple(self.hosts),
            script=self.discovery,
            cooldown_range=self.rng.choice([None, (5, 30)]),
        )
        output = OutputOptions(stdout=io.StringIO(), stderr=io.StringIO())
        job = Job(
            slots=tuple(get_host_assignments(self.hosts, limits.num_proc)), function=b"training", output=output, env=env
        )
        for _ in range(self.rng.choice([0, 1, 2, 4, 8])):
            self.simulation.after(self.rng.uniform(0.0, 40.0), self._fault)
        with self._in_this_world():
            try:
                result = run_job(job, self.launcher, spec if self.elastic else None)
                self.outcome = "done"
                assert len(result.results) == len(self.referee.published[self._last_generation()])
            except StuckError:
                # All remaining ranks may be stopped and resumed one day, so the job waits for them unless it has a
                # stall limit.
                members = [
                    self.launcher.processes[number] for number in self.referee.published[self._last_generation()]
                ]
                if self.stall_shutdown_s is not None or any(one.stopped_until < LONGEST_RUN_S for one in members):
                    raise
                self.outcome = "stopped for ever"
            except (JobFailedError, StartTimeoutError) as error:
                self.outcome = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        assert all(process.dead for process in self.launcher.processes.values())

    def _last_generation(self) -> int:
        return max(self.referee.published)

    def _process(self, spec, ended) -> Worker:
        return Worker(self.simulation, self.referee, spec, ended, self.num_steps)

    def _fault(self) -> None:
        """Inject a fault into a worker, a host, or the list of hosts."""
        rng, now = self.rng, self.simulation.now
        alive = [process for process in self.launcher.processes.values() if not process.dead]
        host = rng.choice(self.hosts).hostname
        kind = rng.choice(["kill", "cut", "stop", "silence", "hosts"] if alive else ["hosts", "silence"])
        victim = rng.choice(alive) if alive else None
        self.simulation.log(
            f"fault: {kind} {host if victim is None or kind in ('silence', 'hosts') else victim.number}"
        )
        match kind:
            case "kill":
                victim.die(137)
            case "cut":
                victim.cut()
            case "stop":
                # A job of a fixed size has no limit for a rank that never resumes.
                until = now + rng.choice([1.0, 8.0, 60.0, 1e9 if self.elastic else 600.0])
                victim.stopped_until = max(victim.stopped_until, until)
            case "silence":
                self.network.silence(host, now + rng.choice([0.5, 5.0, 40.0]))
            case "hosts":
                changed = [one for one in self.hosts if rng.random() < 0.7]
                changed += [HostInfo(f"new{rng.randrange(3)}", 2)] * (rng.random() < 0.5)
                if self.elastic:
                    self.discovery.say(changed)

    @contextlib.contextmanager
    def _in_this_world(self) -> Iterator[None]:
        """Patch the real modules to use the simulation's clock, queue, server and random numbers."""
        clock = SimpleNamespace(monotonic=self.simulation.monotonic, time=self.simulation.time)
        VirtualServer.simulation, VirtualServer.network = self.simulation, self.network
        VirtualServer.obeyed = staticmethod(self.referee.obeyed)
        publish, dismiss = Rendezvous.publish, Rendezvous._dismiss

        def published(rendezvous, generation, worlds) -> None:
            self.referee.publish(generation, dict(worlds))
            publish(rendezvous, generation, worlds)

        def dismissed(rendezvous, worker, *rest) -> None:
            dismiss(rendezvous, worker, *rest)
            self.referee.given_up.setdefault(worker, self.simulation.now)

        with contextlib.ExitStack() as stack:
            for name, module in list(sys.modules.items()):
                if name.startswith(
                    ("hora.launch.controller.", "hora.net.rendezvous", "hora.net.key_value_store")
                ) and hasattr(module, "time"):
                    stack.enter_context(mock.patch.object(module, "time", clock))
            queues = SimpleNamespace(SimpleQueue=self.simulation.simple_queue, Empty=loop.queue.Empty)
            stack.enter_context(mock.patch.object(loop, "queue", queues))
            stack.enter_context(mock.patch("hora.net.key_value_store.Server", VirtualServer))
            stack.enter_context(mock.patch.object(elastic, "random", SimpleNamespace(random=self.rng.random)))
            stack.enter_context(mock.patch.object(Rendezvous, "publish", published))
            stack.enter_context(mock.patch.object(Rendezvous, "_dismiss", dismissed))
            yield


def played_all(seeds: Iterable[int]) -> list[str]:
    return [played(Run, seed).outcome for seed in seeds]


def test_invariants_hold_under_random_faults(request: pytest.FixtureRequest):
    seed = request.config.getoption("--seed")
    seeds = range(request.config.getoption("--seeds")) if seed is None else [seed]
    outcomes = played_all(seeds)
    if len(outcomes) >= 100:  # some jobs must succeed, and some must fail
        done = sum(outcome == "done" for outcome in outcomes)
        assert 0.3 * len(outcomes) < done < 0.95 * len(outcomes), done


@pytest.mark.parametrize("rule", ["an old world is given", "a lost worker is kept for ever"])
def test_a_broken_invariant_is_detected(rule: str, monkeypatch: pytest.MonkeyPatch):
    """Shows that the simulation can fail."""

    def at_once(rendezvous, call) -> None:
        rendezvous._give_world(call, call.peer.number)

    if rule == "an old world is given":
        monkeypatch.setattr(Rendezvous, "_on_next_world", at_once)
    else:
        monkeypatch.setitem(Limits.__init__.__kwdefaults__, "lost_s", 1e12)
    with pytest.raises(AssertionError, match=r"seed \d+: .*(old world was given|has not ended)"):
        played_all(range(2000))


def test_a_seed_replays_exactly():
    for seed in range(5):
        one, other = played(Run, seed), played(Run, seed)
        assert one.simulation.trace == other.simulation.trace
        assert one.outcome == other.outcome
