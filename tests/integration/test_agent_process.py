"""The agent alone, driven by the messages of a controller."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from hora.launch.agent.protocol import MESSAGES, Exited, Finish, Join, Message, Output, Quit, Start, Started
from hora.net.messages import Frames, frame
from waiting import wait_until

NUM_WORKERS = 12
_PTRACE_CONT, _PTRACE_SEIZE, _PTRACE_O_TRACEEXIT, _PTRACE_EVENT_EXIT, _WALL = 7, 0x4206, 0x40, 6, 0x40000000


class LocalProcess:
    """An agent process and the controller's end of its connection."""

    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen([sys.executable, "-m", "hora.launch.agent.agent"], stdin=theirs.fileno())

    def reports(self) -> Iterator[Message]:
        frames = Frames(MESSAGES)
        while data := self.sock.recv(65536):
            yield from frames.feed(data)

    def start(self, worker: int, argv: list[str], files: dict[str, str]) -> None:
        order = Start(worker, argv, {}, inherit_env=True, cwd=None, private_files=files, preload=None)
        self.sock.sendall(frame(order))


@contextlib.contextmanager
def _agent() -> Iterator[tuple[LocalProcess, Iterator[Message]]]:
    """Start an agent; yield it and its reports."""
    agent = LocalProcess()
    try:
        reports = agent.reports()
        assert isinstance(next(reports), Join)
        yield agent, reports
    finally:
        agent.sock.sendall(frame(Finish(1.0)) + frame(Quit(0)))
        assert agent.process.wait(60) == 0


def test_private_files_of_a_worker_are_removed_when_it_exits():
    """Hours of an elastic job start thousands of workers, so leaked files would add up."""
    common = "ab" * 32

    def outcome(worker: int) -> tuple[str, int]:
        """Start a worker that prints its secrets; return its output and the agent's number of open files."""
        show = 'xxd -p -c 64 "$OWN" 2>/dev/null || od -An -v -tx1 -w64 "$OWN"; cat "$COMMON" | wc -c'
        agent.start(worker, ["sh", "-c", show], {"OWN": own[worker], "COMMON": common})
        said = b""
        for report in reports:
            assert report.worker == worker
            if isinstance(report, Output):
                said += report.data
            elif isinstance(report, Exited):
                break
        (process,) = psutil.Process(agent.process.pid).children()
        return said.decode().replace(" ", ""), process.num_fds()

    own = [secrets.token_hex(32) for _ in range(NUM_WORKERS)]
    with _agent() as (agent, reports):
        found = [outcome(worker) for worker in range(NUM_WORKERS)]
    assert [said for said, _ in found] == [f"{secret}\n32\n" for secret in own]
    assert {num for _, num in found} == {found[0][1]}


@pytest.mark.parametrize("killed", ["worker", "agent", "guardian"])
def test_temporary_files_of_a_worker_are_removed_when_it_exits(tmp_path, monkeypatch, killed: str):
    """Such as the folder in which an estimator's rank writes checkpoints."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = (
        "import os, time; from hora.spark.estimator.store import temporary_folder;"
        "folder = temporary_folder('run-'); open(folder.name + '/checkpoint', 'w').close();"
        "os.write(1, b'here'); time.sleep(600)"
    )
    agent = LocalProcess()
    reports = agent.reports()
    agent.start(0, [sys.executable, "-c", program], {})
    pid = next(report.pid for report in reports if isinstance(report, Started))
    assert next(report.data for report in reports if isinstance(report, Output)) == b"here"
    (made,) = tmp_path.glob("hora-*/0/run-*/checkpoint")
    assert made.parents[1].stat().st_mode & 0o777 == 0o700
    (process,) = psutil.Process(agent.process.pid).children()
    os.kill({"worker": pid, "agent": process.pid, "guardian": agent.process.pid}[killed], signal.SIGKILL)
    wait_until("the files are gone", lambda: not made.parents[1].exists())
    if killed == "worker":
        agent.sock.sendall(frame(Finish(1.0)) + frame(Quit(0)))
    agent.process.wait(60)
    wait_until("nothing is left", lambda: not list(tmp_path.iterdir()))
    agent.sock.close()


def test_a_death_is_reported_before_the_dead_process_closes_its_connections():
    """Linux first frees the memory of a dead process, which takes a while if there is much. Here a tracer stops the
    main thread at that point."""
    libc = ctypes.CDLL(None, use_errno=True)
    with _agent() as (agent, reports), socket.create_server(("127.0.0.1", 0)) as listener:
        program = (
            "import os, socket, time; from hora import lifeline; lifeline.own(os.environ['HORA_LIFELINE']);"
            f"connection = socket.create_connection({listener.getsockname()}); os.write(1, b'here');"
            "time.sleep(600)"
        )
        agent.start(0, [sys.executable, "-c", program], {})
        pid = next(report.pid for report in reports if isinstance(report, Started))
        connection, _ = listener.accept()
        assert next(report.data for report in reports if isinstance(report, Output)) == b"here"
        if libc.ptrace(_PTRACE_SEIZE, pid, None, ctypes.c_void_p(_PTRACE_O_TRACEEXIT)):
            pytest.skip(f"this process may not trace others: {os.strerror(ctypes.get_errno())}")
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, _WALL)[1] >> 8 == signal.SIGTRAP | _PTRACE_EVENT_EXIT << 8
        assert next(report.code for report in reports if isinstance(report, Exited)) == 128 + signal.SIGKILL
        with connection:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(1)
            libc.ptrace(_PTRACE_CONT, pid, None, None)
            connection.settimeout(60)
            assert connection.recv(1) == b""
        os.waitpid(pid, _WALL)  # the tracer reaps first, then the parent
    assert not any(isinstance(report, Exited) for report in reports)  # reaping must not report a second exit
