"""Leaders of a job whose state is in a store, under every kind of fault.

    python -m pytest tests/simulation/test_leaders.py --seed 4711     replay one seed exactly

Election loops, leaderships, the agents' connections and the store's client are real. The store is a virtual etcd, whose
answers are late or get lost, even after it has processed the request. A leader counts: it sends the number to all
agents, over the real `Agents`, and saves it. Invariants: no two processes lead at the same time; the store keeps
nothing that a deposed leader saves; no agent obeys a leader after it has obeyed a later one; no number is lost or
counted twice; and every process ends, with the job's status or an error.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import logging
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from fibers import Condition, Event, Fiber, KilledError, Process, SimpleQueue, Thread, pause
from simulated_nodes import Descriptors, SimulatedConnection
from simulator import Link, Message, Network, Simulation, VirtualServer, played

from hora.launch.agent import agent
from hora.launch.agent.protocol import Quit, Start
from hora.launch.controller import agents, launcher
from hora.launch.controller.agents import Agents
from hora.launch.ha import following, leadership, store
from hora.launch.ha.etcd import Etcd as EtcdStore
from hora.launch.ha.following import LeaderLink
from hora.launch.ha.leadership import ElectionLoop, Leadership
from hora.launch.ha.store import AuthenticatedStore
from hora.launch.job import LeadershipLostError
from hora.net import session
from hora.net.server import Timer
from hora.platforms.node import Node as NodePlace

SECRET = b"secret" * 6
LONGEST_RUN_S = 900.0  # of virtual time: longer than all limits together
LIMITS = {"elastic_timeout": 120, "start_timeout": 60, "launcher_timeout": 30}


class Etcd:
    """Keys with their create revisions, and leases."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._revision = 1
        self._keys: dict[str, tuple[str, int, int, int]] = {}  # key -> value, revision, lease, revision of the last put
        self._leases: dict[int, tuple[float, float]] = {}  # lease -> duration in seconds, time at which it expires
        self.saved: list[tuple[int, dict[str, Any]]] = []  # term of the leader, saved state

    def _expire(self) -> None:
        over = [lease for lease, (_, until) in self._leases.items() if until <= self._simulation.now]
        for lease in over:
            self._end(lease)

    def _end(self, lease: int) -> None:
        self._leases.pop(lease, None)
        self._keys = {key: entry for key, entry in self._keys.items() if entry[2] != lease}

    def answer(self, path: str, question: Any) -> dict[str, Any]:
        self._expire()
        match path:
            case "kv/range":
                first, end = (base64.b64decode(question[name]) for name in ("key", "range_end"))
                found = [item for item in self._keys.items() if first <= base64.b64decode(item[0]) < end]
                names = ("value", "create_revision", "lease", "mod_revision")
                return {"kvs": [{"key": k} | dict(zip(names, map(str, kv), strict=True)) for k, kv in found]}
            case "kv/txn":
                return self._transaction(question)
            case "lease/grant":
                lease, seconds = len(self._leases) + self._revision * 1000, float(question["TTL"])
                self._leases[lease] = seconds, self._simulation.now + seconds
                self._revision += 1
                return {"ID": str(lease)}
            case "lease/keepalive":
                seconds, _ = self._leases.get(int(question["ID"]), (0.0, 0.0))
                if seconds:
                    self._leases[int(question["ID"])] = seconds, self._simulation.now + seconds
                return {"result": {"TTL": str(int(seconds))} if seconds else {}}
            case "lease/revoke":
                self._end(int(question["ID"]))
                return {}
        raise AssertionError(path)

    def forge_leader(self, name: str) -> None:
        """Write the entry as a client that is not a node of the job: it then belongs to no lease."""
        key = next((key for key in self._keys if base64.b64decode(key).endswith(b"/leader")), None)
        if key is not None:
            self._revision += 1
            value = base64.b64encode(json.dumps({"name": name}).encode()).decode()
            self._keys[key] = value, self._keys[key][1], 0, self._revision

    def _transaction(self, question: Any) -> dict[str, Any]:
        (compare,), then = question["compare"], question["success"][0] if question["success"] else {}
        _, revision, _, last = self._keys.get(compare["key"], ("", 0, 0, 0))
        asked, value = ("mod_revision", last) if compare["target"] == "MOD" else ("create_revision", revision)
        if value != int(compare[asked]):
            return {"succeeded": False, "header": {"revision": str(self._revision)}}
        self._revision += bool(then)
        if "requestPut" in then:
            put = then["requestPut"]
            lease = int(put.get("lease", 0))
            assert not lease or lease in self._leases, "a key under a lease that is over"
            before = self._keys.get(put["key"])
            made = self._revision if before is None else before[1]
            self._keys[put["key"]] = put["value"], made, lease, self._revision
            if base64.b64decode(put["key"]).endswith(b"/state"):
                self.saved.append((revision, json.loads(json.loads(base64.b64decode(put["value"]))["text"])))
        elif then:
            self._keys.pop(then["requestDeleteRange"]["key"], None)
        return {"succeeded": True, "header": {"revision": str(self._revision)}}


class LeadersServer(VirtualServer):
    """Stands for the server of a leader's `Agents`, which is idle while its process is stopped."""

    listening: dict[int, LeadersServer]  # the servers of this run, by port

    def __init__(self, handler: Any, *, name: str, silence_limit_s: int) -> None:
        assert Fiber.current is not None
        self._owner = Fiber.current.process
        assert isinstance(self._owner, Node)
        super().__init__(handler, name=name)
        self._owner.servers.append(self)

    def listen(self, where: tuple[str, int]) -> int:
        port = len(self.listening) + 1
        self.listening[port] = self
        return port

    def call(self, function: Callable[[], None]) -> None:
        self._owner.later(self.simulation.rng.expovariate(2000.0), lambda: None if self._closed else function())

    def call_at(self, deadline: float, function: Callable[[], None]) -> Timer:
        timer = Timer(function)
        late_s = max(deadline - self.simulation.now, 0.0)
        self._owner.later(late_s, lambda: None if self._closed else timer.run())
        return timer

    def take(self, link: Link, header: dict[str, Any], payload: bytes) -> None:
        self._owner.later(0.0, lambda: super(LeadersServer, self).take(link, header, payload))

    def drop(self, link: Link) -> None:
        self._owner.later(0.0, lambda: super(LeadersServer, self).drop(link))


class Line(SimulatedConnection):
    """An agent's end of a connection to a leader."""

    def __init__(self, server: LeadersServer, owner: Kept) -> None:
        self._owner = owner
        super().__init__(server, owner.name, "leader")
        owner.lines.append(self)

    def _heard(self, message: Message | None) -> None:
        self._owner.later(0.0, lambda: super(Line, self)._heard(message))

    close = SimulatedConnection.shutdown


def connect(where: tuple[str, int], credentials: object, *, timeout_s: float) -> Line:
    assert Fiber.current is not None
    owner = Fiber.current.process
    assert isinstance(owner, Kept)
    pause(owner.simulation.rng.expovariate(100.0))
    server = LeadersServer.listening[where[1]]
    if server._closed or server._owner.dead:
        raise ConnectionRefusedError(where)
    return Line(server, owner)


class Kept(Process):
    """A node's agent, from start to end. It outlives the process that started it, and checks its orders."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.simulation, f"agent {node.index}")
        self.node, self.status = node, ""
        self.lines: list[Line] = []
        self._obeyed = (0, 0)  # term, number
        Fiber(self, self._live)

    def _live(self) -> None:
        node = {"node": self.node.index, "name": f"host{self.node.index}", "slots": 1}
        store = AuthenticatedStore(EtcdStore.from_url("etcd://store").below(self.node.job), SECRET)
        limits = {"leaderless_s": 120.0, "orphaned_s": 30.0, "poll_s": 1.0}
        link = LeaderLink(node, SECRET, store, orphaned=lambda: self.node.dead, **limits)
        link.start()
        status = None
        while status is None and not link.gone:
            self.node.world.descriptors.select([link.fileno()], [], [], 1.0)
            for message in link.receive():
                match message:
                    case Start():
                        self._obey(int(message.env["TERM"]), message.worker, message.env["RUN"])
                    case Quit():
                        status = message.status
        link.close()
        self.status = "" if status is None else str(status)
        self.simulation.log(f"{self.name} ends: {status}")
        self.dead = True

    def _obey(self, term: int, number: int, run: str) -> None:
        """Check an order: it must not come from an earlier leader than the last one executed."""
        assert term >= self._obeyed[0], f"{self.name} obeys term {term} after term {self._obeyed[0]}"
        if run == self.node.world.run_of(term):
            assert (term, number) >= self._obeyed or number == 1, f"{self.name} counts {number} after {self._obeyed}"
        self._obeyed = term, number
        self.node.world.num_obeyed += 1


class Node(Process):
    """The process of a node with its election loop, from start to end."""

    def __init__(self, world: Run, index: int) -> None:
        super().__init__(world.simulation, f"node {index}")
        self.world, self.index, self.outcome = world, index, ""
        self.cut_until = 0.0  # disconnected from the store until then
        self.servers: list[LeadersServer] = []
        self.agent: Kept | None = None
        self.job = ""
        Fiber(self, self._live)

    def _live(self) -> None:
        pause(self.simulation.rng.expovariate(0.5))
        options = SimpleNamespace(effective=LIMITS.__getitem__)
        place = NodePlace(num_nodes=9, index=self.index, host="first", name=self.name)
        try:
            one = ElectionLoop(options, {"HORA_STORE": "etcd://store"}, place, SECRET)  # type: ignore[arg-type]
            self.job = one._job
            self.outcome = f"status {one.run(self._lead)}"
        except RuntimeError as error:
            self.outcome = str(error)
        self.world.simulation.log(f"{self.name} ends: {self.outcome}")
        self.dead = True

    @contextlib.contextmanager
    def keeps(self) -> Iterator[SimpleNamespace]:
        """Stands for `ElectionLoop._agent`."""
        self.agent = kept = Kept(self)
        said = SimpleNamespace(read=lambda: kept.status.encode())
        yield SimpleNamespace(poll=lambda: 0 if kept.dead else None, terminate=lambda: None, stdout=said)

    def _lead(self, term: Leadership) -> None:
        world = self.world
        world.leading[self.index], world.runs[term.term] = term, term.run
        number = 0 if term.state is None else int(term.state["count"])
        world.simulation.log(f"{self.name} leads, term {term.term}, from {number}")
        limits = {"num_nodes": 9, "silence_limit_s": 20.0, "elastic": True, "return_s": 30.0}
        nodes = Agents((self.name, 0), SECRET, nonce=term.run, term=term.term, **limits)
        try:
            term.put("where", {"host": self.name, "port": nodes.port, "term": term.term})
            while number < world.goal:
                pause(self.simulation.rng.expovariate(1.0))
                term.check()
                world.commands(self)
                number += 1
                env = {"TERM": str(term.term), "RUN": term.run}
                order = Start(number, ["note"], env, inherit_env=True, cwd=None, private_files={}, preload=None)
                for host in nodes.hosts():
                    nodes.agent(host.hostname).send(order)
                term.put("state", {"run": term.run, "count": number})
            nodes.dismiss(0)
        except LeadershipLostError:
            nodes.abandon()
            nodes.dismiss(1)
            raise
        finally:
            del world.leading[self.index]

    def kill(self) -> None:
        self.outcome = "killed"
        self.world.leading.pop(self.index, None)
        self.end()
        for server in self.servers:
            server.close()


class Run:
    """One job, and the processes of its nodes."""

    def __init__(self, seed: int) -> None:
        self.simulation = Simulation(seed)
        self.rng = self.simulation.rng
        self.goal = self.rng.randint(3, 30)
        self.etcd = Etcd(self.simulation)
        self.leading: dict[int, Leadership] = {}
        self.runs: dict[int, str] = {}  # by term
        self.nodes: list[Node] = []
        self.descriptors = Descriptors()
        self.num_obeyed = 0

    def to_the_end(self) -> None:
        rng, simulation = self.rng, self.simulation
        with self._in_this_world():
            self.nodes = [Node(self, index) for index in range(rng.randint(1, 4))]
            for _ in range(rng.choice([0, 1, 2, 4, 8])):
                simulation.after(rng.uniform(0.0, 60.0), self._fault)
            try:
                limit = simulation.now + LONGEST_RUN_S
                ended = simulation.run_until(lambda: all(one.dead for one in self._processes()), limit)
                assert ended, f"{[one.name for one in self._processes() if not one.dead]} wait for ever"
                self._judge()
            finally:
                for process in self._processes():
                    process.end()

    def _processes(self) -> list[Process]:
        return [*self.nodes, *(node.agent for node in self.nodes if node.agent is not None)]

    def run_of(self, term: int) -> str:
        return self.runs[term]

    def commands(self, node: Node) -> None:
        """Check, when a leader is about to give orders, that no other process can."""
        for index, term in self.leading.items():
            with contextlib.suppress(LeadershipLostError):
                term.check()
                assert index == node.index, f"node {index} and {node.name} lead at the same time"

    def _judge(self) -> None:
        saved = self.etcd.saved
        terms = [term for term, _ in saved]
        assert terms == sorted(terms), "a leader of the past has saved something"
        runs = list(dict.fromkeys(state["run"] for _, state in saved))
        for run in runs:
            counts = [state["count"] for _, state in saved if state["run"] == run]
            steps = [after - before for before, after in zip([0, *counts], counts, strict=False)]
            assert set(steps) <= {0, 1}, f"numbers were lost or counted twice: {counts}"
        if any(node.outcome == "status 0" for node in self.nodes):
            assert any(state["count"] == self.goal for _, state in saved)
        for node in self.nodes:
            words = (
                "status 0",
                "killed",
                "the store (HORA_STORE) has not answered",
                "no member of the store",
                "the agent",
            )
            assert node.outcome.startswith(words), node.outcome

    def _fault(self) -> None:
        rng, now = self.rng, self.simulation.now
        alive = [node for node in self.nodes if not node.dead]
        if not alive:
            return
        leaders = [node for node in alive if node.index in self.leading]
        node, kind = (
            rng.choice(leaders if leaders and rng.random() < 0.6 else alive),
            rng.choice(["kill", "stop", "cut", "forge"]),
        )
        self.simulation.log(f"fault: {kind} {node.name}")
        match kind:
            case "kill":
                node.kill()
            case "stop":
                node.stopped_until = max(node.stopped_until, now + rng.choice([1.0, 4.0, 30.0]))
            case "forge":
                self.etcd.forge_leader(node.name)
            case "cut":
                node.cut_until = max(node.cut_until, now + rng.choice([0.5, 2.0, 5.0, 40.0]))

    def post(self, path: str, question: Any) -> tuple[int, dict[str, Any]]:
        """Send one request to the virtual etcd from the current process."""
        assert Fiber.current is not None
        rng, process = self.rng, Fiber.current.process
        if process.dead:
            raise KilledError
        node = process.node if isinstance(process, Kept) else process
        assert isinstance(node, Node)
        pause(rng.expovariate(100.0))
        if self.simulation.now < node.cut_until:
            pause(2.0)
            raise TimeoutError("timed out")
        answer = self.etcd.answer(path, json.loads(json.dumps(question)))
        pause(rng.expovariate(100.0) if rng.random() < 0.98 else rng.uniform(0.0, 3.0))
        if self.simulation.now < node.cut_until or rng.random() < 0.02:
            pause(1.0)
            raise TimeoutError("timed out")  # although the request was processed
        return 200, answer

    @contextlib.contextmanager
    def _in_this_world(self) -> Iterator[None]:
        clock, pipes = self.simulation, self.descriptors
        VirtualServer.simulation, VirtualServer.network, LeadersServer.listening = clock, Network(), {}
        times = SimpleNamespace(
            monotonic=clock.monotonic, sleep=pause, CLOCK_BOOTTIME=7, clock_gettime=lambda _: clock.now
        )
        threads = SimpleNamespace(Condition=Condition, Event=Event, Thread=Thread, Lock=threading.Lock)
        queues = SimpleNamespace(SimpleQueue=SimpleQueue, Empty=queue.Empty)
        relay = SimpleNamespace(set_target=lambda where: None, close=lambda: None, name="here")
        common = {"time": times, "threading": threads}
        replaced: dict[Any, dict[str, Any]] = {
            leadership: common | {"ended_by_signals": lambda: contextlib.nullcontext(SimpleNamespace(first=None))},
            store: {"time": times},
            session: common,
            agents: common | {"Server": LeadersServer},
            launcher: common | {"queue": queues},
            following: common | {"queue": queues, "connect": connect, "Relay": lambda: relay, "own_address": str},
            agent: {"threading": threads, "os": pipes},
            sys: {"stderr": io.StringIO()},
            ElectionLoop: {"_agent": lambda _: Fiber.current.process.keeps()},
            EtcdStore: {"_post": lambda _, member, path, question, token: self.post(path, question)},
            logging.getLogger("hora.launch"): {"disabled": True},
        }
        with contextlib.ExitStack() as stack:
            for place, others in replaced.items():
                for name, other in others.items():
                    stack.enter_context(mock.patch.object(place, name, other))
            yield


def played_all(seeds: Iterable[int]) -> None:
    for seed in seeds:
        played(Run, seed)


def test_invariants_hold_under_random_faults(request: pytest.FixtureRequest):
    seed = request.config.getoption("--seed")
    played_all(range(request.config.getoption("--seeds") // 2) if seed is None else [seed])


@pytest.mark.parametrize("rule", ["a stopped leader goes on", "the store takes what any leader says"])
def test_a_broken_invariant_is_detected(rule: str, monkeypatch: pytest.MonkeyPatch):
    if rule == "a stopped leader goes on":
        monkeypatch.setattr(Leadership, "check", lambda _: None)
    else:
        monkeypatch.setattr(Leadership, "check", lambda _: None)
        put = EtcdStore.put

        def anyhow(store: EtcdStore, key: str, value: Any, *, term: int, lasting_s: int = 0) -> bool:
            return put(store, key, value, term=store.read().term or term, lasting_s=lasting_s)

        monkeypatch.setattr(EtcdStore, "put", anyhow)
        monkeypatch.setattr(Run, "commands", lambda *_: None)
    with pytest.raises(AssertionError, match=r"seed \d+: "):
        played_all(range(300))


def test_a_seed_replays_exactly():
    for seed in range(10):
        assert played(Run, seed).simulation.trace == played(Run, seed).simulation.trace
