"""Worker processes of a simulated job: an elastic training that uses the rendezvous with the protocol of
`ControlClient`.

A step is an all-gather of all ranks' values, in which the ranks also agree whether to stop for a new world, as in a
commit. When a world breaks, its workers ask for the next one. `Referee` observes everything and checks invariants.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator
from typing import Any

from simulator import Link, Message, Simulation, VirtualServer

from hora.launch.job import WorkerSpec
from hora.net.wire import cut_parts
from hora.platforms.detect import detect_world
from hora.world import World

LIMIT_S = 600.0
RETURN_S = 10.0  # the limit of `ControlClient`
BACK = 0  # id of the request with which a worker reconnects
VALUE = struct.Struct(">iiq?")  # generation, rank, worker, whether it wants to stop for a new world
Answer = tuple[dict[str, Any], bytes]
Life = Generator["Request | float", Any, int]


class Request:
    """A request to the launcher."""

    def __init__(self, header: dict[str, Any], payload: bytes = b"") -> None:
        self.header, self.payload = header, payload


class Referee:
    """Checks the invariants."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.published: dict[int, dict[int, World]] = {}
        self._last_generation = -1
        self._values: dict[str, bytes] = {}  # results of gathers
        self._given: dict[tuple[int, int], int] = {}  # generation and rank -> worker
        self.given_up: dict[int, float] = {}

    def publish(self, generation: int, worlds: dict[int, World]) -> None:
        """Check a published generation: it follows the previous one, and its ranks and slots are unique."""
        self._simulation.log(f"generation {generation}: workers {sorted(worlds)}")
        assert generation == self._last_generation + 1, "generations do not follow one another"
        self._last_generation = generation
        ranks = [world.rank for world in worlds.values()]
        assert sorted(ranks) == list(range(len(worlds))), f"ranks {ranks}"
        places = {(world.hostname, world.local_rank) for world in worlds.values()}
        assert len(places) == len(worlds), "two ranks in one place"
        assert all(world.size == len(worlds) for world in worlds.values())
        assert not self.given_up.keys() & worlds.keys(), "a worker that was given up has a place"
        self.published[generation] = worlds

    def entered(self, worker: int, world: World, after: int) -> None:
        """Check a worker's world: it is published, newer than the last one, and no other worker has its rank."""
        assert world.generation > after, "an old world was given"
        assert self.published[world.generation][worker].rank == world.rank
        other = self._given.setdefault((world.generation, world.rank), worker)
        assert other == worker, (
            f"rank {world.rank} of generation {world.generation} is worker {other} and worker {worker}"
        )

    def gathered(self, worker: int, world: World, key: str, values: bytes) -> None:
        """Check the result of an operation: it is the same for all ranks and contains the part of every rank."""
        assert self._values.setdefault(key, values) == values, f"two results of {key}"
        parts = cut_parts(values, world.size)
        assert [rank for rank, _ in parts] == list(range(world.size))
        for rank, part in parts:
            generation, told, who, _ = VALUE.unpack(part)
            assert (generation, told) == (world.generation, rank), f"{key}: rank {rank} is {told} of {generation}"
            # A worker behind a partition may have entered after the successor of its leader had begun.
            assert self._given.setdefault((generation, rank), who) == who
            assert self.published[generation][who].rank == rank
        assert worker in self.published[world.generation]

    def obeyed(self, worker: int, operation: str, asked_at: float) -> None:
        """Check that the launcher ignores requests that a worker sends after it was dropped.

        Earlier requests take effect at the time of the request, although the answer may be late: a value that a rank
        has contributed to a gather counts as if the rank had died right afterwards; no peer can tell the difference.
        From then on no generation includes the worker (`publish`), and its writes are rejected.
        """
        if operation in ("gather", "keys", "next_world", "set", "get", "add", "delete"):
            since = self.given_up.get(worker)
            assert since is None or asked_at <= since, f"{operation} of worker {worker}, given up at {since:.3f}"


class Worker:
    """A worker process. `rng` decides which other misfortunes happen to it."""

    def __init__(
        self, simulation: Simulation, referee: Referee, spec: WorkerSpec, ended: Callable[[int], None], num_steps: int
    ) -> None:
        self.number, self.host, self.dead = spec.worker, spec.slot.hostname, False
        self.stopped_until = 0.0  # stopped by SIGSTOP, or its machine swaps
        self.stubborn = simulation.rng.random() < 0.1  # does not exit by itself when it is cut off
        self._comes_back = simulation.rng.random() < 0.5  # reconnects to a launcher from which it was cut off
        self._simulation, self._referee, self._ended, self._num_steps = simulation, referee, ended, num_steps
        self._link: Link | None = None
        self._waits_for, self._ids = -1, 0
        self._asked: Request | None = None  # the request in flight
        self._returning_until = 0.0
        self._cut_off = False
        self._notified = False
        self._hello = {"op": "hello", "name": f"worker {self.number}", "worker": self.number}
        self._joined = False
        self._world = detect_world({**spec.env, "HORA_SECRET_FILE": "/nowhere"})
        self._life = self._live()
        simulation.after(simulation.rng.uniform(0.1, 5.0), lambda: self._go_on(None))  # imports

    # ---- the process --------------------------------------------------------------------------------------

    def die(self, code: int, *, unseen_s: float = 0.0) -> None:
        """End the process. `unseen_s`: its machine dies too, and the launcher detects it only after this time."""
        if not self.dead:
            self.dead = True
            link = self._link
            if link is not None and unseen_s:
                link.connected = False
                self._simulation.after(unseen_s, link.close)
            elif link is not None:
                link.hang_up()
            self._ended(code)

    def terminate(self) -> None:
        """Send SIGTERM. A stopped process does not handle it and is killed later."""
        if self._simulation.now >= self.stopped_until:
            self.die(143)

    def cut(self) -> None:
        """Break the worker's connection."""
        if self._link is not None and not self.dead:
            self._link.cut()

    def _go_on(self, value: Answer | None) -> None:
        """Run until the next request or pause."""
        if self.dead or self._cut_off:
            return
        if self._simulation.now < self.stopped_until:
            self._simulation.after(self.stopped_until - self._simulation.now, lambda: self._go_on(value))
            return
        try:
            wanted = self._life.send(value)
        except StopIteration as end:
            self.die(end.value)
            return
        if isinstance(wanted, float):
            self._simulation.after(wanted, lambda: self._go_on(None))
        else:
            self._ask(wanted)

    def _connect(self) -> None:
        """Open a connection; messages of earlier ones are ignored from now on."""
        link: Link | None = None

        def heard(message: Message | None) -> None:
            if self._link is link:
                self._heard(message)

        link = self._link = VirtualServer.made.connect(self.number, self.host, heard)

    def _ask(self, request: Request) -> None:
        assert self._link is not None
        self._ids += 1
        self._waits_for, self._asked = self._ids, request
        self._link.say({**request.header, "id": self._ids}, request.payload)
        if not self._link.connected and not self._returning_until:
            self._heard(None)

    def _give_up(self) -> None:
        self._cut_off = True
        if not self.stubborn:
            self._simulation.after(max(self.stopped_until - self._simulation.now, 0.0), lambda: self.die(1))

    def _come_back(self) -> None:
        """Reconnect like `ControlClient`: within a limit, and repeat the unanswered request."""
        if self.dead or self._cut_off:
            return
        if self._simulation.now < self.stopped_until:
            self._simulation.after(self.stopped_until - self._simulation.now, self._come_back)
        elif self._simulation.now > self._returning_until:
            self._give_up()
        else:
            self._connect()
            assert self._link is not None
            self._link.say({**self._hello, "id": BACK})
            self._simulation.after(self._returning_until - self._simulation.now, self._give_up_if_not_back)

    def _give_up_if_not_back(self) -> None:
        if 0.0 < self._returning_until <= self._simulation.now and not self.dead and not self._cut_off:
            self._give_up()

    def _back(self, header: dict[str, Any]) -> None:
        self._returning_until = 0.0
        if "error" in header:
            self._give_up()
        elif self._waits_for >= 0 and self._asked is not None:
            if self._asked.header["op"] == "gather":  # the other ranks were told that it failed
                self._waits_for = -1
                self._go_on(({"error": "lost"}, b""))
            else:
                self._ask(self._asked)

    def _heard(self, message: Message | None) -> None:
        """Handle a message from the launcher; None means that the connection has ended."""
        if self.dead or self._cut_off:
            return
        if message is None:
            if self._comes_back and self._joined:
                self._returning_until = self._returning_until or self._simulation.now + RETURN_S
                self._simulation.after(self._simulation.rng.expovariate(2.0), self._come_back)
            else:
                self._give_up()
            return
        header, payload = message
        if header.get("re") == BACK:
            self._back(header)
            return
        if header.get("notice") == "ping" and self._simulation.now >= self.stopped_until:
            assert self._link is not None
            self._link.say({"op": "pong"})
        elif header.get("notice") == "hosts_updated":
            self._notified = True
        elif header.get("re") == self._waits_for:
            self._waits_for = -1
            self._go_on((header, payload))

    # ---- the training ---------------------------------------------------------------------------------------

    def _live(self) -> Life:
        self._connect()
        header, _ = yield Request(self._hello)
        if "error" in header:
            return 1
        self._joined = True
        world, step = self._world, 0
        if world.generation < 0:
            found = yield from self._next_world(world)
            if found is None:
                return 0
            world = found
        else:
            self._referee.entered(self.number, world, -1)
        while True:
            outcome, step = yield from self._train(world, step)
            if outcome == "done":
                yield Request({"op": "returned"}, b"%d" % step)
                yield Request({"op": "bye"})
                return 0
            found = yield from self._next_world(world)
            if found is None:
                return 0
            world = found

    def _train(self, world: World, step: int) -> Generator[Request | float, Any, tuple[str, int]]:
        rng = self._simulation.rng
        header, _ = yield Request(
            {"op": "keys", "rank": world.rank, "generation": world.generation, "epoch": "0"}, struct.pack(">I", 0)
        )
        if "error" in header:
            return "broken", step
        first = True  # a new worker starts at the step of the others
        self._notified = False
        while step < self._num_steps:
            yield rng.expovariate(2.0)
            key = f"{world.generation}/{'begin' if first else step}"
            value = VALUE.pack(world.generation, world.rank, self.number, self._notified)
            request = {"op": "gather", "key": key, "rank": world.rank, "size": world.size, "timeout_s": LIMIT_S}
            header, values = yield Request(request, value)
            if "error" in header:
                return "broken", step
            self._referee.gathered(self.number, world, key, values)
            if first:
                first, step = False, world.generation  # all start at the same step, whatever they did before
                continue
            step += 1
            if any(VALUE.unpack(part)[-1] for _, part in cut_parts(values, world.size)):
                return "interrupted", step
        return "done", step

    def _next_world(self, world: World) -> Generator[Request | float, Any, World | None]:
        header, _ = yield Request({"op": "next_world", "generation": world.generation, "timeout_s": LIMIT_S})
        if "error" in header:
            return None
        found = detect_world({**header["world"], "HORA_SECRET_FILE": "/nowhere"})
        self._referee.entered(self.number, found, world.generation)
        return found
