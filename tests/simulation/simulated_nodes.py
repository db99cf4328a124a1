"""Nodes that come by themselves, in virtual time: the real agents, and the real `Agents`, `HostLauncher` and
`HostConnection`.

What is played: sockets, pipes, threads, a machine's processes, and its supervisor (`Supervisor`), which starts
`simulated_workers` by the orders that reach it.
"""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from fibers import Condition, Fiber, KilledError, Process, pause
from simulated_workers import Worker
from simulator import Message, Network, Simulation, VirtualServer

from hora.launch.agent import node as agent
from hora.launch.agent.supervisor import ALIVE, EXITED, FRAME, MARK, NO_WORKER, STARTED
from hora.launch.providers.platforms import Place
from hora.net.wire import Credentials
from hora.world import World

CUT_LIMIT_S = 30.0  # of silence, after which a kernel takes a connection for cut
START_LIMIT_S = 60.0
SUPERVISORS_GRACE_S = 5.0
REASONABLE_END_S = 300.0
CREDENTIALS = Credentials(bytes(32), "nodes")


# ---- pipes ----------------------------------------------------------------------------------------------------------


class Pipe:
    """Both ends of it, which are descriptors in all processes."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.written, self.read = True, True  # its ends are open
        self.changed = Condition()


class Descriptors:
    """Stands for the parts of `os`, `select` and `selectors` that have to do with pipes."""

    EVENT_READ = 1

    def __init__(self) -> None:
        self._ids = itertools.count(1_000_000)
        self._pipes: dict[int, Pipe] = {}
        self._changed = Condition()
        self._unblocked: set[int] = set()

    def pipe(self) -> tuple[int, int]:
        ends, pipe = (next(self._ids), next(self._ids)), Pipe()
        self._pipes.update(dict.fromkeys(ends, pipe))
        return ends

    def fdopen(self, descriptor: int, *_: object, **__: object) -> File:
        return File(self, descriptor)

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

    def DefaultSelector(self) -> Selector:  # noqa: N802
        return Selector(self)


class File:
    """A pipe's end as a file."""

    def __init__(self, descriptors: Descriptors, descriptor: int) -> None:
        self._descriptors, self._descriptor = descriptors, descriptor

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        self._descriptors.close(self._descriptor)


class Selector:
    """Stands for a selector of pipes' ends to read from."""

    def __init__(self, descriptors: Descriptors) -> None:
        self._descriptors = descriptors
        self._keys: dict[int, SimpleNamespace] = {}

    def __enter__(self) -> Selector:
        return self

    def __exit__(self, *_: object) -> None: ...

    def register(self, descriptor: int, _: object) -> None:
        self._keys[descriptor] = SimpleNamespace(fd=descriptor)

    def unregister(self, descriptor: int) -> None:
        del self._keys[descriptor]

    def get_map(self) -> dict[int, SimpleNamespace]:
        return self._keys

    def select(self) -> list[tuple[SimpleNamespace, int]]:
        ready, _, _ = self._descriptors.select(self._keys, [], [], None)
        return [(self._keys[one], 1) for one in ready]


# ---- sockets --------------------------------------------------------------------------------------------------------


class NodesServer(VirtualServer):
    """Stands for the server of `Agents`, in the launcher's process."""

    here: NodesServer

    def __init__(self, handler: Any, *, name: str, silence_limit_s: int) -> None:
        rendezvous = getattr(VirtualServer, "made", None)
        super().__init__(handler, name=name)
        VirtualServer.made = rendezvous  # type: ignore[assignment]
        NodesServer.here = self


class SimulatedConnection:
    """A client's end of a connection, as `hora.net.connection.Connection`."""

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

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        super().__init__(NodesServer.here, machine.name, "10.0.0.1")
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
    """Stands for `hora.net.connection.connect`: a round trip, or an error."""
    assert Process.current is not None
    machine = Process.current.machine  # type: ignore[attr-defined]
    clock = machine.simulation
    late = max(machine.network.silent_until(machine.name) - clock.now, 0.0) + clock.rng.expovariate(100.0)
    pause(min(late, timeout_s))
    if late > timeout_s:
        raise TimeoutError(where)
    if NodesServer.here._closed:
        raise ConnectionRefusedError(where)
    return NodeConnection(machine)


# ---- a machine's processes ------------------------------------------------------------------------------------------


class Machine:
    """A node, or the first one, where the launcher runs; its agent, supervisors and workers."""

    def __init__(self, world: Nodes, name: str, slots: int, index: int) -> None:
        self.world, self.name, self.slots, self.index = world, name, slots, index
        self.simulation, self.network = world.simulation, world.network
        self.connections: list[NodeConnection] = []
        self.supervisors: list[Supervisor] = []
        self.agent: Process | None = None
        self.signals: Any = None
        self.told: list[str] = []  # how its agents have ended

    @property
    def agent_dead(self) -> bool:
        return self.agent is None or self.agent.dead

    @property
    def dead(self) -> bool:
        return self.agent_dead and all(one.dead for one in self.supervisors)

    def boot(self) -> None:
        """Start an agent, as the platform does."""
        if self.agent_dead and not self.world.over:
            self.simulation.log(f"{self.name} starts its agent")
            self.agent = Process(self.simulation, self.name)
            self.agent.machine = self  # type: ignore[attr-defined]
            Fiber(self.agent, self._serve)

    def _serve(self) -> None:
        place = Place(
            num_nodes=self.world.num_nodes + 1,
            index=self.index,
            host="10.0.0.1",
            port=1,
            slots=self.slots,
            name=self.name,
        )
        try:
            said = f"status {agent.join(place, CREDENTIALS, limit_s=START_LIMIT_S)}"
        except (RuntimeError, OSError) as error:
            said = f"{type(error).__name__}: {error}"
        self.told.append(said)
        self.simulation.log(f"{self.name}: its agent ends, {said}")
        assert self.agent is not None
        self.agent.dead = True
        self._orphan()

    def _orphan(self) -> None:
        """Its agent is no more: what it held is closed."""
        for connection in self.connections:
            connection.link.hang_up()
        for supervisor in self.supervisors:
            supervisor.close_input()

    def kill_agent(self) -> None:
        if not self.agent_dead:
            assert self.agent is not None
            self.told.append("killed")
            self.agent.end()
            self._orphan()

    def die(self) -> None:
        """The power fails: nobody says good-bye, and the launcher's kernel finds out in its time."""
        for connection in self.connections:
            connection.link.connected = False
            connection.link.broken = True
            self.simulation.after(CUT_LIMIT_S, lambda link=connection.link: NodesServer.here.drop(link))
        self.connections = []
        for supervisor in self.supervisors:
            for worker in supervisor.workers.values():
                worker.die(137, unseen_s=CUT_LIMIT_S)
            supervisor.die()
        if not self.agent_dead:
            assert self.agent is not None
            self.told.append("lost its power")
            self.agent.end()

    def cut(self) -> None:
        for connection in self.connections:
            connection.link.cut()

    def leave(self) -> None:
        """SIGTERM to its agent: elastic jobs let its ranks leave first."""
        first = None if self.signals is None else self.signals.first
        if self.agent_dead:
            return
        if first is None:
            self.kill_agent()
            return
        assert self.agent is not None
        self.signals.first = None
        before, Process.current = Process.current, self.agent
        first()
        Process.current = before

    @contextmanager
    def signalled(self) -> Iterator[SimpleNamespace]:
        """Stands for `ended_by_signals`."""
        self.signals = SimpleNamespace(first=None)
        yield self.signals
        self.signals = None


class Supervisor(Process):
    """Stands for a supervisor's process: `subprocess.Popen` of its command gives one."""

    def __init__(self, command: Iterable[str], **_: object) -> None:
        assert Process.current is not None
        self.machine: Machine = Process.current.machine  # type: ignore[attr-defined]
        super().__init__(self.machine.simulation, f"supervisor of {self.machine.name}")
        self.world = self.machine.world
        *_, last = command
        self._silence_limit_s = float(last) if last.replace(".", "").isdecimal() else None
        self._heard = float("inf")
        self.descriptors = self.world.descriptors
        (out, self._out), (err, self._err) = self.descriptors.pipe(), self.descriptors.pipe()
        self.stdout, self.stderr = File(self.descriptors, out), File(self.descriptors, err)
        self.stdin = self  # it takes orders
        self.pid = self.world.new_pid(self)
        self.workers: dict[int, Worker] = {}
        self._asked: set[int] = set()  # to be started
        self._ending, self._open = False, True
        self._changed = Condition()
        self.status: int | None = None
        self.machine.supervisors.append(self)
        self.later(self.simulation.rng.uniform(0.01, 0.3), lambda: self._say(MARK))
        self._watch()

    def _watch(self) -> None:
        if self._silence_limit_s is not None and self.simulation.now > self._heard + self._silence_limit_s:
            self._end(SUPERVISORS_GRACE_S)
        else:
            self.later(0.5, self._watch)

    # As its parent sees it.

    def write(self, data: bytes) -> int:
        if not self._open or self.dead:
            raise BrokenPipeError
        for line in bytes(data).splitlines():
            self.later(self.simulation.rng.expovariate(1000.0), lambda line=line: self._obey(json.loads(line)))
        return len(data)

    def close(self) -> None:
        self.close_input()

    def close_input(self) -> None:
        if self._open:
            self._open = False
            self.later(self.simulation.rng.expovariate(100.0), lambda: self._end(SUPERVISORS_GRACE_S))

    def poll(self) -> int | None:
        return self.status

    def wait(self, timeout: float | None = None) -> int:
        if not self._changed.wait_for(lambda: self.status is not None, timeout):
            raise subprocess.TimeoutExpired("supervisor", timeout or 0.0)
        assert self.status is not None
        return self.status

    def kill(self) -> None:
        self.die()

    # What it does.

    def _say(self, data: bytes) -> None:
        self.descriptors.write(self._out, data)

    def _tell(self, kind: bytes, worker: int, body: bytes = b"") -> None:
        if not self.dead:
            self._say(FRAME.pack(kind, worker, len(body)) + body)

    def _obey(self, order: dict[str, Any]) -> None:
        self._heard = self.simulation.now
        match order["op"]:
            case "start":
                self.world.ordered(self, order)
                self._asked.add(order["worker"])
                self.later(self.simulation.rng.uniform(0.01, 2.0), lambda: self._start(order))
            case "terminate":
                for number in order["workers"]:
                    self._terminate(number, order["grace_s"])
            case "finish":
                self._end(order["grace_s"])
            case "alive":
                self._tell(ALIVE, NO_WORKER)

    def _start(self, order: dict[str, Any]) -> None:
        number = order["worker"]
        if number not in self._asked:
            return
        self._asked.remove(number)
        world = World.from_env({**order["env"], "HORA_SECRET_FILE": "/nowhere"})
        assert world.worker == number
        spec = SimpleNamespace(worker=number, env=order["env"], slot=SimpleNamespace(hostname=self.machine.name))
        self.workers[number] = self.world.begin(spec, lambda code: self._ended(number, code))
        self._tell(STARTED, number)

    def _ended(self, number: int, code: int) -> None:
        self.simulation.log(f"worker {number} on {self.machine.name} has ended with code {code}")
        said = json.dumps({"code": code, "reason": ""}).encode()
        self.later(self.simulation.rng.expovariate(50.0), lambda: self._exited(number, said))

    def _exited(self, number: int, said: bytes) -> None:
        self._tell(EXITED, number, said)
        self._leave_if_done()

    def _terminate(self, number: int, grace_s: float) -> None:
        if number in self._asked:
            self._asked.remove(number)
            self._exited(number, json.dumps({"code": 143, "reason": ""}).encode())
        process = self.workers.get(number)
        if process is not None and not process.dead:
            process.terminate()
            self.later(grace_s, lambda: process.die(137))

    def _end(self, grace_s: float) -> None:
        if not self.dead:
            self._ending = True
            for number in [*self._asked, *self.workers]:
                self._terminate(number, grace_s)
            self.later(0.5, self._leave_if_done)

    def _leave_if_done(self) -> None:
        if self._ending and not self.dead and all(worker.dead for worker in self.workers.values()):
            self.later(0.3, self._leave)  # the last exits are told first

    def _leave(self) -> None:
        if self.status is None:
            self._finish(0)

    def die(self) -> None:
        """SIGKILL: its workers go with it."""
        if self.status is None:
            self._finish(-9)

    def _finish(self, status: int) -> None:
        self.status, self.dead = status, True
        for worker in self.workers.values():
            worker.die(137)
        self.descriptors.close(self._out)
        self.descriptors.close(self._err)
        self._changed.notify_all()


class Nodes:
    """All machines of a run, and what may not be."""

    def __init__(self, simulation: Simulation, network: Network, begin: Callable[..., Worker], num_nodes: int) -> None:
        self.simulation, self.network, self._begin, self.num_nodes = simulation, network, begin, num_nodes
        self.descriptors = Descriptors()
        self.over = False
        self.workers: dict[int, Worker] = {}
        self._orders: dict[int, Supervisor] = {}
        self._pids: dict[int, Supervisor] = {}
        rng = simulation.rng
        self.own = Machine(self, "host0", rng.randint(1, 2), 0)
        self.launcher = Process(simulation, "launcher")
        self.launcher.machine = self.own  # type: ignore[attr-defined]
        self.machines = [Machine(self, f"host{index}", rng.randint(1, 3), index) for index in range(1, num_nodes + 1)]

    def kill_launcher(self) -> None:
        """SIGKILL, of the process in which the simulation runs: whatever that does afterwards has no effect any
        more.
        """
        self.over = True
        self.launcher.end()
        for server in (NodesServer.here, VirtualServer.made):
            server.close()
        for supervisor in self.own.supervisors:
            supervisor.close_input()
        raise KilledError

    def new_pid(self, supervisor: Supervisor) -> int:
        pid = len(self._pids) + 1
        self._pids[pid] = supervisor
        return pid

    def ordered(self, supervisor: Supervisor, order: dict[str, Any]) -> None:
        """A start was ordered: of a worker that nobody else was told to start, with a key of its own."""
        other = self._orders.setdefault(order["worker"], supervisor)
        assert other is supervisor, (
            f"worker {order['worker']} is to be started on {other.name} and on {supervisor.name}"
        )
        assert all(order["private_files"].values()), "a worker without a key"

    def begin(self, spec: Any, ended: Callable[[int], None]) -> Worker:
        assert spec.worker not in self.workers, f"worker {spec.worker} was started twice"
        self.workers[spec.worker] = self._begin(spec, ended)
        return self.workers[spec.worker]

    def all_ended(self) -> bool:
        everything = [*self.machines, *self.own.supervisors, *self.workers.values()]
        return all(one.dead for one in everything)

    def processes(self) -> SimpleNamespace:
        """Stands for `Processes()`: the workers below a supervisor."""
        return SimpleNamespace(
            descendants=lambda pid: [w for w in self._pids[pid].workers.values() if not w.dead],
            kill=lambda workers: [worker.die(137) for worker in workers],
        )
