"""The supervisor: the process on each host that starts a job's workers there and sees to it that none
outlives it.

Started by the launcher (directly, or through ssh) with its standard input as life line: JSON lines come in,
frames go out on standard output, and the end of input means that the launcher is gone. It runs as two
processes:

    guardian     inherits whatever the supervisor leaves behind, should somebody kill that, and ends it
    supervisor   starts workers in their own sessions, forwards their output, ends them and their descendants

Both are subreapers, so double-forked grandchildren stay in sight; workers die with the supervisor
(PDEATHSIG); the supervisor takes the guardian's death for an order to end. It also holds the job's secret
in a memfd, which workers read through /proc. This file imports nothing but the light part of the standard
library: it must start fast.

Where a network lies between, the launcher sends {"op": "alive"} now and then, and the supervisor's only
argument says after how many seconds of silence it takes the launcher for gone.

Commands: {"op": "start", "worker", "argv", "env", "inherit_env", "cwd", "secret"}, {"op": "terminate",
"workers", "grace_s"}, {"op": "finish", "grace_s"}. Frames: kind, worker, length, body; kinds are the
constants below.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import struct
import sys
import time
from typing import Any

MARK = b"\n== hora supervisor 1 ==\n"  # ends whatever a login shell may print before
FRAME = struct.Struct(">cii")
STARTED, STDOUT, STDERR, EXITED = b"s", b"o", b"e", b"x"

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_READ_BYTES = 64 * 1024
_BACKLOG_BYTES = 1024 * 1024  # of unsent output, above which workers' pipes are left unread
_FLUSH_LIMIT_S = 2.0
_SWEEP_S = 0.02
_DEFAULT_GRACE_S = 5.0

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _parents() -> dict[int, int]:
    """Every process's parent, zombies left out."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except (OSError, ValueError):  # it ended while we looked
                continue
            if state not in (b"Z", b"X"):
                parents[int(name)] = int(parent)
    return parents


def _descendants(root: int) -> list[int]:
    parents = _parents()
    found: list[int] = []
    frontier = {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found.extend(frontier)
    return found


def _send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already, or not ours any more
        os.kill(pid, number)


def _worker_of(pid: int) -> int | None:
    """The worker to which an orphan belongs, by its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            for item in file.read().split(b"\0"):
                if item.startswith(b"HORA_WORKER="):
                    return int(item[12:])
    except (OSError, ValueError):
        return None
    return None


def _exit_code(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


class _Supervisor:
    """Started -> running -> (input ended, finish, SIGTERM, guardian or launcher dead) -> ending -> out."""

    def __init__(self, launcher_pid: int, guardian_pid: int, silence_limit_s: float | None) -> None:
        self._selector = selectors.DefaultSelector()
        self._pids: dict[int, int] = {}  # worker -> pid of its first process, while that runs
        self._pipes: dict[int, tuple[int, bytes]] = {}  # descriptor -> worker, kind
        self._killing: dict[int, float] = {}  # worker -> when SIGTERM turns into SIGKILL
        self._ending: float | None = None  # when everything left gets SIGKILL
        self._input = bytearray()
        self._output = bytearray()
        self._told_to_end = False
        self._paused = False  # the launcher is slow, workers' pipes are left unread
        self._deaf = False  # nobody listens to us any more
        self._secrets: dict[str, str] = {}  # secret -> path
        self._guardian_pid = guardian_pid
        self._silence_limit_s, self._heard = silence_limit_s, time.monotonic()
        self._watch(launcher_pid)

    def _watch(self, launcher_pid: int) -> None:
        self._wake_in, wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
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
        self._told_to_end = True  # a handler may run anywhere, even half-way through a start: only take note

    def run(self) -> None:
        self._send_raw(MARK)
        # A subreaper without children has no descendants.
        while self._ending is None or self._reap():
            self._turn()
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
        if self._told_to_end or os.getppid() != self._guardian_pid:
            self._told_to_end = False
            self._end(_DEFAULT_GRACE_S)
        if self._silence_limit_s is not None and time.monotonic() > self._heard + self._silence_limit_s:
            self._end(_DEFAULT_GRACE_S)
        self._reap()
        self._kill_overdue()

    def _wait_s(self) -> float | None:
        times = list(self._killing.values())
        if self._silence_limit_s is not None:
            times.append(self._heard + self._silence_limit_s)
        return max(min(times) - time.monotonic(), _SWEEP_S) if times else None

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
                for worker in command["workers"]:
                    self._terminate(worker, command["grace_s"])
            elif command["op"] == "finish":
                self._end(command["grace_s"])

    def _secret_file(self, secret: str) -> str:
        if secret not in self._secrets:
            descriptor = os.memfd_create("hora-secret", os.MFD_CLOEXEC)
            os.write(descriptor, bytes.fromhex(secret))
            self._secrets[secret] = f"/proc/{os.getpid()}/fd/{descriptor}"
        return self._secrets[secret]

    def _start(self, command: dict[str, Any]) -> None:
        worker = command["worker"]
        if self._ending is not None:
            self._exited(worker, 128 + signal.SIGTERM, "the job was ending already")
            return
        env = dict(os.environ) if command["inherit_env"] else {}
        env |= command["env"] | {"HORA_SECRET_FILE": self._secret_file(command["secret"])}
        pipes = [
            os.pipe2(os.O_CLOEXEC) for _ in range(3)
        ]  # stdout, stderr, and one that tells of a failed exec
        pid = os.fork()
        if pid == 0:
            _become(command["argv"], env, command["cwd"], pipes)
        for _, write_end in pipes:
            os.close(write_end)
        problem = os.read(pipes[2][0], 4096).decode(errors="replace")
        os.close(pipes[2][0])
        self._pids[worker] = pid
        if problem:
            os.waitpid(pid, 0)
            for read_end, _ in pipes[:2]:
                os.close(read_end)
            self._exited(worker, 127, problem)
            return
        for (read_end, _), kind in zip(pipes, (STDOUT, STDERR), strict=False):
            os.set_blocking(read_end, False)
            self._pipes[read_end] = (worker, kind)
            if not self._paused:
                self._selector.register(read_end, selectors.EVENT_READ)
        self._send(STARTED, worker, str(pid).encode())

    # ---- output -------------------------------------------------------------------------------------------

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
            # A pipe holds 64 KiB by default; somebody who goes on writing must not keep us here.
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
            for worker, first in self._pids.items():
                if first == pid:
                    self._drain_pipes(worker)
                    self._exited(worker, _exit_code(status), "")
                    break

    def _exited(self, worker: int, code: int, reason: str) -> None:
        self._pids.pop(worker, None)
        self._send(EXITED, worker, json.dumps({"code": code, "reason": reason}).encode())

    def _family(self, worker: int) -> list[int]:
        """The worker's processes, and orphans of its that became ours."""
        pid = self._pids.get(worker)
        family = [] if pid is None else [pid, *_descendants(pid)]
        firsts = set(self._pids.values())
        for child, parent in _parents().items():
            if parent == os.getpid() and child not in firsts and _worker_of(child) == worker:
                family += [child, *_descendants(child)]
        return family

    def _terminate(self, worker: int, grace_s: float) -> None:
        for pid in self._family(worker):
            _send_signal(pid, signal.SIGTERM)
            _send_signal(
                pid, signal.SIGCONT
            )  # a stopped process would not see the signal before it runs again
        self._killing.setdefault(worker, time.monotonic() + grace_s)

    def _end(self, grace_s: float) -> None:
        if self._ending is None:
            self._ending = time.monotonic() + grace_s
            for pid in _descendants(os.getpid()):
                _send_signal(pid, signal.SIGTERM)
                _send_signal(pid, signal.SIGCONT)
        else:
            self._ending = min(self._ending, time.monotonic() + grace_s)

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for worker, limit in list(self._killing.items()):
            family = self._family(worker)
            if not family:
                del self._killing[worker]
            elif now >= limit:
                for pid in family:
                    _send_signal(pid, signal.SIGKILL)
        if self._ending is not None and now >= self._ending:
            for pid in _descendants(os.getpid()):
                _send_signal(pid, signal.SIGKILL)


def _become(argv: list[str], env: dict[str, str], cwd: str | None, pipes: list[tuple[int, int]]) -> None:
    """In the forked child: turn into the worker, or say why not on the last pipe. Never returns."""
    supervisor = os.getppid()
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(128 + signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in (
            signal.SIGPIPE,
            signal.SIGXFSZ,
            signal.SIGCHLD,
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGHUP,
        ):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (pipes[0][1], 1), (pipes[1][1], 2)):
            os.dup2(source, target)
        if cwd is not None:
            os.chdir(cwd)
        os.execvpe(argv[0], argv, env)
    except (OSError, ValueError) as error:
        doing = f"run {argv[0]!r}" if cwd is None or os.path.isdir(cwd) else f"enter the directory {cwd!r}"
        os.write(pipes[2][1], f"cannot {doing}: {getattr(error, 'strerror', None) or error}".encode())
    finally:
        os._exit(127)


def _guard(supervisor: int) -> int:
    """The guardian's life: wait for the supervisor, then end whatever it left behind."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: _send_signal(supervisor, signal.SIGTERM))
    for descriptor in (0, 1):
        os.close(descriptor)
    code = None
    while code is None:
        pid, status = os.waitpid(-1, 0)
        if pid == supervisor:
            code = _exit_code(status)
    while True:
        for pid in _descendants(os.getpid()):
            _send_signal(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return code


def main() -> int:
    launcher_pid = os.getppid()
    guardian_pid = os.getpid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    pid = os.fork()
    if pid:
        return _guard(pid)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != guardian_pid:
        return 1
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _Supervisor(launcher_pid, guardian_pid, float(sys.argv[1]) if len(sys.argv) > 1 else None).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
