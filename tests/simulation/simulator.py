"""A virtual clock, network and set of processes for the control plane's real classes, determined by one seed.

Time passes only while a process waits; then the next event runs. Messages of one connection keep their order, those of
different connections do not. The real classes are `run_job`, its controller, policies, facts, hosts and blacklist, and
the rendezvous with its table. The simulation replaces sockets (`VirtualServer` stands for `hora.net.server.Server`),
the controller's queue, the launcher's processes, and their programs (`simulated_workers`).
"""

from __future__ import annotations

import heapq
import itertools
import queue
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from hora.launch.agent.protocol import Exited
from hora.launch.job import LaunchEvents, WorkerSpec
from hora.launch.slots import HostInfo
from hora.net.server import Handler, Timer

LONGEST_RUN_S = 6 * 3600.0  # of virtual time: a process that has not ended by then never will
_MALFORMED = (ValueError, KeyError, TypeError, ArithmeticError)

Message = tuple[dict[str, Any], bytes]


class StuckError(AssertionError):
    """No process has an event left, or none before the end of the run."""


class Simulation:
    """The clock, the scheduled events and the random numbers. `trace`: a log of past events."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.happening = False  # inside an event, which takes no time, so that only fibers may wait
        self.trace: list[str] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = itertools.count()

    def log(self, text: str) -> None:
        self.trace.append(f"{self.now:10.3f} {text}")

    def after(self, delay_s: float, function: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._ids), function))

    def run_until(self, done: Callable[[], bool], deadline: float) -> bool:
        """Run events until `done` (True) or until the deadline (False)."""
        while not done():
            if self.now > LONGEST_RUN_S:
                raise StuckError("the job has not ended")
            if not self._events or self._events[0][0] > deadline:
                self.now = max(self.now, deadline)
                return False
            self.now, _, function = heapq.heappop(self._events)
            self.happening = True
            try:
                function()
            finally:
                self.happening = False
        return True

    # The parts of the modules `time` and `queue` that the real classes use.

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def simple_queue(self) -> VirtualQueue:
        return VirtualQueue(self)


class VirtualQueue:
    """The queue in which the controller waits; meanwhile other events run."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._items: deque[Callable[[], None]] = deque()

    def put(self, item: Callable[[], None]) -> None:
        self._items.append(item)

    def empty(self) -> bool:
        return not self._items

    def get(self, timeout: float) -> Callable[[], None]:
        deadline = self._simulation.now + timeout
        if not self._simulation.run_until(lambda: bool(self._items), deadline):
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Callable[[], None]:
        return self._items.popleft()


class Link:
    """A worker's connection, which delivers messages in order and late until it is cut. Also the server's `Peer`."""

    def __init__(self, server: VirtualServer, speaker: int, host: str, heard: Callable[[Message | None], None]) -> None:
        self.speaker, self.host = speaker, host
        self.name, self.number, self.where = f"worker {speaker}", -1, host
        self.open = True  # at the server's end
        self.connected = True  # at the worker's end
        self.error: OSError | None = None  # why it was cut rather than closed by an end
        self._server, self._heard = server, heard
        self._simulation = server.simulation
        self._arrival = [0.0, 0.0]  # time of the last message to the server, and to the worker
        self.asked: dict[int, tuple[str, float]] = {}  # id of a request -> its operation and time

    def _deliver(self, direction: int, function: Callable[[], None]) -> None:
        """Deliver after earlier messages; while the network is silent, only when it works again."""
        simulation = self._simulation
        ready = max(simulation.now, self._server.network.silent_until(self.host)) + simulation.rng.expovariate(200.0)
        self._arrival[direction] = max(self._arrival[direction], ready)
        simulation.after(self._arrival[direction] - simulation.now, function)

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Send a message from the server to the worker."""
        if "re" in header and "error" not in header:
            self._server.obeyed(self.speaker, *self.asked[header["re"]])
        if self.open:
            self._deliver(1, lambda: self._heard((header, payload)) if self.connected else None)

    def say(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Send a message from the worker to the server."""
        if self.connected:
            self._deliver(0, lambda: self._server.take(self, header, payload))

    def hang_up(self) -> None:
        """Close the worker's end, because it disconnects or dies."""
        if self.connected:
            self.connected = False
            self._deliver(0, lambda: self._server.drop(self))

    def cut(self) -> None:
        """Cut the connection; each end detects it after a random delay."""
        self.error = TimeoutError()
        self._deliver(0, lambda: self._server.drop(self))
        self._deliver(1, self._hear_the_end)

    def close(self) -> None:
        self._server.drop(self)

    def ended_by_server(self) -> None:
        self.open = False
        self._deliver(1, self._hear_the_end)

    def _hear_the_end(self) -> None:
        if self.connected:
            self.connected = False
            self._heard(None)


class VirtualServer:
    """Stands for `hora.net.server.Server`: calls the handler's methods one after the other, at their virtual time."""

    simulation: Simulation  # of this run
    network: Network
    obeyed: Callable[[int, str, float], None]  # called with each request that the server has answered
    made: VirtualServer

    def __init__(self, handler: Handler, *, name: str) -> None:
        VirtualServer.made = self
        self._handler = handler
        self.links: dict[Link, None] = {}
        self._next_call = 0.0
        self._closed = False

    def listen(self, where: tuple[str, int]) -> int:
        return 1

    def start(self, credentials: object) -> None: ...

    def call(self, function: Callable[[], None]) -> None:
        """Call the function soon, in order of the calls: the real server runs it in its own thread."""
        simulation = self.simulation
        self._next_call = max(self._next_call, simulation.now + simulation.rng.expovariate(2000.0))
        simulation.after(self._next_call - simulation.now, lambda: None if self._closed else function())

    def call_at(self, deadline: float, function: Callable[[], None]) -> Timer:
        timer = Timer(function)
        self.simulation.after(max(deadline - self.simulation.now, 0.0), lambda: None if self._closed else timer.run())
        return timer

    @property
    def peers(self) -> list[Link]:
        return list(self.links)

    def close(self) -> None:
        self._closed = True
        for link in self.peers:
            link.ended_by_server()
        self.links.clear()

    def connect(self, speaker: int, host: str, heard: Callable[[Message | None], None]) -> Link:
        link = Link(self, speaker, host, heard)
        if self._closed:
            link.ended_by_server()
        else:
            self.links[link] = None
        return link

    def take(self, link: Link, header: dict[str, Any], payload: bytes) -> None:
        if not link.open or self._closed:
            return
        link.asked[header.get("id", -1)] = header.get("op", ""), self.simulation.now
        try:
            self._handler.message(link, header, payload)  # type: ignore[arg-type]
        except _MALFORMED as error:
            self.simulation.log(f"{link.name} is shown out: {error!r}")
            self.drop(link)

    def drop(self, link: Link) -> None:
        if link in self.links and not self._closed:
            del self.links[link]
            link.ended_by_server()
            self._handler.closed(link)  # type: ignore[arg-type]


class Network:
    """Hosts that are unreachable for a while."""

    def __init__(self) -> None:
        self._silent_until: dict[str, float] = {}

    def silence(self, host: str, until: float) -> None:
        self._silent_until[host] = max(until, self.silent_until(host))

    def silent_until(self, host: str) -> float:
        return self._silent_until.get(host, 0.0)


class Discovery:
    """Stands for a discovery script: reports hosts that are added and removed."""

    def watch(self, known: Sequence[HostInfo], changed: Callable[[Sequence[HostInfo]], None]) -> None:
        self._hosts, self._changed = list(known), changed
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def say(self, hosts: Sequence[HostInfo]) -> None:
        if not self.closed and list(hosts) != self._hosts:
            self._hosts = list(hosts)
            self._changed(hosts)


class VirtualLauncher:
    """Implements Launcher.

    `begin(spec)` creates the process of a spec: an object with `die(code)`, `dead`, and `terminate()`.
    """

    bind_address = advertised_address = "10.0.0.1"

    def __init__(self, simulation: Simulation, begin: Callable[[WorkerSpec, Callable[[int], None]], Any]) -> None:
        self._simulation, self._begin = simulation, begin
        self.processes: dict[int, Any] = {}

    def start(self, workers: Sequence[WorkerSpec], events: LaunchEvents) -> None:
        for spec in workers:
            self._simulation.after(self._simulation.rng.uniform(0.01, 3.0), lambda spec=spec: self._start(spec, events))

    def _start(self, spec: WorkerSpec, events: LaunchEvents) -> None:
        assert spec.worker not in self.processes, f"worker {spec.worker} was started twice"

        def ended(code: int) -> None:
            self._simulation.log(f"worker {spec.worker} has ended with code {code}")
            late = self._simulation.rng.expovariate(5.0)  # before or after the end of its connection is detected
            self._simulation.after(late, lambda: events.exited(Exited(worker=spec.worker, code=code)))

        self.processes[spec.worker] = self._begin(spec, ended)
        events.started(spec.worker)

    def terminate(self, workers: Iterable[int], *, grace_s: float) -> None:
        for number in workers:
            self._simulation.after(0.0, lambda number=number: self._terminate(number, grace_s))

    def _terminate(self, number: int, grace_s: float) -> None:
        process = self.processes.get(number)
        if process is None:  # not started yet: end it once it is
            self._simulation.after(0.5, lambda: self._terminate(number, grace_s))
        elif not process.dead:
            process.terminate()
            self._simulation.after(grace_s, lambda: process.die(137))

    def close(self) -> None:
        for process in self.processes.values():
            process.die(137)


class Playable(Protocol):
    """A run with a seed."""

    simulation: Simulation

    def to_the_end(self) -> None: ...


R = TypeVar("R", bound=Playable)


def played(make: Callable[[int], R], seed: int) -> R:
    """Run a seed; an error is reported with the seed and the end of the trace."""
    run = make(seed)
    try:
        run.to_the_end()
    except BaseException as error:
        told = "\n".join(run.simulation.trace[-60:])
        raise AssertionError(f"seed {seed}: {error!r}\n{told}") from error
    return run
