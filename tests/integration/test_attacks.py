"""Attacks that once did harm, against jobs as users start them: by commands, `horovod.torch` and sockets alone.

docs/security.md lists them with those that other files repeat.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from job_process import BIN, HOROVODRUN, CommandProcess, JobProcess, run_command

MEET = """
import torch
import horovod.torch as hvd
hvd.init()
print("rank", hvd.rank(), "sum", hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), flush=True)
"""


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


# Connects without end, says nothing, noise, HTTP, half a hello; keeps three hundred open.
FLOOD = """
import os, random, socket, sys
where, rng, held = ("127.0.0.1", int(sys.argv[1])), random.Random(1), []
print("flooding", flush=True)
while True:
    try:
        sock = socket.create_connection(where, timeout=1)
        sock.settimeout(0.02)
        said = (b"", b"GET / HTTP/1.0\\r\\n\\r\\n", b"HORA" + os.urandom(73), os.urandom(rng.randrange(1, 300)))
        sock.sendall(rng.choice(said))
        held.append(sock)
    except OSError:
        continue
    while len(held) > 300:
        held.pop(0).close()
"""


@contextmanager
def flood(port: int) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", FLOOD, str(port)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"flooding\n"
        yield
    finally:
        process.kill()
        process.communicate()


def test_a_node_with_the_secret_is_not_lost_to_a_flood(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("s" * 64)
    train = script(tmp_path, MEET)
    jobs = []
    with flood(port):
        for rank in (0, 1):
            (tmp_path / str(rank)).mkdir()
            place = ["--nnodes", "2", "--node-rank", str(rank), "--meet", f"127.0.0.1:{port}", "--start-timeout", "150"]
            line = [str(BIN / "hora"), "run", *place, "--secret-file", str(secret), "-np", "2", sys.executable, train]
            jobs.append(JobProcess(line, tmp_path / str(rank)))
        assert [job.wait() for job in jobs] == [0, 0], jobs[0].text() + jobs[1].text()
    assert all(f"rank {rank} sum 2.0" in jobs[0].text() for rank in (0, 1))


# Has the kernel refuse SO_ATTACH_FILTER (setsockopt's third argument, 26), as sandboxes do. x86-64 and AArch64.
SANDBOX = """
import ctypes, platform, struct
number = {"x86_64": 54, "aarch64": 208}[platform.machine()]
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
program = [(LOAD, 0, 0, 0), (EQUAL, 0, 3, number), (LOAD, 0, 0, 16 + 2 * 8), (EQUAL, 0, 1, 26),
           (RETURN, 0, 0, 0x00050000 | 1), (RETURN, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
filter = ctypes.create_string_buffer(struct.pack("HL", len(program), ctypes.addressof(code)))
assert libc.prctl(22, 2, filter, 0, 0) == 0, ctypes.get_errno()
"""


def test_where_the_kernel_refuses_a_filter_the_open_listener_of_gloo_is_named(tmp_path: Path):
    train = script(tmp_path, SANDBOX + MEET)
    job = JobProcess([*HOROVODRUN, "-np", "2", sys.executable, train], tmp_path, HORA_TRANSPORT="gloo")
    assert job.wait() == 0, job.text()
    assert "rank 1 sum 2.0" in job.text()
    said = re.findall(
        r"gloo's listener at 127\.0\.0\.1:\d+ stays open to strangers, because the kernel refuses", job.text()
    )
    assert len(said) == 2, job.text()


def test_requests_without_the_token_write_nothing_into_the_jobs_output(tmp_path: Path):
    """And a crowd of silent connections does not keep `hora top`, which has the token, from the page."""
    flag = tmp_path / "over"
    wait = f"while not __import__('os').path.exists({str(flag)!r}): __import__('time').sleep(0.1)"
    line = [str(BIN / "hora"), "run", "--dashboard", "-np", "1", sys.executable, "-c", wait]
    job = JobProcess(line, tmp_path)
    job.wait_for_text("see it live")
    found = re.search(r"http://127\.0\.0\.1:(\d+)/", job.text())
    assert found is not None
    with ExitStack() as crowd:
        for number in range(300):
            sock = crowd.enter_context(socket.create_connection(("127.0.0.1", int(found[1])), timeout=10))
            if number % 3 == 0:
                sock.sendall(b"GET //[x HTTP/1.1\r\nHost: x\r\n\r\n")
                assert sock.recv(12) == b"HTTP/1.1 421"
        before = job.text()
        address = subprocess.run([BIN / "hora", "top", "--url"], capture_output=True, text=True, timeout=100).stdout
        if found[1] in address:  # not that of a job of this user's which another test runs
            with CommandProcess("hora", "top", "--once", address.strip(), env={"COLUMNS": "200"}) as top:
                assert top.finish()[0] == 0
    flag.touch()
    assert job.wait() == 0
    assert "Traceback" not in job.text()
    assert job.text().startswith(before)
    job.assert_nothing_left()


SESSION = """
import pathlib, time
from hora.workers import await_workers, launch_workers
launched = launch_workers(1, cpu=0.1, memory=0.1, code="pass")
await_workers(launched, timeout_seconds=100)
print("session is open", flush=True)
while not pathlib.Path("over").exists():
    time.sleep(0.1)
"""


def test_commands_that_look_for_a_session_are_not_taken_for_strangers(tmp_path: Path):
    job = JobProcess([sys.executable, script(tmp_path, SESSION)], tmp_path)
    job.wait_for_text("session is open")
    status, out, _ = run_command("hora", "workers", "list", cwd=tmp_path)
    assert (status, "succeeded" in out) == (0, True), out
    (tmp_path / "over").touch()
    assert job.wait() == 0
    assert "closed a connection" not in job.text()
    job.assert_nothing_left()
