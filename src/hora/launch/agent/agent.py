"""The agent: the process on each node that starts a job's workers and ensures that none outlives it.

It obeys a controller through a link: a socket that is its standard input, for an agent on the controller's own machine
(`LocalLink`, below), or an authenticated session (`session`). It runs as two processes:

    guardian   kills an agent that does not end although it should, and what a killed one leaves behind
    agent      starts workers in their own sessions, forwards their output, ends them and their descendants

Both are subreapers, so double-forked grandchildren stay visible. Workers die with the agent (PDEATHSIG), and the agent
ends if the guardian dies. It holds the workers' private files (such as the job's secret) in memfds, which they read
through /proc. It must start fast, so it imports little.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import selectors
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from hora import lifeline
from hora.launch.agent.fork_server import WorkerForks
from hora.launch.agent.protocol import (
    MESSAGES,
    Exited,
    Finish,
    Finished,
    Join,
    Leaving,
    Message,
    Output,
    Ping,
    Quit,
    Start,
    Started,
    Taken,
    Terminate,
)
from hora.launch.environment import allocator_variables, first_variables, variables
from hora.launch.limits import GRACE_S, THREAD_END_S
from hora.launch.processes import (
    Execute,
    Processes,
    Spawned,
    adopt_orphans,
    die_with_parent,
    exit_code,
    guard,
    remove_folder,
    send_signal,
    send_to_all,
    spawn,
)
from hora.launch.tail import Tail
from hora.net.messages import Frames, Pong, frame

if TYPE_CHECKING:
    from hora.launch.agent.pmi import MpiWorld

LEFT = 75  # the exit status of ranks that have left, and of their agent: EX_TEMPFAIL, start it again

_READ_BYTES = _TAIL_BYTES = 64 * 1024
BACKLOG_BYTES = 1024 * 1024  # of output not yet taken by the controller; above it the workers' pipes are not read
_LONGEST_WAIT_S = 3600.0  # the selector accepts at most 24 days, and a limit may be longer
_SWEEP_S = 0.02
_LEAVE_LIMIT_S = 600.0  # the sender of the SIGTERM has its own limit
_NEVER = float("inf")


class ControllerLink:
    """An agent's link to its controller. Its threads exchange messages: the agent's loop polls `fileno`, never blocked.

    `gone`: the controller will not reconnect. `silence_limit_s`: of the controller, after which the agent ends.
    `elastic`: an agent that is asked to end lets its workers leave first.
    """

    silence_limit_s = _NEVER
    elastic = False

    def __init__(self) -> None:
        self.gone = False
        self._inbox: deque[Message | None] = deque()  # None: the link has ended for good
        self._ahead, self._lock = 0, threading.Lock()
        self._wake_in, self.wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self.wake_out, False)

    @property
    def backlog(self) -> int:
        """Return the bytes of output that the controller has not taken yet."""
        return self._ahead

    def fileno(self) -> int:
        return self._wake_in

    def receive(self) -> list[Message]:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_in, 4096)
        found: list[Message] = []
        while self._inbox:
            message = self._inbox.popleft()
            if message is None:
                self.gone = True
            else:
                found.append(message)
        return found

    def send(self, message: Message) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def wake(self) -> None:
        """Wake the agent's loop. From any thread."""
        with contextlib.suppress(BlockingIOError):  # full: a wake-up is pending
            os.write(self.wake_out, b"\0")

    def _put(self, message: Message | None) -> None:
        """Pass an order to the agent's loop. From any thread."""
        self._inbox.append(message)
        self.wake()

    def _count(self, num_bytes: int) -> None:
        """Add bytes to the backlog; wake the agent if it may read its workers' pipes again."""
        with self._lock:
            before, self._ahead = self._ahead, self._ahead + num_bytes
        if before >= BACKLOG_BYTES > self._ahead:
            self.wake()


class ThreadedLink(ControllerLink):
    """A link to one controller, with a thread that receives its `messages` and one that sends by `pass_on`."""

    def __init__(self, messages: Iterable[Message], pass_on: Callable[[Message], None]) -> None:
        super().__init__()
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._receiver = threading.Thread(
            target=self._receive, args=(messages,), name="hora-agent-receive", daemon=True
        )
        self._sender = threading.Thread(target=self._send, args=(pass_on,), name="hora-agent-send", daemon=True)
        self._receiver.start()
        self._sender.start()

    def send(self, message: Message) -> None:
        if isinstance(message, Output):
            self._count(len(message.data))
        self._outbox.put(message)

    def close(self) -> None:
        """Send what is left."""
        self._outbox.put(None)
        self._sender.join(THREAD_END_S)

    def _receive(self, messages: Iterable[Message]) -> None:
        try:
            for message in messages:
                if isinstance(message, Taken):
                    self._count(-message.num_bytes)
                else:
                    self._put(message)
        finally:
            with self._lock:
                self._ahead = 0
            self._put(None)

    def _send(self, pass_on: Callable[[Message], None]) -> None:
        while (message := self._outbox.get()) is not None:
            pass_on(message)


class LocalLink(ThreadedLink):
    """The link to a controller on this machine: standard input, a socket. At its end the controller is gone."""

    def __init__(self, controller_pid: int) -> None:
        super().__init__(self._received(controller_pid), self._pass_on)

    def _received(self, controller_pid: int) -> Iterator[Message]:
        frames, watched = Frames(MESSAGES), [0]
        with contextlib.suppress(OSError, AttributeError):
            # A process that the controller forked may keep the socket open.
            watched.append(os.pidfd_open(controller_pid))
        with contextlib.suppress(OSError):
            while 0 in select.select(watched, [], [])[0] and (data := os.read(0, _READ_BYTES)):
                yield from frames.feed(data)

    def _pass_on(self, message: Message) -> None:
        data = memoryview(frame(message))
        with contextlib.suppress(OSError):  # the controller is gone
            while data:
                data = data[os.write(0, data) :]
        if isinstance(message, Output):
            self._count(-len(message.data))


class Agent:
    """Running -> (link gone, Finish, Quit, SIGTERM, guardian or controller dead) -> ending -> finished -> out.

    A first SIGTERM in an elastic job: leaving, until the workers have left -> ending. `fork`: becomes a worker in its
    forked process, if that `suits` its environment. `has_fork_server`: one is started for workers that may be forked.
    `copies`, `streams`: see `protocol.Invitation`. `scratch`: a folder in which each worker may make its own
    (`HORA_SCRATCH`) for temporary files, which goes with the worker, whatever ends that.
    """

    scratch: ClassVar[str] = ""  # set by `guarded`

    def __init__(
        self,
        link: ControllerLink,
        *,
        fork: Execute | None = None,
        suits: Callable[[Mapping[str, str]], bool] = lambda env: True,
        has_fork_server: bool = True,
        copies: bool = False,
        streams: bool = True,
    ) -> None:
        self._link = link
        self._selector = selectors.DefaultSelector()
        self._pipes = selectors.EpollSelector()  # of the workers' output
        self._pids: dict[int, int] = {}  # worker -> pid of its first process, until that is reaped
        self._killing: dict[int, float] = {}  # worker -> when SIGTERM turns into SIGKILL
        self._ending = _NEVER  # when everything left gets SIGKILL
        self._finished = False  # no process was left when everything was ended
        self._status: int | None = None  # of the job, or why this agent ends before it
        self._signal = 0  # that came last, and is still to be handled
        self._leaving_until = _NEVER
        self._paused = True  # the workers' pipes are left unread: not begun yet, or the controller is slow
        self._forks: WorkerForks | None = None
        self._mpi_world: MpiWorld | None = None
        self._may_use_mpi = True  # until that fails
        self._held: dict[int, contextlib.ExitStack] = {}  # worker -> its private files and lifeline, until its end
        self._calls: deque[Callable[[], None]] = deque()  # from other threads
        self._requested: dict[int, tuple[Start, dict[str, str]]] = {}  # worker -> order, environment
        self._strays: dict[int, int] = {}  # pid -> status
        self._guardian_pid = os.getppid()
        self._fork, self._suits, self._may_start_forks = fork, suits, has_fork_server
        self._copies, self._streams = copies, streams
        self._tails: dict[tuple[int, str], Tail] = {}  # of output that is not sent as it comes
        self._heard = _NEVER  # counts from the first order on: a node may wait long for its job to begin
        signal.set_wakeup_fd(self._link.wake_out, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self._selector.register(self._link, selectors.EVENT_READ, self._obey_all)

    def _on_signal(self, number: int, *_: object) -> None:
        self._signal = number  # a handler may run anywhere, even in the middle of a start: only record the signal

    def run(self) -> int | None:
        """Obey the controller to the end. Return the job's status; None: the controller is gone."""
        while not self._over():
            self._turn()
        self._link.close()
        remove_folder(self.scratch)
        return LEFT if self._status is None and self._leaving_until < _NEVER else self._status

    def _over(self) -> bool:
        # A subreaper without children has no descendants.
        if self._ending == _NEVER or self._reap():
            return False
        if not self._finished:
            self._finished = True
            for worker in list(self._requested):
                self._exited(worker, 128 + signal.SIGTERM, "")
            self._drain_pipes()
            self._link.send(Finished())
        return self._status is not None or self._link.gone

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._wait_s()):
            key.data()
        self._read_or_pause()
        if os.getppid() != self._guardian_pid:
            self._end(GRACE_S, 128 + signal.SIGTERM)
        elif self._signal:
            number, self._signal = self._signal, 0
            self._on_request(number)
        now = time.monotonic()
        if self._link.gone or now > self._heard + self._link.silence_limit_s:
            self._link.gone = True
            self._end(GRACE_S)
        if now > self._leaving_until or (self._leaving_until < _NEVER and not (self._pids or self._requested)):
            self._end(GRACE_S, LEFT)
        while self._calls:
            self._calls.popleft()()
        self._reap()
        self._kill_overdue()

    def _wait_s(self) -> float:
        if self._ending < _NEVER and not self._finished:
            return _SWEEP_S
        first = min(*self._killing.values(), self._heard + self._link.silence_limit_s, self._leaving_until)
        return min(max(first - time.monotonic(), _SWEEP_S), _LONGEST_WAIT_S)

    def _later(self, call: Callable[..., None], *args: Any) -> None:
        """Have the loop make this call. From any thread."""
        self._calls.append(partial(call, *args))
        self._link.wake()

    def _read_or_pause(self) -> None:
        """Read the workers' pipes unless the controller is far behind."""
        if self._paused != (self._link.backlog >= BACKLOG_BYTES):
            self._paused = not self._paused
            if self._paused:
                self._selector.unregister(self._pipes)
            else:
                self._selector.register(self._pipes, selectors.EVENT_READ, self._forward_all)

    def _on_request(self, number: int) -> None:
        """Handle a request to end: elastic workers may leave first; a second request ends them at once."""
        if self._link.elastic and self._leaving_until == _NEVER and number == signal.SIGTERM:
            self._leaving_until = time.monotonic() + _LEAVE_LIMIT_S
            self._link.send(Leaving())
        elif self._ending == _NEVER:
            self._end(GRACE_S, 128 + number)

    # ---- orders -------------------------------------------------------------------------------------------

    def _obey_all(self) -> None:
        for message in self._link.receive():
            self._heard = time.monotonic()
            match message:
                case Start():
                    try:
                        self._start(message)
                    except (OSError, RuntimeError) as error:  # no descriptor or thread is left, for example
                        why = f"cannot start a worker: {error}; see `ulimit -n` and `ulimit -u`"
                        self._exited(message.worker, 127, why)
                case Terminate(workers, grace_s):
                    self._terminate(workers, grace_s)
                case Finish(grace_s):
                    self._end(grace_s)
                case Ping():
                    self._link.send(Pong())
                case Quit(status):
                    self._end(GRACE_S, status)

    def _start(self, order: Start) -> None:
        worker = order.worker
        if self._finished and self._status is None and not self._link.gone:  # the next leader of the job goes on
            self._ending, self._finished = _NEVER, False
        if self._ending < _NEVER:
            self._exited(worker, 128 + signal.SIGTERM, "the job was ending already")
            return
        env = variables() if order.inherit_env else {}
        held = self._held[worker] = contextlib.ExitStack()
        line = lifeline.Lifeline(lambda: self._later(self._report_dying, worker))
        held.callback(line.close)
        files = {name: _private_file(data, held) for name, data in order.private_files.items()}
        execute: Execute = os.execvpe
        if self._fork is not None and order.preload is not None and self._suits(env | order.env):
            execute = self._fork
        env |= order.env | files | {"HORA_LIFELINE": line.path}
        if self.scratch:
            env["HORA_SCRATCH"] = f"{self.scratch}/{worker}"
        # N ranks with one thread per core each would compete for the cores.
        share = len(os.sched_getaffinity(0)) // int(env.get("HOROVOD_LOCAL_SIZE", "1"))
        env.setdefault("OMP_NUM_THREADS", str(max(share, 1)))
        env |= allocator_variables(env)
        if env.get("HORA_MPI") == "1" and self.scratch and self._mpi_world is None and self._may_use_mpi:
            from hora.launch.agent.pmi import mpi_world  # other jobs start faster without

            try:
                self._mpi_world = mpi_world(env, f"{self.scratch}/mpi")
            except OSError as error:
                self._begin_without_mpi(worker, error)
            if self._mpi_world is not None:
                self._selector.register(self._mpi_world.ranks, selectors.EVENT_READ, self._mpi_world.answer)
        if self._mpi_world is not None:
            env |= self._mpi_world.variables(int(env["HOROVOD_RANK"]))
        if order.preload is None or not self._may_start_forks or not self._ask_to_fork(order, order.preload, env):
            self._execute(order, env, execute)

    def _begin_without_mpi(self, worker: int, error: OSError) -> None:
        self._may_use_mpi = False
        why = f"{error.filename or self.scratch}: {error.strerror}; set TMPDIR to a folder that can be written"
        self._link.send(Output(worker, "stderr", f"hora: the ranks are no MPI world: {why}\n".encode()))

    def _execute(self, order: Start, env: dict[str, str], execute: Execute = os.execvpe) -> None:
        with contextlib.ExitStack() as stack:
            try:
                if self._mpi_world is not None:
                    names, inherited = self._mpi_world.connect(int(env["HOROVOD_RANK"]))
                    stack.enter_context(inherited)
                    env |= names
                spawned = spawn(order.argv, env, order.cwd, execute=execute)
            except OSError as error:
                self._exited(order.worker, 127, str(error))
            else:
                self._adopt(order.worker, spawned)

    def _adopt(self, worker: int, spawned: Spawned) -> None:
        self._pids[worker] = spawned.pid
        self._listen_to(spawned, worker)
        self._link.send(Started(worker, spawned.pid))

    # ---- forked workers --------------------------------------------------------------------------

    def _ask_to_fork(self, order: Start, modules: list[str], env: dict[str, str]) -> bool:
        """Ask the fork server for this worker. Return False if it must be executed instead."""
        executable, worker = order.argv[0], order.worker
        if self._forks is None:
            try:
                # Without this worker's number: descendants of the server must not count as its own.
                shared = {name: value for name, value in env.items() if name != "HORA_WORKER"}
                self._forks = WorkerForks(
                    executable, modules, shared, order.cwd, lambda *fork: self._later(self._adopt_forked, *fork)
                )
            except OSError:  # executing the worker fails for the same reason, and reports it
                return False
            self._listen_to(self._forks.process, worker)
        requested = self._forks.fork(worker, order.argv, modules, env, order.cwd)
        if requested:
            self._requested[worker] = (order, env)
        return requested

    def _adopt_forked(self, worker: int, spawned: Spawned | None) -> None:
        order = self._requested.pop(worker, None)
        if spawned is None:
            if order is not None and self._ending == _NEVER:
                self._execute(*order)
            elif order is not None:
                self._exited(worker, 128 + signal.SIGTERM, "")
        elif order is not None:
            self._adopt(worker, spawned)
            if spawned.pid in self._strays:
                self._ended(worker, self._strays.pop(spawned.pid))
        else:  # it was terminated before it was forked
            if self._strays.pop(spawned.pid, None) is None:
                send_signal(spawned.pid, signal.SIGKILL)
            os.close(spawned.stdout)
            os.close(spawned.stderr)

    # ---- output -------------------------------------------------------------------------------------------

    def _listen_to(self, process: Spawned, worker: int) -> None:
        self._pipes.register(process.stdout, selectors.EVENT_READ, (worker, "stdout"))
        self._pipes.register(process.stderr, selectors.EVENT_READ, (worker, "stderr"))

    def _forward_all(self) -> None:
        for key, _ in self._pipes.select(0):
            self._forward(key)

    def _forward(self, pipe: selectors.SelectorKey) -> bool:
        """Forward available output; return False at end of file or if the pipe is empty."""
        worker, stream = pipe.data
        try:
            data = os.read(pipe.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._pass_on(worker, stream, data)
            return True
        self._pipes.unregister(pipe.fd)
        os.close(pipe.fd)
        return False

    def _pass_on(self, worker: int, stream: str, data: bytes) -> None:
        if self._copies:
            with contextlib.suppress(OSError):  # nobody keeps it any more
                os.write(2, data)
        if self._streams:
            self._link.send(Output(worker, stream, data))
        else:
            self._tails.setdefault((worker, stream), Tail(_TAIL_BYTES)).add(data)

    def _drain_pipes(self, worker: int | None = None) -> None:
        for pipe in list(self._pipes.get_map().values()):
            # A pipe holds 64 KiB by default; a process that keeps writing must not block the loop.
            for _ in range(32):
                if worker not in (None, pipe.data[0]) or not self._forward(pipe):
                    break

    # ---- endings ------------------------------------------------------------------------------------------

    def _reap(self) -> bool:
        """Reap ended children; return True while any are left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            worker = next((worker for worker, first in self._pids.items() if first == pid), None)
            if worker is not None:
                self._ended(worker, status)
            elif self._requested:
                self._strays[pid] = status  # perhaps a worker whose fork is not reported yet

    def _report_dying(self, worker: int) -> None:
        """Report the death of a worker whose memory Linux is still freeing, unless the agent ended it."""
        pid = self._pids.get(worker)
        if pid is None or worker in self._killing or self._ending < _NEVER:
            return
        status = lifeline.status_of_dying(pid)
        if status:  # otherwise it may have executed another program
            self._drain_pipes(worker)
            self._exited(worker, exit_code(status), "")

    def _ended(self, worker: int, status: int) -> None:
        del self._pids[worker]
        if worker in self._held:
            self._drain_pipes(worker)
            self._exited(worker, exit_code(status), "")

    def _exited(self, worker: int, code: int, reason: str) -> None:
        self._requested.pop(worker, None)
        self._held.pop(worker, contextlib.ExitStack()).close()
        for stream in ("stdout", "stderr"):
            tail = self._tails.pop((worker, stream), None)
            if tail is not None and code:
                self._link.send(Output(worker, stream, bytes(tail)))
        self._link.send(Exited(worker, code, reason))
        if self.scratch:
            remove_folder(f"{self.scratch}/{worker}")

    def _family(self, worker: int, processes: Processes) -> list[int]:
        """Return the worker's processes, including orphans that this process inherited."""
        first = self._pids.get(worker)
        roots = [] if first is None else [first]
        for child in processes.children[os.getpid()]:
            if child not in self._pids.values() and first_variables(child).get("HORA_WORKER") == str(worker):
                roots.append(child)
        return roots + [pid for root in roots for pid in processes.descendants(root)]

    def _terminate(self, workers: list[int], grace_s: float) -> None:
        processes = Processes()
        for worker in workers:
            if worker in self._requested:
                self._exited(worker, 128 + signal.SIGTERM, "")
            family = self._family(worker, processes)
            send_to_all(family, signal.SIGTERM if grace_s > 0 else signal.SIGKILL)
            self._killing.setdefault(worker, time.monotonic() + grace_s)

    def _end(self, grace_s: float, status: int | None = None) -> None:
        """End all workers, and then this agent if it has a status."""
        self._status = status if self._status is None else self._status
        if self._ending == _NEVER:
            send_to_all(Processes().descendants(os.getpid()), signal.SIGTERM)
        self._ending = min(self._ending, time.monotonic() + grace_s)

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        overdue = [worker for worker, limit in self._killing.items() if now >= limit]
        if not overdue and now < self._ending:
            return
        processes = Processes()
        for worker in overdue:
            family = self._family(worker, processes)
            send_to_all(family, signal.SIGKILL)
            if not family:
                del self._killing[worker]
        if now >= self._ending:
            send_to_all(processes.descendants(os.getpid()), signal.SIGKILL)


def on_this_node(order: Start, meeting: dict[str, str], controllers_python: str) -> Start:
    """Adapt an order to this node: the rendezvous address for its workers, and this node's Python."""
    program, *arguments = order.argv
    return order._replace(
        argv=[sys.executable if program == controllers_python else program, *arguments], env=order.env | meeting
    )


def _private_file(data: str, held: contextlib.ExitStack) -> str:
    """Return a path under which a worker can read this data (in hexadecimal) during its life; it is never on a disk."""
    descriptor = os.memfd_create("hora-private", os.MFD_CLOEXEC)
    held.callback(os.close, descriptor)
    os.write(descriptor, bytes.fromhex(data))
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def guarded(controller: int | None = None, *, report: int | None = None) -> None:
    """Fork: this process becomes the guardian and exits with the agent's status; the child, the agent, returns.

    `controller`: our parent, if that is it. `report`: a descriptor to which the guardian writes the status.
    """
    guardian = os.getpid()
    Agent.scratch = f"{variables().get('TMPDIR') or '/tmp'}/hora-{os.urandom(8).hex()}"
    adopt_orphans()
    pid = os.fork()
    if pid:
        status = guard(pid, controller)
        remove_folder(Agent.scratch)
        if report is not None:
            os.write(report, str(status).encode())
        os._exit(status)
    if report is not None:
        os.close(report)
    if not die_with_parent(guardian, signal.SIGTERM):
        os._exit(128 + signal.SIGTERM)
    adopt_orphans()


def serve_locally() -> int:
    """Run the agent of a controller on this machine: the parent process, connected to standard input."""
    controller_pid = os.getppid()
    try:
        guarded(controller_pid)
        link = LocalLink(controller_pid)
    except (RuntimeError, BlockingIOError) as error:
        print(f"{error}: too few processes are allowed; see `ulimit -u`", file=sys.stderr)
        return 1
    agent = Agent(link)
    link.send(Join(0, "", 0, "", [], []))
    return agent.run() or 0


if __name__ == "__main__":
    sys.exit(serve_locally())
