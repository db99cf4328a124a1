"""Jobs on joining nodes under every kind of fault, with real agents and the real controller.

    python -m pytest tests/simulation/test_joining_nodes.py --seed 4711     replay one seed exactly

The invariants of every job hold (`test_simulation`), and also: no order reaches two machines, no worker starts twice or
without a key; when the job is over, every agent has ended with a status or an error, and no process is left
on any node.
"""

from __future__ import annotations

import contextlib
import io
import queue
import subprocess
import threading
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
from fibers import Condition, Event, KilledError, Process, SimpleQueue, Thread, pause
from simulated_nodes import (
    CUT_LIMIT_S,
    REASONABLE_END_S,
    START_LIMIT_S,
    Machine,
    Nodes,
    NodesServer,
    OwnProcess,
    SimulatedAgent,
    connect,
)
from simulator import played
from test_simulation import Run as JobRun

from hora.errors import JobFailedError, StartTimeoutError
from hora.launch.agent import agent
from hora.launch.agent import session as agent_session
from hora.launch.controller import agents, launcher
from hora.launch.controller.agents import Agents
from hora.launch.controller.hosts import ElasticSpec
from hora.launch.controller.launcher import HostLauncher
from hora.launch.controller.loop import run_job
from hora.launch.controller.policy import Limits
from hora.launch.job import Job, OutputOptions
from hora.launch.slots import get_host_assignments
from hora.net import session

SILENCE_LIMIT_S = 20.0


class Run(JobRun):
    """One job on nodes that join, leave and rejoin."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.nodes = Nodes(self.simulation, self.network, self._process, self.rng.randint(1, 3))
        self.num_steps = self.rng.randint(3, 20)
        self.statuses: list[int] = []

    def to_the_end(self) -> None:
        rng, nodes = self.rng, self.nodes
        with self._in_this_world():
            where = Agents(
                ("10.0.0.1", 1),
                b"secret" * 6,
                num_nodes=nodes.num_nodes,
                silence_limit_s=SILENCE_LIMIT_S,
                own=launcher_host(nodes.own),
                elastic=self.elastic,
                return_s=rng.choice([0.0, 30.0]) if self.elastic else 0.0,
            )
            for machine in nodes.machines:
                self.simulation.after(rng.choice([rng.uniform(0.0, 5.0), rng.uniform(0.0, 40.0)]), machine.boot)
            for _ in range(rng.choice([0, 1, 2, 4, 8])):
                self.simulation.after(rng.uniform(0.0, 50.0), self._fault)
            status = 1
            try:
                self._run_on(where)
                self.outcome, status = "done", 0
            except (JobFailedError, StartTimeoutError, RuntimeError) as error:
                self.outcome = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            except (KilledError, subprocess.TimeoutExpired):
                assert nodes.launcher.dead
                self.outcome = "the launcher was killed"
            finally:
                nodes.over = True
                if not nodes.launcher.dead:
                    where.dismiss(status)
            self.simulation.log(f"the job is over: {self.outcome}")
            ended = self.simulation.run_until(nodes.all_ended, self.simulation.now + REASONABLE_END_S)
            left = [one.name for one in [*nodes.machines, nodes.own] if not one.dead]
            assert ended, f"{left} have not ended, nor workers {[n for n, w in nodes.workers.items() if not w.dead]}"
            assert all(machine.told for machine in nodes.machines if machine.process is not None)

    def _run_on(self, where: Agents) -> None:
        num_proc = self.rng.randint(1, 3)
        where.wait(START_LIMIT_S, num_slots=num_proc if self.elastic else None)
        hosts = where.hosts()
        num_slots = sum(host.slots for host in hosts)
        limits = Limits(
            num_proc=min(num_proc, num_slots),
            min_num_proc=1,
            max_num_proc=self.rng.choice([None, num_slots]),
            reset_limit=self.rng.choice([None, None, 3]),
            elastic_timeout_s=60.0,
        )
        spec = ElasticSpec(
            limits=limits, hosts=tuple(hosts), script=where, cooldown_range=self.rng.choice([None, (5, 30)])
        )
        job = Job(
            slots=tuple(get_host_assignments(hosts, limits.num_proc)),
            function=b"training",
            output=OutputOptions(stdout=io.StringIO(), stderr=io.StringIO()),
            env={} if self.stall_shutdown_s is None else {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30"},
            secret=where.job_secret,
        )
        hosts_launcher = HostLauncher(agents=where, listen=where.address)
        result = run_job(job, hosts_launcher, spec if self.elastic else None)
        assert len(result.results) == len(self.referee.published[self._last_generation()])

    def _fault(self) -> None:
        rng, now, nodes = self.rng, self.simulation.now, self.nodes
        if nodes.over:
            return
        machine = rng.choice(nodes.machines)
        alive = [worker for worker in nodes.workers.values() if not worker.dead]
        if rng.random() < 0.04:
            self.simulation.log("fault: the launcher is killed")
            nodes.kill_launcher()
        kinds = ["kill agent", "power", "cut agent", "silence", "stop agent", "leave", "own agent"]
        kind = rng.choice([*kinds, "kill", "cut", "stop"] if alive else kinds)
        victim = rng.choice(alive) if alive else None
        self.simulation.log(
            f"fault: {kind} {victim.number if victim and kind in ('kill', 'cut', 'stop') else machine.name}"
        )
        match kind:
            case "kill":
                victim.die(137)
            case "cut":
                victim.cut()
            case "stop":
                victim.stopped_until = max(victim.stopped_until, now + rng.choice([1.0, 8.0, 60.0, 300.0]))
            case "kill agent":
                machine.kill_agent()
            case "power":
                machine.die()
            case "cut agent":
                machine.cut()
            case "stop agent":
                if machine.process is not None:
                    until = now + rng.choice([1.0, 8.0, 60.0])
                    machine.process.stopped_until = max(machine.process.stopped_until, until)
            case "leave":
                machine.leave()
            case "silence":
                self._silence(machine, rng.choice([0.5, 5.0, 25.0, 40.0]))
            case "own agent":
                for agent in nodes.own.agents[-1:]:
                    agent.link.kill()
        if rng.random() < 0.7:  # the platform restarts it
            self.simulation.after(rng.choice([0.1, 2.0, 15.0]), machine.boot)

    def _silence(self, machine: Machine, lasts_s: float) -> None:
        self.network.silence(machine.name, self.simulation.now + lasts_s)
        if lasts_s > CUT_LIMIT_S:
            links = [one.link for one in machine.connections]
            self.simulation.after(CUT_LIMIT_S, lambda: [cut_now(link) for link in links])

    @contextlib.contextmanager
    def _in_this_world(self) -> Iterator[None]:
        """Patch further real modules to use the simulation's pipes, threads and sockets."""
        nodes, clock = self.nodes, self.simulation
        times = SimpleNamespace(monotonic=clock.monotonic, time=clock.time, sleep=pause)
        threads = SimpleNamespace(Condition=Condition, Event=Event, Thread=Thread, Lock=threading.Lock)
        queues = SimpleNamespace(SimpleQueue=SimpleQueue, Empty=queue.Empty)
        replaced = {
            agents: {"time": times, "threading": threads, "Server": NodesServer},
            agent: {"threading": threads, "queue": queues, "os": nodes.descriptors},
            agent_session: {"time": times, "connect": connect, "Agent": SimulatedAgent},
            launcher: {"time": times, "threading": threads, "queue": queues, "LocalProcess": OwnProcess},
            session: {"time": times, "threading": threads},
        }
        with super()._in_this_world(), contextlib.ExitStack() as stack:
            for module, others in replaced.items():
                for name, other in others.items():
                    stack.enter_context(mock.patch.object(module, name, other))
            Process.current = nodes.launcher
            try:
                yield
            finally:
                Process.current = None
                for process in [nodes.launcher, *(m.process for m in nodes.machines if m.process is not None)]:
                    process.end()


def launcher_host(machine: Machine):
    return agents.HostInfo(machine.name, machine.slots)


def cut_now(link) -> None:
    """Let the kernel close a silent connection: each end is notified, although the network delivers nothing."""
    link.error = TimeoutError()
    NodesServer.here.drop(link)
    link._hear_the_end()


def played_all(seeds: Iterable[int]) -> list[str]:
    return [played(Run, seed).outcome for seed in seeds]


def test_invariants_hold_under_random_faults(request: pytest.FixtureRequest):
    seed = request.config.getoption("--seed")
    seeds = range(request.config.getoption("--seeds") // 2) if seed is None else [seed]
    outcomes = played_all(seeds)
    if len(outcomes) >= 100:
        done = sum(outcome == "done" for outcome in outcomes)
        assert 0.3 * len(outcomes) < done < 0.95 * len(outcomes), done


@pytest.mark.parametrize(
    "rule", ["a node outlives its launcher", "nodes are not told that the job is over", "orders reach all"]
)
def test_a_broken_invariant_is_detected(rule: str, monkeypatch: pytest.MonkeyPatch):
    if rule == "a node outlives its launcher":
        monkeypatch.setattr(SimulatedAgent, "_look", lambda _: None)
    elif rule == "nodes are not told that the job is over":
        monkeypatch.setattr(Agents, "dismiss", lambda *_: None)
    else:
        start = HostLauncher.start

        def everywhere(hosts: HostLauncher, workers, events) -> None:
            start(hosts, workers, events)
            for host in hosts._hosts.values():
                host.start([hosts._for_elsewhere(spec) for spec in workers])

        monkeypatch.setattr(HostLauncher, "start", everywhere)
    with pytest.raises(AssertionError, match=r"seed \d+: "):
        played_all(range(100))


def test_a_seed_replays_exactly():
    for seed in range(5):
        one, other = played(Run, seed), played(Run, seed)
        assert (one.simulation.trace, one.outcome) == (other.simulation.trace, other.outcome)
