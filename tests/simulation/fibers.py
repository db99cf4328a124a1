"""Blocking processes of a simulation, as threads of which the simulation runs one at a time.

Where a real class waits (on a `Condition` or a connection), the fiber yields to the simulation and resumes at the
virtual time at which the wait ends. The whole run therefore depends on the seed alone.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from simulator import Simulation

FOREVER_S = 1e6


class KilledError(BaseException):
    """The process has been killed."""


class Process:
    """State that the fibers of a process share: the process is `dead`, or stopped for a while."""

    current: Process | None = None  # the process whose event runs now

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation, self.name = simulation, name
        self.dead = False
        self.stopped_until = 0.0
        self.fibers: list[Fiber] = []

    def later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Call the function after the delay, or when the process resumes, unless the process has ended."""

        def run() -> None:
            if self.dead:
                return
            if self.simulation.now < self.stopped_until:
                self.later(self.stopped_until - self.simulation.now, function)
            else:
                before, Process.current = Process.current, self
                try:
                    function()
                finally:
                    Process.current = before

        self.simulation.after(delay_s, run)

    def end(self) -> None:
        """End the process and its fibers, whatever they wait for."""
        self.dead = True
        for fiber in self.fibers:
            fiber.end()


class Fiber:
    """One thread of a process; it starts after a short delay."""

    current: Fiber | None = None  # none: the simulation itself, or an event of a server's thread

    def __init__(self, process: Process, function: Callable[[], None]) -> None:
        self.process, self._function = process, function
        self._turn, self._back = threading.Lock(), threading.Lock()  # each is released by the other side
        self._turn.acquire()
        self._back.acquire()
        self._num_parked = 0
        self.over = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        process.fibers.append(self)
        process.later(process.simulation.rng.expovariate(1000.0), self._go_on)

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if not self.process.dead:
                self._function()
        except KilledError:
            pass
        except BaseException as error:
            self.error = error
        self.over = True
        self._back.release()

    def _go_on(self) -> None:
        if self.over:
            return
        before, Fiber.current = Fiber.current, self
        self._turn.release()
        self._back.acquire()
        Fiber.current = before
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def end(self) -> None:
        """Make the fiber leave its wait and end. Has no effect when called from the fiber itself."""
        if Fiber.current is not self:
            self._go_on()

    def park(self, delay_s: float | None) -> Callable[[], None]:
        """Prepare to wait with `pause`; the returned function ends the wait, as does the timeout."""
        self._num_parked += 1
        mine = self._num_parked

        def wake() -> None:
            if self._num_parked == mine and not self.over:
                self._num_parked += 1
                self._go_on()

        if delay_s is not None:
            self.process.later(delay_s, wake)
        return wake

    def pause(self) -> None:
        """Let other fibers run until this one is woken."""
        self._back.release()
        self._turn.acquire()
        if self.process.dead:
            raise KilledError


def pause(delay_s: float) -> None:
    """Sleep in a fiber."""
    fiber = Fiber.current
    assert fiber is not None
    fiber.park(delay_s)
    fiber.pause()


class Condition:
    """Stands for `threading.Condition`. Fibers are switched only when they wait, so no lock is needed."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Process, Callable[[], None]]] = []

    def __enter__(self) -> Condition:
        return self

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for process, wake in waiting:
            process.later(process.simulation.rng.expovariate(5000.0), wake)

    def wait(self, limit_s: float | None) -> None:
        fiber, process = Fiber.current, Process.current
        if fiber is None:  # the thread that runs the simulation, which is the controller's
            assert process is not None
            assert not process.simulation.happening, "a server's thread must not wait"
            woken: list[bool] = []
            self._waiting.append((process, lambda: woken.append(True)))
            limit_s = FOREVER_S if limit_s is None else limit_s
            process.simulation.run_until(lambda: bool(woken), process.simulation.now + limit_s)
        else:
            self._waiting.append((fiber.process, fiber.park(limit_s)))
            fiber.pause()

    def wait_for(self, holds: Callable[[], Any], limit_s: float | None) -> Any:
        process = Process.current if Fiber.current is None else Fiber.current.process
        assert process is not None
        clock = process.simulation
        deadline = clock.now + (FOREVER_S if limit_s is None else limit_s)
        while not (found := holds()) and clock.now < deadline:
            self.wait(deadline - clock.now)
        return found


class Event:
    """Stands for `threading.Event`."""

    def __init__(self) -> None:
        self._set, self._changed = False, Condition()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._changed.notify_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        return bool(self._changed.wait_for(self.is_set, timeout))


class SimpleQueue:
    """Stands for `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._changed = Condition()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._changed.notify_all()

    def empty(self) -> bool:
        return not self._items

    def get_nowait(self) -> Any:
        return self._items.pop(0)

    def get(self, timeout: float | None = None) -> Any:
        if not self._changed.wait_for(lambda: self._items, timeout):
            raise queue.Empty
        return self._items.pop(0)


class Thread:
    """Stands for `threading.Thread`."""

    def __init__(self, *, target: Callable[..., None], args: tuple[Any, ...] = (), **_: object) -> None:
        self._run = lambda: target(*args)

    def start(self) -> None:
        assert Process.current is not None
        self._fiber, self._ended = Fiber(Process.current, self._to_the_end), Event()

    def _to_the_end(self) -> None:
        self._run()
        self._ended.set()

    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)


class Pool:
    """Stands for `ThreadPoolExecutor`, but runs the calls one after the other."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None: ...

    map = staticmethod(map)
