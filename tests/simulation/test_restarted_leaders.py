"""Jobs whose leader dies and is started again, in virtual time, with the real controller and agents' links.

    python -m pytest tests/simulation/test_restarted_leaders.py --seed 4711     replay one seed exactly

A leader knows nothing but what its agents tell it: `Succession`, `Agents`, `LeaderLink`, sessions, controller, policy
and rendezvous are real. Leaders die at any moment, also while their agents return, are stopped, and stand beside others
behind a partition of the network; workers, agents and machines die meanwhile. Each leader has a referee, which inherits
what the leader before it had done up to the state that the new one goes on from.

Invariants, beside those of every job (`test_simulation`): an agent obeys one leader, and none of an earlier term; no
worker is started twice; a worker has a place only in generations of leaders that know it, and its agent knows of the
generation before it enters; a leader keeps only agents whose state led to its own; no more resets than the limit, and
no worker on a host that is barred, across all leaders; deaths of leaders alone cost no worker; every process ends.
"""

from __future__ import annotations

import contextlib
import io
import json
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from fibers import Condition, Event, Fiber, Process, SimpleQueue, Thread, pause
from simulated_nodes import (
    CUT_LIMIT_S,
    REASONABLE_END_S,
    START_LIMIT_S,
    Descriptors,
    Machine,
    NodeConnection,
    SimulatedAgent,
)
from simulated_workers import Referee, Worker
from simulator import Link, Message, VirtualServer, played
from test_simulation import Run as JobRun

from hora.errors import JobFailedError, StartTimeoutError
from hora.launch.agent import agent, leaders
from hora.launch.agent import session as agent_session
from hora.launch.agent.protocol import Start
from hora.launch.controller import agents, launcher, loop, succession
from hora.launch.controller.agents import Agents
from hora.launch.controller.hosts import ElasticSpec
from hora.launch.controller.launcher import HostLauncher
from hora.launch.controller.loop import run_job
from hora.launch.controller.policy import Limits
from hora.launch.controller.succession import Succession
from hora.launch.job import Job, LeadershipLostError, OutputOptions
from hora.launch.slots import HostInfo, get_host_assignments
from hora.net import key_value_store, session
from hora.net.rendezvous import Rendezvous
from hora.net.server import Timer
from hora.world import World

SECRET = b"secret" * 6
SILENCE_LIMIT_S = 20.0
RETURN_S = 30.0
LEADERLESS_S = 60.0
MEET_PORT = 1


class LeadersReferee(Referee):
    """Referee of one leader. It inherits the past of the state that its leader goes on from."""

    def __init__(self, leader: Leader, before: LeadersReferee | None, state: dict[str, Any]) -> None:
        super().__init__(leader.simulation)
        self.leader, self.reset_limit = leader, leader.run.reset_limit
        barred = state.get("hosts", {}).get("barred", ())
        self.barred = {host for host, slot, _, left_s in barred if slot is None and left_s is None}
        if before is not None:
            last = int(state["generation"])
            known = {number: name in ("STARTING", "READY", "WORKING") for number, _, _, name, *_ in state["workers"]}
            self.published = {number: worlds for number, worlds in before.published.items() if number <= last}
            self._last_generation = max(self.published, default=-1)
            self._given = {place: worker for place, worker in before._given.items() if place[0] <= last}
            self._values = {key: one for key, one in before._values.items() if int(key.partition("/")[0]) <= last}
            self.given_up = {number: at for number, at in before.given_up.items() if not known.get(number, True)}

    def publish(self, generation: int, worlds: Any) -> None:
        if generation in self.published and generation == max(self.published):
            ranks = {number: world.rank for number, world in worlds.items()}
            assert ranks == {number: world.rank for number, world in self.published[generation].items()}
            return
        assert self.reset_limit is None or generation <= self.reset_limit, "more resets than the limit"
        super().publish(generation, worlds)

    def entered(self, worker: int, world: World, after: int) -> None:
        super().entered(worker, world, after)
        self.leader.check_memory(world)


class LeadersServer(VirtualServer):
    """Stands for the servers of a leader's process, which are idle while it is stopped."""

    def __init__(self, handler: Any, *, name: str, silence_limit_s: int = 0) -> None:
        assert Fiber.current is not None
        self.owner = Fiber.current.process
        assert isinstance(self.owner, Leader)
        super().__init__(handler, name=name)
        self.credentials: Any = None
        self.owner.servers.append(self)

    def listen(self, where: tuple[str, int]) -> int:
        assert isinstance(self.owner, Leader)
        assert where[1], "the next leader could not be found"
        self.owner.listening[where[1]] = self
        return where[1]

    def start(self, credentials: Any) -> None:
        self.credentials = credentials

    def call(self, function: Callable[[], None]) -> None:
        late_s = self.simulation.rng.expovariate(2000.0)
        self._next_call = max(self._next_call, self.simulation.now + late_s)
        self.owner.later(self._next_call - self.simulation.now, lambda: None if self._closed else function())

    def call_at(self, deadline: float, function: Callable[[], None]) -> Timer:
        timer = Timer(function)
        late_s = max(deadline - self.simulation.now, 0.0)
        self.owner.later(late_s, lambda: None if self._closed else timer.run())
        return timer

    def take(self, link: Link, header: dict[str, Any], payload: bytes) -> None:
        self.owner.later(0.0, lambda: super(LeadersServer, self).take(link, header, payload))

    def drop(self, link: Link) -> None:
        self.owner.later(0.0, lambda: super(LeadersServer, self).drop(link))

    def obeyed(self, worker: int, operation: str, asked_at: float) -> None:  # type: ignore[override]
        if isinstance(self._handler, Rendezvous):
            assert isinstance(self.owner, Leader)
            self.owner.referee.obeyed(worker, operation, asked_at)

    def die(self) -> None:
        """Close all connections, as the kernel does when the process is dead."""
        super().close()


def connect(where: tuple[str, int], credentials: object, *, timeout_s: float) -> NodeConnection:
    """Stands for `hora.net.wire.connect` of an agent: to the leader that its machine reaches."""
    assert Process.current is not None
    machine = Process.current.machine  # type: ignore[attr-defined]
    world, clock = machine.world.run, machine.simulation
    late = max(machine.network.silent_until(machine.name) - clock.now, 0.0) + clock.rng.expovariate(100.0)
    leader = world.reached(machine.name)
    if leader is not None:
        late = max(late, leader.stopped_until - clock.now)
    pause(min(late, timeout_s))
    if late > timeout_s:
        raise TimeoutError(where)
    server = world.listening_at(machine.name, where[1])
    if server is None:
        raise ConnectionRefusedError(where)
    return NodeConnection(machine, server)


class KeptWorker(Worker):
    """A worker that reconnects to any leader. It has a key of its own."""

    def __init__(self, run: Run, spec: Any, ended: Callable[[int], None]) -> None:
        super().__init__(run.simulation, run.referee, spec, ended, run.num_steps)
        self._run, self._comes_back, self.code = run, True, 0
        self._term = self._world.rendezvous.term
        self._key = bytes.fromhex(spec.private_files["HORA_SECRET_FILE"])

    def _connect(self) -> None:
        link: Link | None = None

        def heard(message: Message | None) -> None:
            if self._link is link:
                self._heard(message)

        server = self._run.listening_at(self.host, MEET_PORT + 1)
        if server is None:
            server = self._run.nobody
        elif server.credentials(self.number).secret != self._key:  # another worker has its number
            server = self._run.nobody
            self._returning_until = self._simulation.now
        else:
            self._referee = server.owner.referee  # type: ignore[attr-defined]
        link = self._link = server.connect(self.number, self.host, heard)

    def _heard(self, message: Message | None) -> None:
        if message is not None and self._is_outdated(message[0]):
            assert self._link is not None
            self._link.hang_up()
            message = None
        if message is None and not self.dead and not self._cut_off:
            self._returning_until = self._returning_until or self._simulation.now + LEADERLESS_S
            if not self._joined and self._simulation.now < self._returning_until:  # it has not been answered yet
                self._simulation.after(self._simulation.rng.expovariate(2.0), self._knock_again)
                return
        elif message is not None and not self._joined:
            self._returning_until = 0.0
            self._joined = "re" in message[0]  # also while it is stopped: it does not ask again
        super()._heard(message)

    def _is_outdated(self, header: dict[str, Any]) -> bool:
        """Return whether this is a leader of an earlier term than another one that it has heard (`ControlClient`)."""
        term = int(header.get("term", self._term))
        outdated, self._term = term < self._term, max(term, self._term)
        return outdated

    def die(self, code: int, **rest: float) -> None:
        if not self.dead:
            self.code = code
        super().die(code, **rest)

    def _knock_again(self) -> None:
        if self.dead or self._cut_off:
            return
        self._connect()
        assert self._asked is not None
        self._ask(self._asked)


class Leader(Process):
    """A process that leads the run, from start to end."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.simulation, f"leader {len(run.leaders) + 1}")
        self.run, self.outcome, self.succession = run, "", Succession("run", LEADERLESS_S)
        self.servers: list[LeadersServer] = []
        self.listening: dict[int, LeadersServer] = {}
        self.referee = LeadersReferee(self, None, {})
        Fiber(self, self._live)

    def _live(self) -> None:
        run = self.run
        where = Agents(
            ("10.0.0.1", MEET_PORT),
            SECRET,
            num_nodes=len(run.machines),
            silence_limit_s=SILENCE_LIMIT_S,
            nonce="run",
            elastic=True,
            return_s=RETURN_S,
            succession=self.succession,
        )
        status = 1
        try:
            self.succession.gather(num_slots=run.num_proc, limit_s=START_LIMIT_S, return_s=RETURN_S)
            self._inherit()
            self._check_agents(where)
            self._lead(where)
            self.outcome, status = "done", 0
        except LeadershipLostError:
            where.abandon()
            self.outcome = "replaced"
        except (JobFailedError, StartTimeoutError, RuntimeError) as error:
            self.outcome = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        finally:
            if not self.dead:
                where.dismiss(status)
        self.simulation.log(f"{self.name} ends: {self.outcome}")
        self.dead = True

    def _inherit(self) -> None:
        run, state = self.run, self.succession.state
        if state is not None:
            before, saved = max(self.succession._lineage.items())
            self.referee = LeadersReferee(self, run.referees[before], state)
            run.origins[self.succession.term] = before, saved
        run.referees[self.succession.term] = self.referee
        found = "nothing" if state is None else f"generation {state['generation']}"
        self.simulation.log(f"{self.name}, term {self.succession.term}, begins from {found}")

    def _check_agents(self, where: Agents) -> None:
        for node in where.joined():
            assert node.joining is not None
            term, saved = node.joining.term, node.joining.saved
            led_here = not term or self.run.led_to(self.succession.term, (term, saved))
            assert led_here, f"{node.name} may stay, although its state {saved} of term {term} did not lead to this one"

    def check_memory(self, world: World) -> None:
        """Check that the agent of a worker which enters this world, if it is ours, remembers the world."""
        if all(node.name != world.hostname or node.ended for node in self.succession.agents.joined()):
            return
        for machine in self.run.machines:
            link = machine.agents[-1].link if machine.agents and not machine.agent_dead else None
            if link is None or link._name != world.hostname or link._session is None:
                continue
            if link._session.connection.link._server.owner is self:
                term, saved, state = link._memory
                known = json.loads(state or "{}").get("generation", -1)
                ours = term == self.succession.term or self.run.led_to(self.succession.term, (term, saved))
                told = f"a worker of {machine.name} enters generation {world.generation}, its agent knows {known}"
                assert ours, told
                assert known >= world.generation, told

    def _lead(self, where: Agents) -> None:
        run, hosts = self.run, where.hosts() or [HostInfo("localhost", self.run.num_proc)]
        limits = Limits(
            num_proc=run.num_proc,
            min_num_proc=1,
            reset_limit=run.reset_limit,
            elastic_timeout_s=60.0,
            lost_s=RETURN_S,
        )
        spec = ElasticSpec(limits=limits, hosts=tuple(where.hosts()), script=where, cooldown_range=run.cooldown_range)
        num_slots = min(run.num_proc, sum(host.slots for host in hosts))
        job = Job(
            slots=tuple(get_host_assignments(hosts, num_slots)),
            command=("train",),
            output=OutputOptions(stdout=io.StringIO(), stderr=io.StringIO()),
            env={"LEADER": str(self.succession.term)},
            secret=where.job_secret,
            id="run",
            port=MEET_PORT + 1,
        )
        hosts_launcher = HostLauncher(agents=where, listen="10.0.0.1")
        self.succession.launcher = hosts_launcher
        run_job(job, hosts_launcher, spec, self.succession)

    def kill(self) -> None:
        self.simulation.log(f"{self.name} is killed")
        self.outcome = "killed"
        for server in self.servers:
            server.die()
        self.end()


class Nodes:
    """The machines as agents and workers see them, and what is checked of orders."""

    def __init__(self, run: Run) -> None:
        self.run, self.simulation, self.network, self.descriptors = run, run.simulation, run.network, run.descriptors
        self.num_nodes, self.over = 3, False
        self.workers: dict[str, KeptWorker] = {}  # by key
        self._obeyed: dict[SimulatedAgent, int] = {}
        self._ordered: dict[str, SimulatedAgent] = {}

    def ordered(self, agent: SimulatedAgent, order: Start) -> None:
        (key,), term = order.private_files.values(), int(order.env["LEADER"])
        assert key, "a worker without a key"
        other = self._ordered.setdefault(key, agent)
        assert other is agent, f"worker {order.worker} is to be started by the {other.name} and by the {agent.name}"
        assert term >= self._obeyed.get(agent, 0), f"the {agent.name} obeys an earlier leader"
        self._obeyed[agent] = term
        barred = self.run.referees[term].barred
        assert order.env["HOROVOD_HOSTNAME"] not in barred, f"a worker is started on {barred}, which was barred"

    def begin(self, spec: Any, ended: Callable[[int], None]) -> Worker:
        key = spec.private_files["HORA_SECRET_FILE"]
        assert key not in self.workers, f"worker {spec.worker} was started twice"
        self.workers[key] = KeptWorker(self.run, spec, ended)
        return self.workers[key]


class Run(JobRun):
    """One run, its leaders one after another or beside one another, and its machines."""

    feuds = 0.2  # of the runs, with two leaders that both go on for long

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng = self.rng
        self.elastic, self.stall_shutdown_s = True, None
        self.descriptors, self.num_steps = Descriptors(), rng.randint(10, 120)
        self.nodes = Nodes(self)
        names = range(rng.randint(1, 4))
        self.machines = [Machine(self.nodes, f"host{index}", rng.randint(1, 3), index) for index in names]  # type: ignore[arg-type]
        self.num_proc = rng.randint(1, min(3, sum(machine.slots for machine in self.machines)))
        self.reset_limit = rng.choice([None, None, 3])
        self.cooldown_range = rng.choice([None, (5, 30)])
        self.leaders: list[Leader] = []
        self.referees: dict[int, LeadersReferee] = {}  # by term
        self.origins: dict[int, tuple[int, int]] = {}  # term -> term and number of the state that it went on from
        self._sides: dict[str, Leader] = {}  # the leader that a machine reaches, while the network is split
        self._to_come = 0  # leaders that somebody will start
        self.calm = rng.random() < 0.25  # only leaders die
        self.was_split = False
        self.reset_limit = None if self.calm else self.reset_limit

    # ---- who reaches whom -----------------------------------------------------------------------------------

    def reached(self, host: str) -> Leader | None:
        """Return the leader that a machine finds at the run's name; None if nobody has it."""
        leader = self._sides.get(host)
        if leader is None or leader.dead:
            leader = self.leaders[-1] if self.leaders else None
        return None if leader is None or leader.dead else leader

    def listening_at(self, host: str, port: int) -> LeadersServer | None:
        leader = self.reached(host.partition("-")[0])
        server = None if leader is None else leader.listening.get(port)
        return None if server is None or server._closed else server

    def led_to(self, term: int, state: tuple[int, int]) -> bool:
        """Return whether the leader of this term went on from that state, given as term and number, or a later one."""
        while term in self.origins:
            term, saved = self.origins[term]
            if term == state[0]:
                return state[1] <= saved
        return False

    # ---- the run --------------------------------------------------------------------------------------------

    def to_the_end(self) -> None:
        rng, simulation = self.rng, self.simulation
        with self._in_this_world():
            self.nobody = VirtualServer(None, name="nobody")  # type: ignore[arg-type]
            self.nobody._closed = True
            for machine in self.machines:
                simulation.after(rng.uniform(0.0, 5.0), machine.boot)
            self._start_leader()
            for _ in range(rng.choice([1, 2, 3, 5])):
                simulation.after(rng.choice([rng.uniform(0.0, 10.0), rng.uniform(5.0, 60.0)]), self._leader_fault)
            if not self.calm:
                for _ in range(rng.choice([0, 1, 2, 4])):
                    simulation.after(rng.uniform(0.0, 60.0), self._fault)
                if rng.random() < self.feuds:
                    simulation.after(rng.uniform(3.0, 20.0), self._feud)
            try:
                self._until_all_have_ended()
            finally:
                for process in self._processes():
                    process.end()
        self.outcome = self.leaders[-1].outcome
        if self.calm and not self.was_split:
            assert self.outcome == "done", self.outcome
            assert not self.victims, f"workers {self.victims} have died with their leader"

    def _until_all_have_ended(self) -> None:
        simulation = self.simulation
        limit = simulation.now + 3600.0
        led = simulation.run_until(lambda: not self._to_come and all(one.dead for one in self.leaders), limit)
        assert led, f"{[one.name for one in self.leaders if not one.dead]} lead for ever"
        self.nodes.over = True
        members = {number for worlds in self.leaders[-1].referee.published.values() for number in worlds}
        self.victims = [one.number for one in self.nodes.workers.values() if one.number in members and one.code]
        limit = simulation.now + LEADERLESS_S + RETURN_S + CUT_LIMIT_S + REASONABLE_END_S
        ended = simulation.run_until(self._all_ended, limit)
        left = [machine.name for machine in self.machines if not machine.dead]
        assert ended, f"{left} have not ended, nor {sum(not one.dead for one in self.nodes.workers.values())} workers"
        assert all(machine.told for machine in self.machines if machine.process is not None)

    def _all_ended(self) -> bool:
        return all(one.dead for one in [*self.machines, *self.nodes.workers.values()])

    def _processes(self) -> list[Process]:
        return [*self.leaders, *(machine.process for machine in self.machines if machine.process is not None)]

    def _start_leader(self) -> None:
        if not self.nodes.over:
            before, Process.current = Process.current, None
            self.leaders.append(Leader(self))
            self.simulation.log(f"{self.leaders[-1].name} is started")
            Process.current = before

    def _start_leader_after(self, delay_s: float) -> None:
        self._to_come += 1

        def start() -> None:
            self._to_come -= 1
            if all(one.dead for one in self.leaders):
                self._start_leader()

        self.simulation.after(delay_s, start)

    # ---- faults ---------------------------------------------------------------------------------------------

    def _leader_fault(self) -> None:
        rng, alive = self.rng, [one for one in self.leaders if not one.dead]
        if not alive:
            return
        leader = rng.choice(alive)
        kind = "kill" if self.calm else rng.choice(["kill", "kill", "stop", "split", "split"])
        self.simulation.log(f"fault: {kind} {leader.name}")
        match kind:
            case "kill":
                leader.kill()
                delays = [rng.uniform(0.0, 1.0), rng.uniform(0.0, 20.0)]
                self._start_leader_after(rng.choice(delays if self.calm else [*delays, 90.0]))
                if rng.random() < 0.4:  # it dies again while agents return
                    self.simulation.after(rng.uniform(0.0, 25.0), self._leader_fault)
            case "stop":
                leader.stopped_until = self.simulation.now + rng.choice([1.0, 8.0, 60.0])
            case "split":
                self._split(leader, rng.choice([5.0, 40.0, 100.0]))

    def _feud(self) -> None:
        """Let two leaders go on beside one another until both have lost nodes; then a third one finds the agents."""
        alive = [one for one in self.leaders if not one.dead]
        if alive:
            self._split(alive[-1], 1000.0)
            self._sides[self.machines[0].name] = alive[-1]
            self._cut_others()
            self.simulation.after(RETURN_S + self.rng.uniform(2.0, 15.0), self._end_feud)

    def _end_feud(self) -> None:
        self._sides.clear()
        for leader in self.leaders:
            if not leader.dead:
                leader.kill()
        self._start_leader_after(self.rng.uniform(0.0, 1.0))

    def _split(self, leader: Leader, for_s: float) -> None:
        """Let somebody start another leader, which some machines reach instead of this one."""
        self.was_split = True
        self._start_leader()
        sides = {machine.name: self.rng.choice([leader, self.leaders[-1]]) for machine in self.machines}
        self._sides.update(sides)
        self._cut_others()
        self.simulation.after(for_s, self._heal)

    def _heal(self) -> None:
        """Let the name lead to one leader everywhere, mostly to the newest. Connections to others may hold."""
        self._sides.clear()
        alive = [one for one in self.leaders if not one.dead]
        if alive and self.rng.random() < 0.4:
            self._sides.update(dict.fromkeys((machine.name for machine in self.machines), self.rng.choice(alive)))
        found = self.reached(self.machines[0].name)
        self.simulation.log(f"the network is whole again, and leads to {found.name if found else 'nobody'}")
        if self.rng.random() < 0.5:
            self._cut_others()

    def _cut_others(self) -> None:
        """Cut connections of machines and workers to leaders that they do not reach any more."""
        for leader in self.leaders:
            for server in leader.servers:
                for link in server.peers:
                    if self.reached(link.host.partition("-")[0]) is not leader:
                        link.cut()

    def _fault(self) -> None:
        rng, now = self.rng, self.simulation.now
        if self.nodes.over:
            return
        machine = rng.choice(self.machines)
        alive = [worker for worker in self.nodes.workers.values() if not worker.dead]
        kinds = ["kill agent", "power", "cut agent", "silence", "leave"]
        kind = rng.choice([*kinds, "kill", "kill", "cut", "stop"] if alive else kinds)
        victim: Any = rng.choice(alive) if alive else None
        of_worker = kind in ("kill", "cut", "stop")
        self.simulation.log(f"fault: {kind} {victim.number if of_worker else machine.name}")
        match kind:
            case "kill":
                victim.die(137)
            case "cut":
                victim.cut()
            case "stop":
                victim.stopped_until = max(victim.stopped_until, now + rng.choice([1.0, 8.0, 60.0]))
            case "kill agent":
                machine.kill_agent()
            case "power":
                machine.die()
            case "cut agent":
                machine.cut()
            case "leave":
                machine.leave()
            case "silence":
                self.network.silence(machine.name, now + rng.choice([0.5, 5.0, 25.0]))
        if rng.random() < 0.7:  # the platform restarts it
            self.simulation.after(rng.choice([0.1, 2.0, 15.0]), machine.boot)

    @contextlib.contextmanager
    def _in_this_world(self) -> Iterator[None]:
        clock = self.simulation
        times = SimpleNamespace(monotonic=clock.monotonic, time=clock.time, sleep=pause)
        threads = SimpleNamespace(Condition=Condition, Event=Event, Thread=Thread, Lock=threading.Lock)
        queues = SimpleNamespace(SimpleQueue=SimpleQueue, Empty=queue.Empty)
        published = Rendezvous.publish
        dismissed = Rendezvous._dismiss

        def publish(meeting: Any, generation: int, worlds: Any) -> None:
            meeting._server.owner.referee.publish(generation, dict(worlds))
            published(meeting, generation, worlds)

        def dismiss(meeting: Any, worker: int, *rest: Any) -> None:
            dismissed(meeting, worker, *rest)
            meeting._server.owner.referee.given_up.setdefault(worker, clock.now)

        replaced: dict[Any, dict[str, Any]] = {
            agents: {"time": times, "threading": threads, "Server": LeadersServer},
            succession: {"time": times},
            agent: {"threading": threads, "queue": queues, "os": self.descriptors},
            agent_session: {"time": times, "connect": connect, "Agent": SimulatedAgent},
            leaders: {
                "time": times,
                "threading": threads,
                "connect": connect,
                "sys": SimpleNamespace(stderr=io.StringIO()),
            },
            launcher: {"time": times, "threading": threads, "queue": queues},
            session: {"time": times, "threading": threads},
            key_value_store: {"Server": LeadersServer},
            loop: {"queue": queues},
            Rendezvous: {"publish": publish, "_dismiss": dismiss},
        }
        with super()._in_this_world(), contextlib.ExitStack() as stack:
            for place, others in replaced.items():
                for name, other in others.items():
                    stack.enter_context(mock.patch.object(place, name, other))
            yield


def played_all(seeds: Iterable[int]) -> list[Run]:
    return [played(Run, seed) for seed in seeds]


def test_invariants_hold_under_random_faults(request: pytest.FixtureRequest):
    seed = request.config.getoption("--seed")
    runs = played_all(range(request.config.getoption("--seeds") // 2) if seed is None else [seed])
    if len(runs) >= 100:
        done = sum(run.outcome == "done" for run in runs)
        assert 0.3 * len(runs) < done < 0.98 * len(runs), done
        assert sum(len(run.leaders) > 1 for run in runs) > 0.7 * len(runs), "leaders die"


_accept, _wait_until = leaders.LeaderLink._accept, Agents.wait_until


def _forget(link: leaders.LeaderLink, session: Any, message: Any) -> None:
    before = link._memory
    _accept(link, session, message)
    link._memory = before


RULES = {
    "an agent forgets what it was told": (leaders.LeaderLink, "_accept", _forget),
    "a leader begins anew": (Succession, "_newest", lambda _: None),
    "a leader acts before its agents remember": (
        Agents,
        "wait_until",
        lambda agents, happened, limit_s: None if limit_s is None else _wait_until(agents, happened, limit_s),
    ),
    "the lineage of a state is not looked at": (Succession, "_descends", lambda *_: True),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_invariant_is_detected(rule: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(*RULES[rule])
    monkeypatch.setattr(Run, "feuds", 1.0)
    with pytest.raises(AssertionError, match=r"seed \d+: "):
        played_all(range(100))


def test_a_seed_replays_exactly():
    for seed in range(3):
        one, other = played(Run, seed), played(Run, seed)
        assert (one.simulation.trace, one.outcome) == (other.simulation.trace, other.outcome)
