"""One host of a job, seen from the launcher: the other end of a supervisor's pipes.

Starts the supervisor of this machine, or is given one that runs; sends it orders, and reports its frames as
`LaunchEvents`. Called by `launcher`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from hora.launch.agent import supervisor
from hora.launch.job import LaunchEvents, WorkerExit, WorkerSpec
from hora.launch.tail import Tail

__all__ = ["HostConnection", "SupervisorProcess", "local_supervisor_command", "wait_or_kill"]

_TAIL_BYTES = 4096
_PIPE_BYTES = 1024 * 1024
_READ_BYTES = 256 * 1024
_BEATS = 6  # in the time after which a silent host is given up
# After SIGKILL everything is a matter of milliseconds, even on a busy machine.
_CLOSE_SLACK_S = 15.0


_RUN_SUPERVISOR = """
import sys
sys.path.append(sys.argv.pop(1))
from hora.launch.agent.supervisor import main
sys.exit(main())
"""


def local_supervisor_command(executable: str = sys.executable) -> tuple[str, ...]:
    """Return the command that starts a supervisor here: isolated and without site-packages, which is faster."""
    source = str(Path(supervisor.__file__).resolve().parents[3])
    return (executable, "-I", "-S", "-c", _RUN_SUPERVISOR, source)


class Child(Protocol):
    """A process that can be waited for: `subprocess.Popen`, or something like it."""

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def wait_or_kill(process: Child, limit_s: float) -> int:
    """The exit status of a process that is about to end; one that has not ended in time is killed."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(_CLOSE_SLACK_S)


class SupervisorProcess(Child, Protocol):
    """Subset of the Popen interface that a host needs of its supervisor's process."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None


class HostConnection:
    """A running supervisor. `inherit_env`: workers get their environment on top of the supervisor's own.

    `silence_limit_s`: for one beyond a network, which gets signs of life and answers them: it is given up when it has
    not for so long. `process`: a supervisor that runs already; else one is started here. `workers`: those that it has
    started, and whether we look after them.
    """

    def __init__(
        self,
        name: str,
        events: LaunchEvents,
        *,
        inherit_env: bool = False,
        silence_limit_s: float | None = None,
        process: SupervisorProcess | None = None,
        workers: Mapping[int, bool] | None = None,
    ) -> None:
        self.name = name
        self._events, self._inherit_env, self._silence_limit_s = events, inherit_env, silence_limit_s
        # Its own session: Ctrl-C in a terminal reaches the launcher only, which ends the workers in order.
        self._process: SupervisorProcess = process or subprocess.Popen(
            local_supervisor_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        self._lock = threading.Lock()
        self._running = {number for number, ours in (workers or {}).items() if ours}
        self._own = set(workers or ())  # workers that were ever started here: of no other does this host say anything
        self._has_fork_server = False
        self._over_now = threading.Event()
        self._ended: str | None = None  # why nothing can be started here any more
        self._complaints = Tail(_TAIL_BYTES)
        self._marked = False  # the supervisor runs
        self._listening, self._num_heard = False, 0  # the reader waits for news; how often there have been some
        self._given_up = False
        with contextlib.suppress(OSError):  # a small pipe works too, with more turns
            fcntl.fcntl(self._stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._reader = threading.Thread(target=self._read, name=f"hora-host {name}", daemon=True)
        self._reader.start()
        # Its own thread: the reader may be held up by a slow console, which is no reason to take us for dead.
        self._heart: threading.Thread | None = None
        if silence_limit_s is not None:
            beat_s = silence_limit_s / _BEATS
            self._heart = threading.Thread(
                target=self._beat, args=(beat_s,), name=f"hora-heartbeat {name}", daemon=True
            )
            self._heart.start()

    @property
    def _stdout(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    @property
    def ended(self) -> bool:
        """Return whether the supervisor (or its guardian) is gone or out of reach; exits may still be reported."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0)
            return True
        return self._ended is not None

    @property
    def over(self) -> bool:
        """Return whether the supervisor is gone and everything that it reported has been passed on."""
        return self._over_now.is_set() and not self._reader.is_alive()

    def start(self, workers: Sequence[WorkerSpec]) -> None:
        orders = bytearray()
        # One worker alone is not worth a fork server, but an elastic job's newcomer may come from the one there is.
        self._has_fork_server = self._has_fork_server or len(workers) > 1
        for spec in workers:
            order = {
                "op": "start",
                "worker": spec.worker,
                "argv": list(spec.argv),
                "env": dict(spec.env),
                "inherit_env": self._inherit_env,
                "cwd": spec.cwd,
                "private_files": {name: data.hex() for name, data in spec.private_files.items()},
                "preload": spec.preload if self._has_fork_server else None,
            }
            orders += json.dumps(order).encode() + b"\n"
        with self._lock:
            ended = self._ended
            if ended is None:
                self._running |= {spec.worker for spec in workers}
                self._own |= self._running
        if ended is None:
            self._order(bytes(orders))
        else:
            for spec in workers:
                self._events.exited(WorkerExit(worker=spec.worker, code=255, reason=ended))

    def terminate(self, workers: Iterable[int], *, grace_s: float) -> None:
        with self._lock:
            chosen = sorted(self._running.intersection(workers))
        if chosen:
            self._command(op="terminate", workers=chosen, grace_s=grace_s)

    def clear_up(self, worker: int, *, grace_s: float) -> None:
        """End what a worker that has ended has left running. Does not wait."""
        self._command(op="terminate", workers=[worker], grace_s=grace_s)

    def finish(self, *, grace_s: float) -> None:
        """End every worker and descendant that is left, and the supervisor. Does not wait. Idempotent."""
        self._command(op="finish", grace_s=grace_s)

    def abandon(self) -> None:
        """Report nothing any more: another launcher looks after this host."""
        with self._lock:
            self._running.clear()
            self._events = _NoEvents()
        self._over_now.set()

    def wait(self, timeout_s: float) -> None:
        """Wait until all is over; after the time limit, kill the supervisor, which takes its workers with it."""
        wait_or_kill(self._process, timeout_s)
        self._reader.join(_CLOSE_SLACK_S)
        if self._heart is not None:
            self._heart.join(_CLOSE_SLACK_S)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):  # unsent orders for a dead supervisor
                    pipe.close()

    def _beat(self, beat_s: float) -> None:
        """Send signs of life, and count those to which nothing has come back while the reader waited for it. Beats, not
        seconds: time in which this process did not run is nobody's silence."""
        unanswered = num_heard = 0
        while not self._over_now.wait(beat_s):
            before, num_heard = num_heard, self._num_heard
            answered = num_heard != before or not self._listening
            unanswered = 0 if answered or not self._marked else unanswered + 1
            if unanswered > _BEATS:
                self._given_up = True
                self._process.kill()
                return
            self._command(op="alive")

    def _command(self, **order: object) -> None:
        self._order(json.dumps(order).encode() + b"\n")

    def _order(self, data: bytes) -> None:
        assert self._process.stdin is not None
        # When the supervisor is gone the reader knows, and reports all its workers as ended.
        with contextlib.suppress(BrokenPipeError, ValueError), self._lock:
            view = memoryview(data)
            while view:
                view = view[self._process.stdin.write(view) or 0 :]

    # ---- in the reader's thread ---------------------------------------------------------------------------

    def _read(self) -> None:
        assert self._process.stderr is not None
        buffer = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            selector.register(self._process.stderr.fileno(), selectors.EVENT_READ)
            while self._stdout in selector.get_map():
                self._listening = True
                ready = selector.select()
                self._listening, self._num_heard = False, self._num_heard + 1
                for key, _ in ready:
                    data = os.read(key.fd, _READ_BYTES)
                    if not data:
                        selector.unregister(key.fd)
                    elif key.fd != self._stdout:
                        self._complaints.add(data)
                    else:
                        buffer += data
                        self._marked = self._marked or supervisor.skip_mark(buffer)
                        if self._marked and not self._take_frames_or_hang_up(buffer):
                            selector.unregister(key.fd)
            for key in list(selector.get_map().values()):
                os.set_blocking(key.fd, False)
                with contextlib.suppress(BlockingIOError):
                    self._complaints.add(os.read(key.fd, _TAIL_BYTES))
        self._over()

    def _take_frames_or_hang_up(self, buffer: bytearray) -> bool:
        """A host that has been taken over may send anything: it must not hold up the launcher, nor fill its memory."""
        try:
            self._take_frames(buffer)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            self._complaints.add(f"it sent what no supervisor sends ({error})".encode())
            self._process.kill()
            return False
        return True

    def _take_frames(self, buffer: bytearray) -> None:
        while frame := supervisor.take_frame(buffer):
            kind, worker, body = frame
            if worker not in self._own and kind != supervisor.ALIVE:
                raise ValueError(f"a frame of worker {worker}, which is not there")
            if kind == supervisor.STARTED:
                self._events.started(worker)
            elif kind == supervisor.EXITED:
                news = json.loads(body)
                self._report(WorkerExit(worker=worker, code=int(news["code"]), reason=str(news["reason"])))
            elif kind != supervisor.ALIVE:
                self._events.output(worker, "stdout" if kind == supervisor.STDOUT else "stderr", body)

    def _report(self, ended: WorkerExit) -> None:
        with self._lock:
            if ended.worker not in self._running:
                return
            self._running.discard(ended.worker)
        self._events.exited(ended)

    def _over(self) -> None:
        self._over_now.set()
        code = self._process.wait()
        complaints = bytes(self._complaints).decode(errors="replace").strip()
        happened = "ended unexpectedly" if self._marked else "did not start"
        why = f"the supervisor on host {self.name} {happened} (exit status {code})"
        if self._given_up:
            why = (
                f"host {self.name} has not answered for {self._silence_limit_s:g} s and was given up; raise "
                "--silence-timeout (HORA_SILENCE_TIMEOUT) if it may be so busy"
            )
        why += f": {complaints}" if complaints else ""
        with self._lock:
            self._ended = why
            orphans, self._running = sorted(self._running), set()
        for worker in orphans:
            self._events.exited(WorkerExit(worker=worker, code=255, reason=why))


class _NoEvents:
    """Implements LaunchEvents for nobody."""

    def output(self, worker: int, stream: str, data: bytes) -> None: ...
    def started(self, worker: int) -> None: ...
    def exited(self, ended: WorkerExit) -> None: ...
