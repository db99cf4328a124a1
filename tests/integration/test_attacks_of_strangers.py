"""Attacks over the network by clients without a key, using commands, `horovod.torch` and sockets only.

docs/security.md lists these tests and related ones in other files.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from attacked_jobs import MEET, Meeting, heard_on_loopback, script
from job_process import BIN, HOROVODRUN, CommandProcess, JobProcess

from waiting import wait_until

# Opens connections continuously and sends nothing, noise, HTTP or half a hello; keeps three hundred of them open.
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


def test_a_node_with_the_secret_joins_despite_a_flood(tmp_path: Path):
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


def test_requests_without_the_token_write_nothing_into_the_jobs_output(tmp_path: Path):
    """In addition, a crowd of silent connections does not keep `hora top`, which has the token, from the page."""
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
        if found[1] in address:  # skip it if the URL is that of another test's job
            with CommandProcess("hora", "top", "--once", address.strip(), env={"COLUMNS": "200"}) as top:
                assert top.finish()[0] == 0
    flag.touch()
    assert job.wait() == 0
    assert "Traceback" not in job.text()
    assert job.text().startswith(before)
    job.assert_nothing_left()


@pytest.mark.security
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_more_silent_connections_than_a_rank_has_descriptors(tmp_path: Path, transport: str):
    meeting = Meeting(tmp_path, limits="ulimit -S -n 300", HORA_TRANSPORT=transport).begun()
    with ExitStack() as crowd:
        for port in meeting.ports():
            for _ in range(400):
                silent = crowd.enter_context(socket.socket())
                silent.setblocking(False)
                silent.connect_ex(("127.0.0.1", port))
        meeting.finish()


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
def test_a_recorded_handshake_cannot_be_reused(tmp_path: Path):
    """The handshake is replayed, answered with the server's reply, spliced, truncated, or sent byte by byte."""
    flag = tmp_path / "finish"
    heard: dict[int, bytes] = {}  # port -> the hello of a genuine client
    over = threading.Event()

    def listen() -> None:
        while not over.is_set():
            with suppress(TimeoutError):
                packet = listener.recv(70_000)[14:]  # after the link header: IP, TCP
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
                # Each answer is fresh, so a client without the key cannot continue with the server's own bytes or those
                # of another connection.
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
    """Return the answer, or nothing if the server hangs up."""
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
numbers = torch.frombuffer(bytearray(b"a tensor, whispered " * 400), dtype=torch.int32)
assert torch.equal(hvd.allgather(numbers, name="the name of a tensor")[:2000], numbers)
whispered = "an object, whispered " * 50
assert hvd.allgather_object(whispered) == [whispered] * 2
import torch.distributed as dist
dist.init_process_group("hora")
rank, found = dist.get_rank(), [None, None]
dist.all_gather_object(found, whispered)
assert found == [whispered] * 2
dist.gather_object(whispered, found if rank == 0 else None)
dist.broadcast_object_list([whispered] if rank == 0 else [None], src=0)
dist.scatter_object_list([None], [whispered] * 2 if rank == 0 else None, src=0)
if rank == 0:
    dist.send_object_list([whispered], dst=1)
else:
    dist.recv_object_list([None], src=0)
dist.destroy_process_group()
"""


@pytest.mark.security
@pytest.mark.skipif(os.geteuid() != 0, reason="listening on the network needs root")
@pytest.mark.parametrize("encrypt", ["always", "never"])
def test_captured_traffic_contains_no_key_message_or_tensor(tmp_path: Path, encrypt: str):
    """With `never`, tensors are readable, which also proves that the capture works; objects never are, also torch's."""
    with heard_on_loopback() as heard:
        line = [*HOROVODRUN, "-np", "2", sys.executable, script(tmp_path, WHISPER)]
        job = JobProcess(line, tmp_path, HORA_TRANSPORT="tcp", HORA_ENCRYPT=encrypt)
        assert job.wait() == 0, job.text()
    keys = [(tmp_path / f"key {rank}").read_bytes() for rank in (0, 1)]
    assert b"HORA/" in heard
    assert (b"a tensor, whispered" in heard) == (encrypt == "never")
    for secret in (b"an object, whispered", b"the name of a tensor", *keys, *(key.hex().encode() for key in keys)):
        assert secret not in heard
