"""Joining nodes in virtual time: the real sessions of agents, and the real `Agents`, `AgentHandle` and
`HostLauncher`.

Sockets, pipes, threads, a machine's processes, and the agent's loop over them (`SimulatedAgent`), which starts
`simulated_workers` as ordered, are simulated.
"""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from fibers import Condition, Fiber, KilledError, Process, pause
from simulated_workers import Worker
from simulator import Message, Network, Simulation, VirtualServer

from hora.launch.agent import session
from hora.launch.agent.agent import LEFT
from hora.launch.agent.protocol import (
    MESSAGES,
    Exited,
    Finish,
    Finished,
    Join,
    Leaving,
    Ping,
    Quit,
    Start,
    Started,
    Terminate,
)
from hora.launch.agent.protocol import (
    Message as Report,
)
from hora.net.messages import Frames, Pong, frame
from hora.net.wire import Credentials
from hora.platforms.detect import detect_world
from hora.platforms.node import Node

CUT_LIMIT_S = 30.0  # how long a connection stays silent before the kernel closes it
START_LIMIT_S = 60.0
AGENTS_GRACE_S = 5.0
REASONABLE_END_S = 300.0
CREDENTIALS = Credentials(bytes(32), "nodes")


# ---- pipes ----------------------------------------------------------------------------------------------------------


class Pipe:
    """A pipe, whose two ends are descriptors valid in all processes."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.written, self.read = True, True  # whether its ends are open
        self.changed = Condition()


class Descriptors:
    """Stands for those parts of `os` and `select` that handle pipes."""

    def __init__(self) -> None:
        self._ids = itertools.count(1_000_000)
        self._pipes: dict[int, Pipe] = {}
        self._changed = Condition()
        self._unblocked: set[int] = set()

    def pipe(self) -> tuple[int, int]:
        ends, pipe = (next(self._ids), next(self._ids)), Pipe()
        self._pipes.update(dict.fromkeys(ends, pipe))
        return ends

    def set_blocking(self, descriptor: int, blocking: bool) -> None:
        self._unblocked.add(descriptor)

    def _readable(self, descriptor: int) -> bool:
        pipe = self._pipes[descriptor]
        return bool(pipe.data) or not pipe.written

    def read(self, descriptor: int, num_bytes: int) -> bytes:
        if not self._readable(descriptor) and descriptor in self._unblocked:
            raise BlockingIOError
        self._changed.wait_for(lambda: self._readable(descriptor), None)
        pipe = self._pipes[descriptor]
        data = bytes(pipe.data[:num_bytes])
        del pipe.data[:num_bytes]
        return data

    def write(self, descriptor: int, data: bytes) -> int:
        pipe = self._pipes[descriptor]
        if not pipe.read:
            raise BrokenPipeError
        pipe.data += data
        self._changed.notify_all()
        return len(data)

    def close(self, descriptor: int) -> None:
        pipe = self._pipes[descriptor]
        if descriptor % 2:
            pipe.written = False
        else:
            pipe.read = False
        self._changed.notify_all()

    def select(
        self, reading: Iterable[int], _: object, __: object, limit_s: float | None
    ) -> tuple[list[int], Any, Any]:
        waiting = list(reading)
        self._changed.wait_for(lambda: any(self._readable(one) for one in waiting), limit_s)
        return [one for one in waiting if self._readable(one)], [], []


# ---- sockets --------------------------------------------------------------------------------------------------------


class NodesServer(VirtualServer):
    """Stands for the server of `Agents` in the launcher's process."""

    here: NodesServer

    def __init__(self, handler: Any, *, name: str, silence_limit_s: int) -> None:
        rendezvous = getattr(VirtualServer, "made", None)
        super().__init__(handler, name=name)
        VirtualServer.made = rendezvous  # type: ignore[assignment]
        NodesServer.here = self


class SimulatedConnection:
    """A client's end of a connection, with the interface of `hora.net.wire.Connection`."""

    def __init__(self, server: VirtualServer, name: str, address: str) -> None:
        self._inbox: list[Message | None] = []
        self._changed = Condition()
        self.link = server.connect(-1, name, self._heard)
        self.link.sock = SimpleNamespace(getsockname=lambda: (address, 1))  # type: ignore[attr-defined]
        self.sock = SimpleNamespace(getpeername=lambda: (address, 1), settimeout=lambda limit_s: None)

    def _heard(self, message: Message | None) -> None:
        self._inbox.append(message)
        self._changed.notify_all()

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        if not self.link.connected:
            raise BrokenPipeError
        self.link.say(dict(header), bytes(payload))

    def receive(self, *, limit_s: float | None = None) -> Message:
        if not self._changed.wait_for(lambda: self._inbox, limit_s):
            raise TimeoutError
        message = self._inbox.pop(0)
        if message is None:
            self._inbox.append(None)
            raise EOFError("the server closed the connection")
        return dict(message[0]), message[1]

    def shutdown(self) -> None:
        self.link.hang_up()
        self._inbox.append(None)
        self._changed.notify_all()


class NodeConnection(SimulatedConnection):
    """An agent's end of a connection."""

    def __init__(self, machine: Machine, server: VirtualServer) -> None:
        self._machine = machine
        super().__init__(server, machine.name, "10.0.0.1")
        machine.connections.append(self)

    def _heard(self, message: Message | None) -> None:
        if not self._machine.agent_dead:
            super()._heard(message)

    def close(self) -> None:
        self.link.hang_up()

    def __enter__(self) -> NodeConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(where: tuple[str, int], credentials: Credentials, *, timeout_s: float) -> NodeConnection:
    """Stands for `hora.net.wire.connect`: takes a round trip, or raises an error."""
    assert Process.current is not None
    machine = Process.current.machine  # type: ignore[attr-defined]
    clock = machine.simulation
    late = max(machine.network.silent_until(machine.name) - clock.now, 0.0) + clock.rng.expovariate(100.0)
    pause(min(late, timeout_s))
    if late > timeout_s:
        raise TimeoutError(where)
    if NodesServer.here._closed:
        raise ConnectionRefusedError(where)
    return NodeConnection(machine, NodesServer.here)


# ---- a machine's processes ------------------------------------------------------------------------------------------


class Machine:
    """A node, or the launcher's own machine, with its agents and workers."""

    def __init__(self, world: Nodes, name: str, slots: int, index: int) -> None:
        self.world, self.name, self.slots, self.index = world, name, slots, index
        self.simulation, self.network = world.simulation, world.network
        self.connections: list[NodeConnection] = []
        self.agents: list[SimulatedAgent] = []
        self.process: Process | None = None  # of its current agent
        self.told: list[str] = []  # how each of its agents ended

    @property
    def agent_dead(self) -> bool:
        return self.process is None or self.process.dead

    @property
    def dead(self) -> bool:
        return self.agent_dead and all(agent.dead for agent in self.agents)

    def boot(self) -> None:
        """Start an agent, as the platform does."""
        if self.agent_dead and not self.world.over:
            self.simulation.log(f"{self.name} starts its agent")
            self.process = Process(self.simulation, self.name)
            self.process.machine = self  # type: ignore[attr-defined]
            Fiber(self.process, self._serve)

    def _serve(self) -> None:
        place = Node(
            num_nodes=self.world.num_nodes + 1,
            index=self.index,
            host="10.0.0.1",
            port=1,
            slots=self.slots,
            name=self.name,
        )
        try:
            said = f"status {session.serve(place, CREDENTIALS, limit_s=START_LIMIT_S)}"
        except (RuntimeError, OSError) as error:
            said = f"{type(error).__name__}: {error}"
        self.told.append(said)
        self.simulation.log(f"{self.name}: its agent ends, {said}")
        assert self.process is not None
        self.process.dead = True
        self._hang_up()

    def _hang_up(self) -> None:
        """Close the connections of the dead agent."""
        for connection in self.connections:
            connection.link.hang_up()

    def kill_agent(self) -> None:
        if not self.agent_dead:
            assert self.process is not None
            self.told.append("killed")
            self.process.end()
            self._hang_up()
            for agent in self.agents:
                agent.end_workers()

    def die(self) -> None:
        """Cut the power: no process says goodbye, and the launcher's kernel detects it only after a while."""
        for connection in self.connections:
            connection.link.connected = False
            connection.link.error = TimeoutError()
            self.simulation.after(CUT_LIMIT_S, connection.link.close)
        self.connections = []
        for agent in self.agents:
            agent.end_workers(unseen_s=CUT_LIMIT_S)
        if not self.agent_dead:
            assert self.process is not None
            self.told.append("lost its power")
            self.process.end()

    def cut(self) -> None:
        for connection in self.connections:
            connection.link.cut()

    def leave(self) -> None:
        """Send SIGTERM to the agent, whose ranks leave first if the job is elastic."""
        if self.agent_dead:
            return
        serving = [agent for agent in self.agents if not agent.dead and agent.process is self.process]
        if not serving:  # it has not joined yet, so SIGTERM ends it at once
            self.kill_agent()
            return
        assert self.process is not None
        self.process.later(0.0, serving[0].asked_to_end)


class SimulatedAgent:
    """Stands for `Agent`: its loop, and the processes of its machine."""

    def __init__(self, link: Any, **_: object) -> None:
        assert Process.current is not None
        self.process = Process.current
        self.machine: Machine = self.process.machine  # type: ignore[attr-defined]
        self.name = f"agent of {self.machine.name}"
        self.simulation, self.world = self.machine.simulation, self.machine.world
        self.link = link
        self.workers: dict[int, Worker] = {}
        self._asked: set[int] = set()  # workers to start
        self._untold = 0  # exits of workers not yet reported to the controller
        self._heard = float("inf")
        self._status: int | None = None
        self._ending = self._finished = self._leaving = self._over = False
        self.machine.agents.append(self)

    @property
    def dead(self) -> bool:
        return (self._over or self.process.dead) and all(worker.dead for worker in self.workers.values())

    def run(self) -> int | None:
        while not self._done():
            limit_s = 0.02 if self._ending else 0.5
            if self.link.gone:
                pause(limit_s)
            else:
                self.world.descriptors.select([self.link.fileno()], [], [], limit_s)
            for message in self.link.receive():
                self._heard = self.simulation.now
                self._obey(message)
            self._look()
        self.link.close()
        self._over = True
        return LEFT if self._status is None and self._leaving else self._status

    def _look(self) -> None:
        limit_s = self.link.silence_limit_s
        if self.link.gone or (limit_s is not None and self.simulation.now > self._heard + limit_s):
            self.link.gone = True
            self._end(AGENTS_GRACE_S)
        if self._leaving and not self._asked and all(worker.dead for worker in self.workers.values()):
            self._status = LEFT if self._status is None else self._status
            self._end(AGENTS_GRACE_S)

    def _done(self) -> bool:
        if not self._ending or self._untold or not all(worker.dead for worker in self.workers.values()):
            return False
        if not self._finished:
            self._finished = True
            self.link.send(Finished())
        return self._status is not None or self.link.gone

    def asked_to_end(self) -> None:
        """Handle SIGTERM."""
        if self.link.elastic and not self._leaving:
            self._leaving = True
            self.link.send(Leaving())
        elif not self._ending:
            self._status = 143
            self._end(AGENTS_GRACE_S)

    def _obey(self, message: Report) -> None:
        match message:
            case Start(number):
                self.world.ordered(self, message)
                if self._finished and self._status is None and not self.link.gone:  # the next leader goes on
                    self._ending = self._finished = False
                if self._ending:
                    self.link.send(Exited(number, 143, "the job was ending already"))
                    return
                self._asked.add(number)
                self.process.later(self.simulation.rng.uniform(0.01, 2.0), lambda: self._start(message))
            case Terminate(numbers, grace_s):
                for number in numbers:
                    self._terminate(number, grace_s)
            case Finish(grace_s):
                self._end(grace_s)
            case Ping():
                self.link.send(Pong())
            case Quit(status):
                self._status = status if self._status is None else self._status
                self._end(AGENTS_GRACE_S)

    def _start(self, order: Start) -> None:
        number = order.worker
        if number not in self._asked:
            return
        self._asked.remove(number)
        world = detect_world({**order.env, "HORA_SECRET_FILE": "/nowhere"})
        assert world.worker == number
        slot = SimpleNamespace(hostname=self.machine.name)
        spec = SimpleNamespace(worker=number, env=order.env, slot=slot, private_files=order.private_files)
        self.workers[number] = self.world.begin(spec, lambda code: self._ended(number, code))
        self.link.send(Started(number, 1))

    def _ended(self, number: int, code: int) -> None:
        self.simulation.log(f"worker {number} on {self.machine.name} has ended with code {code}")
        self._untold += 1
        self.process.later(self.simulation.rng.expovariate(50.0), lambda: self._exited(number, code))

    def _exited(self, number: int, code: int) -> None:
        self._untold -= 1
        self.link.send(Exited(number, code, ""))

    def _terminate(self, number: int, grace_s: float) -> None:
        if number in self._asked:
            self._asked.remove(number)
            self.link.send(Exited(number, 143, ""))
        process = self.workers.get(number)
        if process is not None and not process.dead:
            process.terminate()
            self.process.later(grace_s, lambda: process.die(137))

    def _end(self, grace_s: float) -> None:
        if not self._ending:
            self._ending = True
            for number in [*self._asked, *self.workers]:
                self._terminate(number, grace_s)

    def end_workers(self, **rest: float) -> None:
        """Kill the workers, as happens when the agent dies."""
        self._asked.clear()
        for worker in self.workers.values():
            worker.die(137, **rest)


class OwnProcess(Process):
    """Stands for the agent's process on the launcher's machine, and for both ends of its connection."""

    silence_limit_s = None
    elastic = False

    def __init__(self) -> None:
        assert Process.current is not None
        self.machine: Machine = Process.current.machine  # type: ignore[attr-defined]
        super().__init__(self.machine.simulation, f"agent of {self.machine.name}")
        self.descriptors = self.machine.world.descriptors
        (self._reports, self._tell), (self._orders, self._order) = self.descriptors.pipe(), self.descriptors.pipe()
        self.descriptors.set_blocking(self._orders, False)
        self._frames, self.gone = Frames(MESSAGES), False
        self.status: int | None = None
        self._changed = Condition()
        self.sock = self
        Fiber(self, self._live)

    def complaints(self) -> bytes:
        return b""

    def _live(self) -> None:
        before, Process.current = Process.current, self
        agent = SimulatedAgent(self)
        Process.current = before
        pause(self.simulation.rng.uniform(0.01, 0.3))
        self.send(Join(0, "", 0, "", [], []))
        self._finish(agent.run() or 0)

    def _finish(self, status: int) -> None:
        if self.status is None:
            self.status = status
            self.descriptors.close(self._tell)
            self._changed.notify_all()

    # The launcher's end.

    def sendall(self, data: bytes) -> None:
        if self.status is not None:
            raise BrokenPipeError
        self.descriptors.write(self._order, data)

    def recv(self, num_bytes: int) -> bytes:
        return self.descriptors.read(self._reports, num_bytes)

    def wait(self, timeout: float | None = None) -> int:
        if not self._changed.wait_for(lambda: self.status is not None, timeout):
            raise subprocess.TimeoutExpired("agent", timeout or 0.0)
        assert self.status is not None
        return self.status

    def kill(self) -> None:
        """Send SIGKILL, which also ends the workers."""
        if self.status is None:
            self.end()
            for agent in self.machine.agents:
                agent.end_workers()
            self._finish(-9)

    def hang_up(self) -> None:
        """Close the launcher's end, because the launcher has died."""
        self.descriptors.close(self._order)

    # The agent's end.

    def fileno(self) -> int:
        return self._orders

    def receive(self) -> list[Report]:
        try:
            data = self.descriptors.read(self._orders, 65536)
        except BlockingIOError:
            return []
        self.gone = self.gone or not data
        return self._frames.feed(data)

    def send(self, message: Report) -> None:
        if self.status is None:
            self.descriptors.write(self._tell, frame(message))

    def close(self) -> None: ...


class Nodes:
    """All machines of a run, and invariants of their workers."""

    def __init__(self, simulation: Simulation, network: Network, begin: Callable[..., Worker], num_nodes: int) -> None:
        self.simulation, self.network, self._begin, self.num_nodes = simulation, network, begin, num_nodes
        self.descriptors = Descriptors()
        self.over = False
        self.workers: dict[int, Worker] = {}
        self._orders: dict[int, SimulatedAgent] = {}
        rng = simulation.rng
        self.own = Machine(self, "host0", rng.randint(1, 2), 0)
        self.launcher = Process(simulation, "launcher")
        self.launcher.machine = self.own  # type: ignore[attr-defined]
        self.machines = [Machine(self, f"host{index}", rng.randint(1, 3), index) for index in range(1, num_nodes + 1)]

    def kill_launcher(self) -> None:
        """Send SIGKILL to the launcher, the process that runs the simulation: anything that it does afterwards has no
        effect.
        """
        self.over = True
        self.launcher.end()
        for server in (NodesServer.here, VirtualServer.made):
            server.close()
        for agent in self.own.agents:
            agent.link.hang_up()
        raise KilledError

    def ordered(self, agent: SimulatedAgent, order: Start) -> None:
        """Check an order to start a worker: no other agent got one for this worker, and it has its keys."""
        other = self._orders.setdefault(order.worker, agent)
        assert other is agent, f"worker {order.worker} is to be started by the {other.name} and by the {agent.name}"
        assert all(order.private_files.values()), "a worker without a key"

    def begin(self, spec: Any, ended: Callable[[int], None]) -> Worker:
        assert spec.worker not in self.workers, f"worker {spec.worker} was started twice"
        self.workers[spec.worker] = self._begin(spec, ended)
        return self.workers[spec.worker]

    def all_ended(self) -> bool:
        everything = [*self.machines, *self.own.agents, *self.workers.values()]
        return all(one.dead for one in everything)
