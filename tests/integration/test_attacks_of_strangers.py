"""Attacks of strangers, who reach a job over the network and hold no key: by commands, `horovod.torch` and sockets
alone.

docs/security.md lists them with those that other files repeat.
"""

from __future__ import annotations

import base64
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from attacked_jobs import MEET, Meeting, script
from job_process import BIN, HOROVODRUN, CommandProcess, JobProcess, run_command

import other_user
from waiting import wait_until

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


@pytest.mark.security
@pytest.mark.parametrize("transport", ["auto", "tcp", "gloo"])
def test_more_silent_connections_than_a_rank_has_descriptors(tmp_path: Path, transport: str):
    meeting = Meeting(tmp_path, limits="ulimit -S -n 300", HORA_TRANSPORT=transport).begun()
    with ExitStack() as crowd:
        for port in meeting.ports():
            for _ in range(400):
                silent = crowd.enter_context(socket.socket())
                silent.setblocking(False)
                silent.connect_ex(("127.0.0.1", port))
        meeting.finish()


# Another user: watches for the victim's listeners and connects first, with the numbers that gloo counts up from 0; then
# says what a peer of gloo says, with a pickle in an object's place.
HIJACK = """
evil, size, end = base64.b64decode(sys.argv[1]), int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
words, known, socks, heard, left, num_taken = struct.Struct("<6Q"), set(), {}, {}, {}, 0

def listeners():
    with open("/proc/net/tcp") as file:
        rows = [line.split() for line in file][1:]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[7] == "0"]

def say(sock, data):
    sock.setblocking(True)
    with contextlib.suppress(OSError):
        sock.sendall(data)
    sock.setblocking(False)

known.update(listeners())
print("watching", flush=True)
while time.monotonic() < end:
    for port in listeners():
        if port not in known:
            known.add(port)
            for number in (0, 1):
                sock = socket.socket()
                sock.settimeout(1)
                with contextlib.suppress(OSError):
                    sock.connect(("127.0.0.1", port))
                    sock.sendall(struct.pack("<q", number))
                    sock.setblocking(False)
                    socks[sock.fileno()], heard[sock.fileno()] = sock, b""
    for fd in select.select(list(socks), [], [], 0.001)[0]:
        sock = socks[fd]
        try:
            data = sock.recv(65536)
        except OSError:
            data = b""
        if not data:
            del socks[fd]
            continue
        heard[fd] += data
        while len(heard[fd]) >= words.size:
            total, code, slot, _, length, _ = words.unpack_from(heard[fd])
            if code not in (1, 2, 3) or (total > words.size and len(heard[fd]) < total):
                break
            heard[fd] = heard[fd][max(total, words.size):]
            if code == 3:
                rest = left.setdefault(fd, struct.pack("<q", size) + evil)
                body, left[fd] = (rest[:length] + bytes(length))[:length], rest[length:]
                num_taken += 1
                head = words.pack(words.size, 2, slot, 0, length, 0)
                say(sock, head + words.pack(words.size + length, 1, slot, 0, length, 0) + body)
            elif code == 2:
                say(sock, words.pack(words.size, 3, slot, 0, length, 0))
print(len(known), num_taken, flush=True)
"""


OBJECTS = """
import time
import horovod.torch as hvd
hvd.init()
if hvd.rank() == 0:
    time.sleep(1.0)
got = hvd.allgather_object({"rank": hvd.rank(), "pad": "x" * 300})
assert [one["rank"] for one in got] == [0, 1], got
print("got both objects", flush=True)
"""


@pytest.mark.security
@pytest.mark.skipif(not other_user.possible, reason=other_user.WHY_NOT)
def test_who_takes_a_ranks_place_at_gloos_listener_runs_nothing(tmp_path: Path):
    """Over gloo, which a user has to ask for.

    The job may fail there, in words; what must not be is that it runs the pickle.
    """
    trap = tmp_path / "executed"
    evil = pickle.dumps(_Touch(trap))
    evil += b"." * (400 - len(evil))
    job = script(tmp_path, OBJECTS)
    thief = other_user.start(HIJACK, base64.b64encode(evil).decode(), str(len(evil)), "20")
    try:
        assert thief.stdout is not None
        assert thief.stdout.readline() == "watching\n"
        line = ["horovodrun", "-np", "2", sys.executable, job]
        status, out, err = run_command(*line, env={"HORA_TRANSPORT": "gloo", "HOROVOD_GLOO_TIMEOUT_SECONDS": "15"})
        said, _ = thief.communicate(timeout=60)
    finally:
        thief.kill()
    assert not trap.exists()
    assert status == 0 or "Error" in err, err
    assert status != 0 or out.count("got both objects") == 2
    assert int(said.split()[0]) > 0, said


class _Touch:
    """Unpickling it leaves a trace."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> tuple:
        return exec, (f"open({str(self.trap)!r}, 'w')",)


WAITS = """
import pathlib, sys, time, torch
import horovod.torch as hvd
hvd.init()
print("rank up", flush=True)
while not hvd.allreduce(torch.tensor([float(pathlib.Path(sys.argv[1]).exists())])).item():
    time.sleep(0.02)
print("sum", hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), flush=True)
"""


@pytest.mark.security
@pytest.mark.skipif(os.geteuid() != 0, reason="listening on the network needs root")
def test_a_handshake_that_was_heard_is_worth_nothing(tmp_path: Path):
    """Said again, answered with what the server said, spliced with another one, cut short, or a byte at a time."""
    flag = tmp_path / "finish"
    heard: dict[int, bytes] = {}  # port -> the first words of a genuine client
    over = threading.Event()

    def listen() -> None:
        while not over.is_set():
            with suppress(TimeoutError):
                packet = listener.recv(70_000)[14:]  # behind the link's header: IP, TCP
                body = packet[(packet[0] & 15) * 4 :]
                data = body[(body[12] >> 4) * 4 :]
                if packet[9] == 6 and data.startswith(b"HORA/"):
                    heard.setdefault(int.from_bytes(body[2:4], "big"), bytes(data))

    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800)) as listener:
        listener.bind(("lo", 0))
        listener.settimeout(0.2)
        thread = threading.Thread(target=listen)
        thread.start()
        job = JobProcess([*HOROVODRUN, "-np", "2", sys.executable, script(tmp_path, WAITS), str(flag)], tmp_path)
        try:
            wait_until("both ranks are up", lambda: job.text().count("rank up") == 2)
            over.set()
            thread.join(30)
            mine = {c.laddr.port for p in job.processes() for c in p.net_connections("tcp") if c.status == "LISTEN"}
            ports = heard.keys() & mine
            assert ports, "a genuine handshake was heard"
            for port in ports:
                hello = heard[port]
                first, second = _opened(port), _opened(port)
                answers = [_say(first, hello), _say(second, hello)]
                # Each answer is fresh, so who has no key cannot go on, neither with the server's own words nor with
                # another's.
                assert answers[0] != answers[1] or not answers[0]
                assert _say(first, answers[0] or b"x" * 48) == b""
                assert _say(second, answers[0] or b"y" * 48) == b""
                flipped = bytes([*hello[:-1], hello[-1] ^ 1])
                assert _say(_opened(port), flipped) in (b"", b"refused\n")
                with _opened(port) as slow:
                    for number in range(6):
                        slow.sendall(hello[number : number + 1])
            flag.touch()
            assert job.wait() == 0, job.text()
            assert job.text().count("sum 2.0") == 2
        finally:
            over.set()
            job.kill()


def _opened(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def _say(sock: socket.socket, data: bytes) -> bytes:
    """Return the answer, nothing where the server hangs up."""
    try:
        sock.sendall(data)
        return sock.recv(4096)
    except OSError:
        return b""


WHISPER = """
import pathlib, os
import torch
import horovod.torch as hvd
hvd.init()
pathlib.Path(f"key {hvd.rank()}").write_bytes(pathlib.Path(os.environ["HORA_SECRET_FILE"]).read_bytes())
numbers = torch.frombuffer(bytearray(b"a tensor, whispered " * 400), dtype=torch.uint8)
assert torch.equal(hvd.allgather(numbers, name="the name of a tensor")[:8000], numbers)
assert hvd.allgather_object("an object, whispered " * 50) == ["an object, whispered " * 50] * 2
"""


@pytest.mark.security
@pytest.mark.skipif(os.geteuid() != 0, reason="listening on the network needs root")
@pytest.mark.parametrize("encrypt", ["always", "never"])
def test_who_listens_hears_no_key_no_message_and_no_number(tmp_path: Path, encrypt: str):
    """With `never` numbers and objects are heard, which also shows that this test listens well."""
    heard, over = bytearray(), threading.Event()

    def listen() -> None:
        while not over.is_set():
            with suppress(TimeoutError):
                heard.extend(listener.recv(70_000))

    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as listener:
        listener.bind(("lo", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 2**20)
        listener.settimeout(0.2)
        thread = threading.Thread(target=listen)
        thread.start()
        try:
            line = [*HOROVODRUN, "-np", "2", sys.executable, script(tmp_path, WHISPER)]
            job = JobProcess(line, tmp_path, HORA_TRANSPORT="tcp", HORA_ENCRYPT=encrypt)
            assert job.wait() == 0, job.text()
        finally:
            over.set()
            thread.join(30)
    keys = [(tmp_path / f"key {rank}").read_bytes() for rank in (0, 1)]
    assert b"HORA/" in heard
    for said in (b"a tensor, whispered", b"an object, whispered"):
        assert (said in heard) == (encrypt == "never"), said
    for secret in (b"the name of a tensor", *keys, *(key.hex().encode() for key in keys)):
        assert secret not in heard
