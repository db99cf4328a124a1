"""The ranks of one world in virtual time: the real control tree, negotiation, planner and status, in virtual
processes.

Sockets (`ControlServer` stands for `hora.net.server.Server`, `connect` for `hora.net.wire.connect`), threads (`fibers`)
and the driver of a queue are simulated, and so is the transport, which executes an operation when all members have
reached it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from fibers import Condition, Fiber, Process, pause
from simulator import Network, Simulation

from hora.engine.control_tree import ControlEvents, ControlTree, Whereabouts
from hora.engine.negotiation.tree import TreeNegotiation
from hora.engine.plan import BatchPlanner
from hora.engine.rank_tree import Tree
from hora.engine.request import Kind, Signature
from hora.engine.runtime import Runtime
from hora.engine.status import WorldStatus
from hora.errors import HorovodInternalError
from hora.net.server import Timer

Message = tuple[dict[str, Any], bytes]
GOODBYE_LIMIT_S = 2.0  # the limit of `Runtime`
SILENCE_LIMIT_S = 8.0  # limit of the control tree's connections


class End:
    """One end of a connection, as `Peer` and `Connection`: delivers messages in order and late until it is cut."""

    def __init__(self, process: Process, host: str, speaker: int, take: Callable[[End, Message | None], None]) -> None:
        self.process, self.host, self.speaker, self._take = process, host, speaker, take
        self.other: End
        self.name, self.number, self.where = f"rank {speaker}", -1, host
        self.open, self.drained = True, True
        self._arrival = 0.0
        self.network: Network

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        if self.open:
            message = json.loads(json.dumps(header)), bytes(payload)
            self.other.arrive(lambda: self.other.take(message))

    def arrive(self, function: Callable[[], None]) -> None:
        """Deliver after all earlier messages, and later if the network is silent or the process is stopped."""
        simulation = self.process.simulation
        free = max(self.network.silent_until(self.host), self.network.silent_until(self.other.host), simulation.now)
        self._arrival = max(self._arrival, free + simulation.rng.expovariate(500.0))
        self.process.later(self._arrival - simulation.now, function)

    def take(self, message: Message) -> None:
        if self.open:
            self._take(self, message)

    def close(self) -> None:
        """Close this end; the other end is notified."""
        if self.open:
            self.open = False
            self.other.arrive(self.other.ended)

    def ended(self) -> None:
        if self.open:
            self.open = False
            self._take(self, None)

    # The interface of `Connection`.

    inbox: list[Message | None]
    changed: Condition

    def receive(self, *, limit_s: float) -> Message:
        if not self.changed.wait_for(lambda: self.inbox, limit_s):
            raise TimeoutError("no answer")
        message = self.inbox.pop(0)
        if message is None:
            raise EOFError
        return message

    def __enter__(self) -> End:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ControlServer:
    """Stands for `hora.net.server.Server` in one process."""

    listening: dict[str, ControlServer]  # the servers of this run
    network: Network

    def __init__(
        self, control_tree: ControlTree, *, name: str, silence_limit_s: int, failed: Callable[[Exception], None]
    ) -> None:
        assert Fiber.current is not None
        self._control_tree, self._rank = control_tree, Fiber.current.process
        assert isinstance(self._rank, Rank)
        self._next_call = 0.0
        self._closed = False
        self.ends: list[End] = []

    def listen(self, where: str) -> None:
        self.listening[where] = self

    def start(self, credentials: object) -> None: ...

    def call(self, function: Callable[[], None]) -> None:
        simulation = self._rank.simulation
        self._next_call = max(self._next_call, simulation.now + simulation.rng.expovariate(5000.0))
        self._rank.later(self._next_call - simulation.now, lambda: None if self._closed else function())

    def call_at(self, deadline: float, function: Callable[[], None]) -> Timer:
        timer = Timer(function)
        late = max(deadline - self._rank.simulation.now, 0.0)
        self._rank.later(late, lambda: None if self._closed else timer.run())
        return timer

    def accept(self, speaker: int) -> End:
        end = End(self._rank, self._rank.host, speaker, self._take)
        self.ends.append(end)
        return end

    def peer_at(self, end: End) -> End:
        end._take = self._take
        self.ends.append(end)
        for message in end.inbox:
            self._take(end, message)
        return end

    def serve(self, peer: End) -> None: ...

    def _take(self, end: End, message: Message | None) -> None:
        if self._closed:
            return
        if message is None:
            self._control_tree.closed(end)  # type: ignore[arg-type]
        else:
            self._control_tree.message(end, *message)  # type: ignore[arg-type]

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        for end in self.ends:
            end.close()


def connect(where: str, credentials: Rank, *, timeout_s: float, silence_limit_s: int) -> End:
    """Stands for `hora.net.wire.connect`: takes a round trip, or raises an error."""
    rank = credentials
    server = ControlServer.listening[where]
    other, clock = server._rank, rank.simulation
    silent = max(ControlServer.network.silent_until(host) for host in (rank.host, other.host))
    late = max(silent, other.stopped_until, clock.now) - clock.now + clock.rng.expovariate(300.0)
    pause(min(late, timeout_s))
    if other.dead or server.closed:
        raise ConnectionRefusedError(where)
    if late > timeout_s:
        raise TimeoutError(where)
    here = End(rank, rank.host, other.rank, lambda end, message: (end.inbox.append(message), end.changed.notify_all()))
    here.inbox, here.changed = [], Condition()
    there = server.accept(rank.rank)
    here.other, there.other = there, here
    here.network = there.network = ControlServer.network
    return here


class Rank(Process):
    """A process of the world, from start to end."""

    def __init__(self, world: SimulatedWorld, rank: int, host: str) -> None:
        super().__init__(world.simulation, f"rank {rank}")
        self.world, self.rank, self.host = world, rank, host
        self.executed: list[str] = []
        self.announced: set[str] = set()
        self.outcome = ""
        self.negotiation: TreeNegotiation | None = None
        self._early: list[tuple[int, dict[str, Any], bytes]] = []
        self.num_in_flight = 0
        self.step = 0
        Fiber(self, self._live)

    # Methods of the runtime.

    _on_leaving = Runtime._on_leaving

    def _on_negotiating(self, serial: int, rank: int, header: dict[str, Any], payload: bytes) -> None:
        if self.negotiation is None:
            self._early.append((rank, header, payload))
        else:
            self.negotiation.receive(rank, header, payload)

    def _on_lost(self, rank: int) -> None:
        self.world.called_lost(self.rank, rank)
        self._on_fault(f"rank {rank} was lost")

    def _on_fault(self, text: str) -> None:
        self.status.fault(text)
        self.control_tree.stop_waiting(self.status.reason)

    def _on_tick(self) -> None:
        if self.negotiation is not None:
            self.negotiation.tick()

    def leave_if_idle(self) -> None:
        if self.rank not in self.control_tree.goodbyes and not self.num_in_flight:
            self.control_tree.leave(self.status.reason)

    # The training.

    def _live(self) -> None:
        pause(self.simulation.rng.expovariate(2.0))
        events = ControlEvents(
            lost=self._on_lost,
            leaving=self._on_leaving,  # type: ignore[misc]
            fault=self._on_fault,
            negotiating=self._on_negotiating,
            whereabouts=lambda serial: Whereabouts([]),
            standstill=lambda question: b"",
            tick=self._on_tick,
        )
        self.control_tree = ControlTree(self.rank, self.world.size, events)
        self.status = WorldStatus(self.rank, tell=self._tell, wake=lambda: None)
        self.world.names[self.rank] = self.control_tree.name
        try:
            self._train()
            self.outcome = "done"
        except HorovodInternalError as error:
            self.outcome = str(error)
        except OSError as error:  # a neighbour died before this rank connected
            self.outcome = f"could not begin: {error!r}"
            self.world.harmed.add(self.rank)  # it exits, perhaps before ranks that connect to it learn the reason
            self._on_fault(self.outcome)
            self._tell(self.outcome)
        self._shut_down()

    def _tell(self, text: str) -> None:
        self.control_tree.report_fault(self.rank, text)

    def _train(self) -> None:
        world, tree = self.world, self.world.tree
        self.control_tree.start(SimpleNamespace(of=None, towards=lambda rank: self))  # type: ignore[arg-type]
        world.await_all_names()
        parent = tree.parent(self.rank)
        where = None if parent is None else (parent, world.names[parent])
        self.control_tree.join(where, len(tree.children(self.rank)), limit_s=30.0)
        found = self.control_tree.gather("numbers", b"%d" % self.rank, limit_s=120.0)
        assert found == [b"%d" % rank for rank in range(world.size)]
        self.control_tree.know(tree, world.names.__getitem__)
        self.negotiation = TreeNegotiation(self.control_tree, 1, tree, range(world.size), cache_capacity=8)
        early, self._early = self._early, []
        for message in early:
            self.negotiation.receive(*message)
        self.planner = BatchPlanner(range(world.size), fusion_threshold_bytes=2**20)
        self.control_tree.gather("ready", b"1", limit_s=120.0)
        for number, names in enumerate(world.program):
            if (self.rank, number) == world.leaves:
                return
            pause(self.simulation.rng.expovariate(3.0))
            self.step = number
            self._step(self.simulation.rng.sample(names, len(names)))

    def _step(self, names: Sequence[str]) -> None:
        for name in names:
            self.status.check_open()
            self.announced.add(name)
            self.num_in_flight += 1
            assert self.negotiation is not None
            self.negotiation.announce(_signature(name), 0)
            pause(self.simulation.rng.expovariate(200.0))
        while not self.announced <= set(self.executed):
            self._drive()

    def _drive(self) -> None:
        """Run one iteration of the driver of an `OperationQueue`."""
        assert self.negotiation is not None
        batches = self.negotiation.poll(self.planner)
        if batches is None:
            self.status.check_alive()
            self.negotiation.wait()
            return
        for batch in batches:
            assert batch.error is None, batch.error
            for key in dict.fromkeys(part.key for part in batch.parts):
                self._execute(f"step {self.step} {key[1]}")

    def _execute(self, name: str) -> None:
        self.world.enter(self.rank, name)
        while not self.world.all_came(name):
            self.status.check_alive()
            pause(0.02)
        self.executed.append(name)
        self.num_in_flight -= 1
        if self.status.closing and not self.num_in_flight:
            self.leave_if_idle()

    def _shut_down(self) -> None:
        """Shut down like `Runtime.shutdown`."""
        text = f"Horovod has been shut down by rank {self.rank}"
        self.num_in_flight = 0
        self.status.close(text)
        self.control_tree.leave(self.status.reason if self.status.broken else text)
        if not self.status.broken:
            self.control_tree.wait_for_goodbyes(GOODBYE_LIMIT_S)
        self.control_tree.close()
        self.world.log(f"rank {self.rank} ends: {self.outcome}")
        self.dead = True

    def kill(self) -> None:
        self.world.log(f"rank {self.rank} dies")
        self.outcome = self.outcome or "killed"
        self.dead = True
        control_tree = getattr(self, "control_tree", None)
        for end in [] if control_tree is None else list(control_tree._server.ends):
            end.close()
        self.end()


class SimulatedWorld:
    """All ranks, their program, and the invariants."""

    def __init__(self, simulation: Simulation, network: Network) -> None:
        rng = simulation.rng
        self.simulation, self.network = simulation, network
        hosts, self.size = [], 0
        for number in range(rng.randint(1, 4)):
            hosts.append(list(range(self.size, self.size + rng.randint(1, 2))))
            self.size += len(hosts[number])
        self.tree = Tree(hosts)
        self.program = [[f"step {n} tensor {t}" for t in range(rng.randint(1, 3))] for n in range(rng.randint(2, 5))]
        self.leaves = rng.choice([None, None, (rng.randrange(self.size), rng.randrange(len(self.program)))])
        self.names: dict[int, str] = {}
        self.harmed: set[int] = set()  # ranks that others may report as lost
        self.disturbed = False
        self._order: list[str] = []  # the order in which operations are executed
        self._came: dict[str, set[int]] = {}
        self._num_come = [0] * self.size
        self.ranks = [Rank(self, rank, f"host{number}") for number, host in enumerate(hosts) for rank in host]

    def log(self, text: str) -> None:
        self.simulation.log(text)

    def await_all_names(self) -> None:
        """Wait for the launcher's table of all ranks' addresses; raise an error if a rank has died instead."""
        while len(self.names) < self.size:
            if any(rank.dead for rank in self.ranks):
                raise HorovodInternalError("a rank has died before all had met")
            pause(0.05)

    def enter(self, rank: int, name: str) -> None:
        """Check that ranks execute operations once, in the same order, and only if all have announced them."""
        at = self._num_come[rank]
        self._num_come[rank] += 1
        if at == len(self._order):
            self._order.append(name)
        assert self._order[at] == name, f"rank {rank} executes {name!r} where others execute {self._order[at]!r}"
        missing = [other.rank for other in self.ranks if name not in other.announced]
        assert not missing, f"{name!r} was agreed on without ranks {missing}"
        self._came.setdefault(name, set()).add(rank)

    def all_came(self, name: str) -> bool:
        return len(self._came[name]) == self.size

    def called_lost(self, by: int, rank: int) -> None:
        assert rank in self.harmed, f"rank {by} takes rank {rank} for lost, which nothing has happened to"

    def judge(self) -> None:
        """Check the final state."""
        for rank in self.ranks:
            assert rank.outcome, f"rank {rank.rank} has not ended"
        if self.disturbed:
            return
        step = len(self.program) if self.leaves is None else self.leaves[1]
        common = [name for names in self.program[:step] for name in names]
        for rank in self.ranks:
            assert set(common) <= set(rank.executed), f"rank {rank.rank} has not executed all that was agreed"
            if self.leaves is None or rank.rank == self.leaves[0]:
                assert rank.outcome == "done", (rank.rank, rank.outcome)
            else:
                assert rank.outcome == f"Horovod has been shut down by rank {self.leaves[0]}", rank.outcome


def _signature(name: str) -> Signature:
    """Return the signature of a tensor, whose name and shape are the same in every step."""
    kind, tensor = Kind.ALLREDUCE, name.partition("tensor")[2]
    shape = (zlib.crc32(tensor.encode()) % 99,)
    return Signature(int(kind), kind.name.lower(), f"tensor{tensor}", dtypes=("float32",), shapes=(shape,))
