"""The supervisor alone, given orders as a launcher gives them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import IO

import psutil
import pytest

from hora.launch.agent.supervisor import EXITED, FRAME, MARK, STARTED, STDOUT

NUM_WORKERS = 12
_PTRACE_CONT, _PTRACE_SEIZE, _PTRACE_O_TRACEEXIT, _PTRACE_EVENT_EXIT, _WALL = 7, 0x4206, 0x40, 6, 0x40000000

Frame = tuple[bytes, int, bytes]


def _frames(stream: IO[bytes]) -> Iterator[Frame]:
    assert stream.read(len(MARK)) == MARK
    while head := stream.read(FRAME.size):
        kind, worker, length = FRAME.unpack(head)
        yield kind, worker, stream.read(length)


@contextlib.contextmanager
def _supervisor() -> Iterator[tuple[subprocess.Popen[bytes], Iterator[Frame]]]:
    """A supervisor, and what it says."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hora.launch.agent.supervisor"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield process, _frames(process.stdout)
    finally:
        process.stdin.close()
        assert process.wait(60) == 0


def _order(supervisor: subprocess.Popen[bytes], worker: int, argv: list[str], files: Mapping[str, str]) -> None:
    """Have it start a worker."""
    order = {"op": "start", "worker": worker, "argv": argv, "env": {}, "inherit_env": True, "cwd": None}
    order |= {"private_files": files, "preload": None}
    supervisor.stdin.write(json.dumps(order).encode() + b"\n")
    supervisor.stdin.flush()


def test_a_workers_private_files_go_with_it():
    """Hours of an elastic job start thousands of workers."""
    common = "ab" * 32

    def outcome(worker: int) -> tuple[str, int]:
        """Start a worker, which says its secrets; return what it said, and how many files the supervisor has open
        then.
        """
        show = 'xxd -p -c 64 "$OWN" 2>/dev/null || od -An -v -tx1 -w64 "$OWN"; cat "$COMMON" | wc -c'
        _order(supervisor, worker, ["sh", "-c", show], {"OWN": own[worker], "COMMON": common})
        said = b""
        for kind, number, body in frames:
            assert number == worker
            if kind == STDOUT:
                said += body
            elif kind == EXITED:
                break
        (process,) = psutil.Process(supervisor.pid).children()
        return said.decode().replace(" ", ""), process.num_fds()

    own = [secrets.token_hex(32) for _ in range(NUM_WORKERS)]
    with _supervisor() as (supervisor, frames):
        found = [outcome(worker) for worker in range(NUM_WORKERS)]
    assert [said for said, _ in found] == [f"{secret}\n32\n" for secret in own]
    assert {num for _, num in found} == {found[0][1]}


def test_a_death_is_reported_before_the_dead_process_closes_its_connections():
    """Linux frees the memory of a process first, for as long as there is much of it; here a tracer holds its main
    thread up at that point."""
    libc = ctypes.CDLL(None, use_errno=True)
    with _supervisor() as (supervisor, frames), socket.create_server(("127.0.0.1", 0)) as listener:
        program = (
            "import os, socket, time; from hora import lifeline; lifeline.own(os.environ['HORA_LIFELINE']);"
            f"connection = socket.create_connection({listener.getsockname()}); os.write(1, b'here');"
            "time.sleep(600)"
        )
        _order(supervisor, 0, [sys.executable, "-c", program], {})
        pid = int(next(body for kind, _, body in frames if kind == STARTED))
        connection, _ = listener.accept()
        assert next(body for kind, _, body in frames if kind == STDOUT) == b"here"
        if libc.ptrace(_PTRACE_SEIZE, pid, None, ctypes.c_void_p(_PTRACE_O_TRACEEXIT)):
            pytest.skip(f"this process may not trace others: {os.strerror(ctypes.get_errno())}")
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, _WALL)[1] >> 8 == signal.SIGTRAP | _PTRACE_EVENT_EXIT << 8
        assert json.loads(next(body for kind, _, body in frames if kind == EXITED))["code"] == 128 + signal.SIGKILL
        with connection:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(1)
            libc.ptrace(_PTRACE_CONT, pid, None, None)
            connection.settimeout(60)
            assert connection.recv(1) == b""
        os.waitpid(pid, _WALL)  # the tracer's turn, before that of its parent
    assert list(frames) == []  # that it has been reaped is no second end
