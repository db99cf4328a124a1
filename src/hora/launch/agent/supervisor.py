"""The supervisor: the process on each host that starts a job's workers there and sees to it that none outlives it.

Started by the launcher, or by the agent or keeper of a node, with its standard input as life line: JSON lines come in,
frames go out on standard output, and the end of input means that the launcher is gone. It runs as two processes:

    guardian     inherits whatever the supervisor leaves behind, should that be killed, and ends it
    supervisor   starts workers in their own sessions, forwards their output, ends them and their descendants

Both are subreapers, so double-forked grandchildren stay in sight; workers die with the supervisor (PDEATHSIG); the
supervisor takes the guardian's death for an order to end. It also holds the workers' private files (the job's secret
above all) in memfds, which they read through /proc. It must start fast and imports accordingly.

Where a network lies between, the launcher sends {"op": "alive"} now and then, which the supervisor answers, and the
supervisor's only argument says after how many seconds of silence it takes the launcher for gone.

Commands: {"op": "start", "worker", "argv", "env", "inherit_env", "cwd", "private_files", "preload"}, {"op":
"terminate", "workers", "grace_s"}, {"op": "finish", "grace_s"}. Frames: kind, worker, length, body; kinds are the
constants below.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import struct
import sys
import time
from collections import deque
from typing import Any

from hora import lifeline
from hora.launch.agent.fork_server import WorkerForks
from hora.launch.agent.processes import (
    Execute,
    Processes,
    Spawned,
    adopt_orphans,
    die_with_parent,
    environment_value,
    exit_code,
    guard,
    send_signal,
    spawn,
)
from hora.launch.environment import variables

MARK = b"\n== hora supervisor 1 ==\n"  # it runs
FRAME = struct.Struct(">cii")
STARTED, STDOUT, STDERR, EXITED, ALIVE = b"s", b"o", b"e", b"x", b"a"
NO_WORKER = -1

_MAX_FRAME_BYTES = 4 * 1024 * 1024
_READ_BYTES = 64 * 1024
_BACKLOG_BYTES = 1024 * 1024  # of unsent output, above which workers' pipes are left unread
_FLUSH_LIMIT_S = 2.0
_LONGEST_WAIT_S = 3600.0  # the selector takes no more than 24 days, and a limit may be longer
_SWEEP_S = 0.02
_DEFAULT_GRACE_S = 5.0


def skip_mark(buffer: bytearray) -> bool:
    """Drop what comes before a supervisor's frames; False until the mark has come."""
    _, mark, rest = buffer.partition(MARK)
    if mark:
        buffer[:] = rest
    return bool(mark)


def take_frame(buffer: bytearray) -> tuple[bytes, int, bytes] | None:
    """Take the first whole frame out of the buffer: kind, worker, body. ValueError for what no supervisor sends."""
    if len(buffer) < FRAME.size:
        return None
    kind, worker, length = FRAME.unpack_from(buffer)
    if not 0 <= length <= _MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    end = FRAME.size + length
    if len(buffer) < end:
        return None
    body = bytes(buffer[FRAME.size : end])
    del buffer[:end]
    return kind, worker, body


class _Supervisor:
    """Started -> running -> (input ended, finish, SIGTERM, guardian or launcher dead) -> ending -> out."""

    def __init__(self, launcher_pid: int, guardian_pid: int, silence_limit_s: float | None, execute: Execute) -> None:
        self._selector = selectors.DefaultSelector()
        self._pids: dict[int, int] = {}  # worker -> pid of its first process, until that is reaped
        self._pipes: dict[int, tuple[int, bytes]] = {}  # descriptor -> worker, kind
        self._killing: dict[int, float] = {}  # worker -> when SIGTERM turns into SIGKILL
        self._ending: float | None = None  # when everything left gets SIGKILL
        self._input = bytearray()
        self._output = bytearray()
        self._end_requested = False
        self._paused = False  # the launcher is slow, workers' pipes are left unread
        self._deaf = False  # the launcher does not read any more
        self._private_files: dict[str, tuple[int, set[int]]] = {}  # content, in hexadecimal -> descriptor, readers
        self._forks: WorkerForks | None = None
        self._lifelines: dict[int, lifeline.Lifeline] = {}  # of workers that run
        self._dead: deque[int] = deque()  # workers whose lifelines tell so
        self._requested: dict[int, tuple[dict[str, Any], dict[str, str]]] = {}  # worker -> command, environment
        self._strays: dict[int, int] = {}  # pid -> status
        self._guardian_pid, self._become_worker = guardian_pid, execute
        self._silence_limit_s = silence_limit_s
        self._heard = float("inf")  # counts from the first order on: a node may wait long for its job to begin
        self._watch(launcher_pid)

    def _watch(self, launcher_pid: int) -> None:
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake_out, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        self._selector.register(0, selectors.EVENT_READ, self._read_commands)
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._drain_wake)
        # The end of input tells that the launcher is gone, unless a process that it forked holds on to the
        # pipe: so watch the launcher itself too.
        with contextlib.suppress(OSError, AttributeError):
            launcher = os.pidfd_open(launcher_pid)
            self._selector.register(launcher, selectors.EVENT_READ, lambda: self._launcher_died(launcher))

    def _on_signal(self, *_: object) -> None:
        self._end_requested = True  # a handler may run anywhere, even half-way through a start: only take note

    def run(self) -> None:
        self._send_raw(MARK)
        # A subreaper without children has no descendants.
        while self._ending is None or self._reap():
            self._turn()
        for worker in self._requested:
            self._exited(worker, 128 + signal.SIGTERM, "")
        self._drain_pipes()
        limit = time.monotonic() + _FLUSH_LIMIT_S
        while self._output and not self._deaf and time.monotonic() < limit:
            self._turn()

    def _turn(self) -> None:
        for key, _ in self._selector.select(_SWEEP_S if self._ending is not None else self._wait_s()):
            if key.fd in self._pipes:
                self._forward(key.fd)
            elif key.fd == 1:
                self._flush()
            else:
                key.data()
        if self._end_requested or os.getppid() != self._guardian_pid:
            self._end_requested = False
            self._end(_DEFAULT_GRACE_S)
        if self._silence_limit_s is not None and time.monotonic() > self._heard + self._silence_limit_s:
            self._end(_DEFAULT_GRACE_S)
        self._report_dying()
        self._reap()
        self._kill_overdue()

    def _wait_s(self) -> float | None:
        times = list(self._killing.values())
        if self._silence_limit_s is not None:
            times.append(self._heard + self._silence_limit_s)
        return min(max(min(times) - time.monotonic(), _SWEEP_S), _LONGEST_WAIT_S) if times else None

    def _drain_wake(self) -> None:
        os.read(self._wake_in, 4096)

    def _launcher_died(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        self._end(_DEFAULT_GRACE_S)

    # ---- commands -----------------------------------------------------------------------------------------

    def _read_commands(self) -> None:
        data = os.read(0, _READ_BYTES)
        if not data:
            self._selector.unregister(0)
            self._end(_DEFAULT_GRACE_S)
            return
        self._heard = time.monotonic()
        self._input += data
        *lines, rest = self._input.split(b"\n")
        self._input = bytearray(rest)
        for line in lines:
            command = json.loads(line)
            if command["op"] == "start":
                self._start(command)
            elif command["op"] == "terminate":
                self._terminate(command["workers"], command["grace_s"])
            elif command["op"] == "finish":
                self._end(command["grace_s"])
            elif command["op"] == "alive" and not self._output:  # what waits to be sent tells as much
                self._send(ALIVE, NO_WORKER, b"")

    def _private_file(self, data: str, worker: int) -> str:
        """The path under which a worker reads this, as long as it lives, which is nowhere on a disk."""
        if data not in self._private_files:
            descriptor = os.memfd_create("hora-private", os.MFD_CLOEXEC)
            os.write(descriptor, bytes.fromhex(data))
            self._private_files[data] = descriptor, set()
        descriptor, readers = self._private_files[data]
        readers.add(worker)
        return f"/proc/{os.getpid()}/fd/{descriptor}"

    def _forget_private_files(self, worker: int) -> None:
        for data, (descriptor, readers) in list(self._private_files.items()):
            readers.discard(worker)
            if not readers:
                del self._private_files[data]
                os.close(descriptor)

    def _start(self, command: dict[str, Any]) -> None:
        worker = command["worker"]
        if self._ending is not None:
            self._exited(worker, 128 + signal.SIGTERM, "the job was ending already")
            return
        env = variables() if command["inherit_env"] else {}
        files = {name: self._private_file(data, worker) for name, data in command["private_files"].items()}
        self._lifelines[worker] = lifeline.Lifeline(lambda: self._on_death(worker))
        env |= command["env"] | files | {"HORA_LIFELINE": self._lifelines[worker].path}
        # N ranks that each start a thread per core would fight for the cores.
        env.setdefault("OMP_NUM_THREADS", _fair_share(env))
        if command["preload"] is None or not self._ask_to_fork(command, env):
            self._execute(command, env)

    def _execute(self, command: dict[str, Any], env: dict[str, str]) -> None:
        try:
            spawned = spawn(command["argv"], env, command["cwd"], execute=self._become_worker)
        except OSError as error:
            self._exited(command["worker"], 127, str(error))
        else:
            self._adopt(command["worker"], spawned)

    def _adopt(self, worker: int, spawned: Spawned) -> None:
        self._pids[worker] = spawned.pid
        for read_end, kind in ((spawned.stdout, STDOUT), (spawned.stderr, STDERR)):
            self._listen_to(read_end, worker, kind)
        self._send(STARTED, worker, str(spawned.pid).encode())

    # ---- forked workers --------------------------------------------------------------------------

    def _ask_to_fork(self, command: dict[str, Any], env: dict[str, str]) -> bool:
        """Have the fork server fork this worker. False if it has to be executed instead."""
        executable, modules, worker = command["argv"][0], command["preload"], command["worker"]
        if self._forks is None:
            try:
                # Not this worker's number: nothing that descends from the server shall be taken for its own.
                shared = {name: value for name, value in env.items() if name != "HORA_WORKER"}
                self._forks = WorkerForks(executable, modules, shared, command["cwd"])
            except OSError:  # executing the worker fails for the same reason, and reports it
                return False
            self._selector.register(self._forks, selectors.EVENT_READ, self._adopt_forked)
            for read_end, kind in ((self._forks.process.stdout, STDOUT), (self._forks.process.stderr, STDERR)):
                self._listen_to(read_end, worker, kind)
        if not self._forks.suits(executable, modules, env):
            return False
        self._requested[worker] = (command, env)
        self._forks.ask(worker, env, command["cwd"])
        return True

    def _adopt_forked(self) -> None:
        assert self._forks is not None
        try:
            for worker, spawned in self._forks.forked():
                if worker in self._requested:
                    del self._requested[worker]
                    self._adopt(worker, spawned)
                    if spawned.pid in self._strays:
                        self._ended(worker, self._strays.pop(spawned.pid))
                else:  # it was terminated before it was forked
                    send_signal(spawned.pid, signal.SIGKILL)
                    os.close(spawned.stdout)
                    os.close(spawned.stderr)
        except EOFError:
            self._selector.unregister(self._forks)
            self._forks.close()
            self._forks = None
            requested, self._requested = self._requested, {}
            for worker, (command, env) in requested.items():
                if self._ending is None:
                    self._execute(command, env)
                else:
                    self._exited(worker, 128 + signal.SIGTERM, "")

    # ---- output -------------------------------------------------------------------------------------------

    def _listen_to(self, descriptor: int, worker: int, kind: bytes) -> None:
        self._pipes[descriptor] = (worker, kind)
        if not self._paused:
            self._selector.register(descriptor, selectors.EVENT_READ)

    def _forward(self, descriptor: int) -> bool:
        """Forward what is there; False at the end of the pipe or when it is empty."""
        worker, kind = self._pipes[descriptor]
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._send(kind, worker, data)
            return True
        if not self._paused:
            self._selector.unregister(descriptor)
        del self._pipes[descriptor]
        os.close(descriptor)
        return False

    def _drain_pipes(self, worker: int | None = None) -> None:
        for descriptor, (owner, _) in list(self._pipes.items()):
            # A pipe holds 64 KiB by default; a process that goes on writing must not keep us here.
            for _ in range(32):
                if (worker is None or owner == worker) and not self._forward(descriptor):
                    break

    def _send(self, kind: bytes, worker: int, body: bytes) -> None:
        self._send_raw(FRAME.pack(kind, worker, len(body)) + body)

    def _send_raw(self, data: bytes) -> None:
        if not self._deaf:
            self._output += data
            self._flush()

    def _flush(self) -> None:
        try:
            while self._output:
                sent = os.write(1, self._output[:_READ_BYTES])
                del self._output[:sent]
        except BlockingIOError:
            pass  # the launcher is slow: the selector tells when it takes more
        except OSError:
            self._deaf = True
            self._output.clear()
            self._end(_DEFAULT_GRACE_S)
        watched = self._selector.get_map()
        if bool(self._output) != (1 in watched):
            if self._output:
                self._selector.register(1, selectors.EVENT_WRITE)
            else:
                self._selector.unregister(1)
        if self._paused != (len(self._output) >= _BACKLOG_BYTES):
            self._paused = not self._paused
            for descriptor in self._pipes:
                if self._paused:
                    self._selector.unregister(descriptor)
                else:
                    self._selector.register(descriptor, selectors.EVENT_READ)

    # ---- endings ------------------------------------------------------------------------------------------

    def _reap(self) -> bool:
        """Take note of ended children; True while there are any left."""
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
                self._strays[pid] = status  # perhaps a worker of whose fork we have not heard yet

    def _on_death(self, worker: int) -> None:
        """In a lifeline's thread."""
        self._dead.append(worker)
        with contextlib.suppress(BlockingIOError):  # full: a wake-up is pending
            os.write(self._wake_out, b"\0")

    def _report_dying(self) -> None:
        """Report the ends of workers that Linux is still freeing the memory of, unless they were ended from here."""
        while self._dead:
            worker = self._dead.popleft()
            pid = self._pids.get(worker)
            if pid is None or worker in self._killing or self._ending is not None:
                continue
            status = lifeline.status_of_dying(pid)
            if status:  # otherwise it may have executed another program
                self._drain_pipes(worker)
                self._exited(worker, exit_code(status), "")

    def _ended(self, worker: int, status: int) -> None:
        del self._pids[worker]
        if worker in self._lifelines:
            self._drain_pipes(worker)
            self._exited(worker, exit_code(status), "")

    def _exited(self, worker: int, code: int, reason: str) -> None:
        if (line := self._lifelines.pop(worker, None)) is not None:
            line.close()
        self._forget_private_files(worker)
        self._send(EXITED, worker, json.dumps({"code": code, "reason": reason}).encode())

    def _family(self, worker: int, processes: Processes) -> list[int]:
        """The worker's processes, and orphans of its that became ours."""
        first = self._pids.get(worker)
        roots = [] if first is None else [first]
        for child in processes.children(os.getpid()):
            if child not in self._pids.values() and environment_value(child, "HORA_WORKER") == str(worker):
                roots.append(child)
        return roots + [pid for root in roots for pid in processes.descendants(root)]

    def _terminate(self, workers: list[int], grace_s: float) -> None:
        processes = Processes()
        for worker in workers:
            if self._requested.pop(worker, None) is not None:
                self._exited(worker, 128 + signal.SIGTERM, "")
            family = self._family(worker, processes)
            if grace_s > 0:
                processes.terminate(family)
            else:
                processes.kill(family)
            self._killing.setdefault(worker, time.monotonic() + grace_s)

    def _end(self, grace_s: float) -> None:
        limit = time.monotonic() + grace_s
        if self._ending is None:
            processes = Processes()
            processes.terminate(processes.descendants(os.getpid()))
        self._ending = limit if self._ending is None else min(self._ending, limit)

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        overdue = [worker for worker, limit in self._killing.items() if now >= limit]
        if not overdue and (self._ending is None or now < self._ending):
            return
        processes = Processes()
        for worker in overdue:
            family = self._family(worker, processes)
            processes.kill(family)
            if not family:
                del self._killing[worker]
        if self._ending is not None and now >= self._ending:
            processes.kill(processes.descendants(os.getpid()))


def _fair_share(env: dict[str, str]) -> str:
    """This host's cores, divided among its ranks."""
    return str(max(len(os.sched_getaffinity(0)) // int(env.get("HOROVOD_LOCAL_SIZE", "1")), 1))


def main() -> int:
    """`python -m hora.launch.agent.supervisor [seconds of the launcher's silence after which to end]`"""
    return supervise(float(sys.argv[1]) if len(sys.argv) > 1 else None)


def supervise(silence_limit_s: float | None = None, *, execute: Execute = os.execvpe) -> int:
    """Be guardian and supervisor, to the end. The launcher is this process's parent."""
    launcher_pid, guardian_pid = os.getppid(), os.getpid()
    adopt_orphans()
    pid = os.fork()
    if pid:
        return guard(pid)
    if die_with_parent(guardian_pid, signal.SIGTERM):
        adopt_orphans()
        _Supervisor(launcher_pid, guardian_pid, silence_limit_s, execute).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
