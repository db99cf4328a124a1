"""What runs in the processes of a simulated job: an elastic training, which speaks to the rendezvous as `ControlClient`
does.

A step is an all-gather of all ranks' values, in which they also agree whether to stop for a new world, as a commit
does. A world that breaks sends a worker back for the next one. `Referee` sees everything and knows what may not be.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator
from typing import Any

from simulator import Link, Message, Simulation, VirtualServer

from hora.launch.job import WorkerSpec
from hora.net.wire import cut_parts
from hora.world import World

LIMIT_S = 600.0
RETURN_S = 10.0  # of `ControlClient`
BACK = 0  # the number of the question by which a worker comes back
VALUE = struct.Struct(">iiq?")  # generation, rank, worker, whether it wants to stop for a new world
Answer = tuple[dict[str, Any], bytes]
Life = Generator["Request | float", Any, int]


class Request:
    """Something to ask the launcher."""

    def __init__(self, header: dict[str, Any], payload: bytes = b"") -> None:
        self.header, self.payload = header, payload


class Referee:
    """Holds the invariants."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.published: dict[int, dict[int, World]] = {}
        self._last_generation = -1
        self._values: dict[str, bytes] = {}  # what a gather gave
        self._given: dict[tuple[int, int], int] = {}  # generation and rank -> worker
        self.given_up: dict[int, float] = {}

    def publish(self, generation: int, worlds: dict[int, World]) -> None:
        """The launcher has decided: one generation after the other, every rank and every place once."""
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
        """A worker got a place: the one that was published, later than its last, and nobody else's."""
        assert world.generation > after, "an old world was given"
        assert self.published[world.generation][worker].rank == world.rank
        other = self._given.setdefault((world.generation, world.rank), worker)
        assert other == worker, (
            f"rank {world.rank} of generation {world.generation} is worker {other} and worker {worker}"
        )

    def gathered(self, worker: int, world: World, key: str, values: bytes) -> None:
        """An operation was executed: the same for all who see it, with every rank's own part."""
        assert self._values.setdefault(key, values) == values, f"two results of {key}"
        parts = cut_parts(values, world.size)
        assert [rank for rank, _ in parts] == list(range(world.size))
        for rank, part in parts:
            generation, told, who, _ = VALUE.unpack(part)
            assert (generation, told) == (world.generation, rank), f"{key}: rank {rank} is {told} of {generation}"
            assert self._given[generation, rank] == who
        assert worker in self.published[world.generation]

    def obeyed(self, worker: int, operation: str, asked_at: float) -> None:
        """The launcher does what a worker asked it for: nothing of what it asks after it was given up.

        What it asked for before takes effect when it was asked for, though the answer may come later: a value that a
        rank has brought to a meeting counts there as if the rank had died right after, which nobody can tell apart. No
        generation has a place for it after that (`publish`), and what it writes then is refused.
        """
        if operation in ("gather", "keys", "next_world", "set", "get", "add", "delete"):
            since = self.given_up.get(worker)
            assert since is None or asked_at <= since, f"{operation} of worker {worker}, given up at {since:.3f}"


class Worker:
    """A process. `fate`: what else may happen to it, by chance."""

    def __init__(
        self, simulation: Simulation, referee: Referee, spec: WorkerSpec, ended: Callable[[int], None], num_steps: int
    ) -> None:
        self.number, self.host, self.dead = spec.worker, spec.slot.hostname, False
        self.stopped_until = 0.0  # SIGSTOP, or a machine that swaps
        self.stubborn = simulation.rng.random() < 0.1  # does not end by itself when it is cut off
        self._comes_back = simulation.rng.random() < 0.5  # to a launcher from which it was cut off
        self._simulation, self._referee, self._ended, self._num_steps = simulation, referee, ended, num_steps
        self._link: Link | None = None
        self._waits_for, self._ids = -1, 0
        self._asked: Request | None = None  # what it waits for
        self._returning_until = 0.0
        self._cut_off = False
        self._notified = False
        self._hello = {"op": "hello", "name": f"worker {self.number}", "worker": self.number}
        self._joined = False
        self._world = World.from_env({**spec.env, "HORA_SECRET_FILE": "/nowhere"})
        self._life = self._live()
        simulation.after(simulation.rng.uniform(0.1, 5.0), lambda: self._go_on(None))  # imports

    # ---- the process --------------------------------------------------------------------------------------

    def die(self, code: int, *, unseen_s: float = 0.0) -> None:
        """`unseen_s`: with its machine, of whose end nobody hears before that."""
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
        """SIGTERM; one that is stopped does not hear it, and is killed later."""
        if self._simulation.now >= self.stopped_until:
            self.die(143)

    def cut(self) -> None:
        """Its connection breaks."""
        if self._link is not None and not self.dead:
            self._link.cut()

    def _go_on(self, value: Answer | None) -> None:
        """Run on to the next question or pause."""
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
        """Open a connection; what comes over an earlier one is not heard any more."""
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
        """As `ControlClient` does: within a limit, and what was not answered is asked again."""
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
        if self._returning_until and not self.dead and not self._cut_off:
            self._give_up()

    def _back(self, header: dict[str, Any]) -> None:
        self._returning_until = 0.0
        if "error" in header:
            self._give_up()
        elif self._waits_for >= 0 and self._asked is not None:
            if self._asked.header["op"] == "gather":  # the others were told that it failed
                self._waits_for = -1
                self._go_on(({"error": "lost"}, b""))
            else:
                self._ask(self._asked)

    def _heard(self, message: Message | None) -> None:
        """Something came from the launcher; None: the connection has ended."""
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

    # ---- what it does ---------------------------------------------------------------------------------------

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
        first = True  # a newcomer begins where the others are
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
                first, step = False, world.generation  # all begin at the same step, whatever they did before
                continue
            step += 1
            if any(VALUE.unpack(part)[-1] for _, part in cut_parts(values, world.size)):
                return "interrupted", step
        return "done", step

    def _next_world(self, world: World) -> Generator[Request | float, Any, World | None]:
        header, _ = yield Request({"op": "next_world", "generation": world.generation, "timeout_s": LIMIT_S})
        if "error" in header:
            return None
        found = World.from_env({**header["world"], "HORA_SECRET_FILE": "/nowhere"})
        self._referee.entered(self.number, found, world.generation)
        return found
