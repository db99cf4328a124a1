"""Attacks on every port of a job on Spark: no code runs, and the job continues.

Also checks what an unauthenticated client can read from Spark's block manager and from captured traffic.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import os
import pickle
import socket
import struct
import sys
import threading
from pathlib import Path

import psutil
import pytest
from attacked_jobs import heard_on_loopback
from job_process import JobProcess

import other_user
from hora.errors import AuthenticationError
from hora.net.wire import REFUSAL, ClientHandshake, Credentials, connect, new_secret
from sparkdl import HorovodRunner

pytestmark = pytest.mark.spark


class Exploit:
    """Leaves a trace when unpickled."""

    def __init__(self, trap):
        self.trap = trap

    def __reduce__(self):
        return os.system, (f"touch {self.trap}",)


def listening():
    """Return the listening sockets of this process, the driver."""
    return {
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def answer(port, data):
    """Send data and return everything received until the port hangs up, which it may do while we are sending."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock, contextlib.suppress(ConnectionError):
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EPIPE, errno.ECONNRESET):
                raise
        while more := sock.recv(4096):
            received += more
    return received


def attack(port, trap):
    hello = ClientHandshake(Credentials(new_secret(), "job")).hello
    pickled = pickle.dumps(Exploit(trap))
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(50_000),
        struct.pack(">I", 2**31 - 1) * 10,
        pickled,
        struct.pack(">I", len(pickled)) + pickled,
        hello[:9],
        hello + pickled,
        hello + b"\0" * 32 + pickled,
    ):
        assert answer(port, data) in ((b"", REFUSAL) if data.startswith(hello) else (b"",))
    with pytest.raises(AuthenticationError):
        connect(("127.0.0.1", port), Credentials(new_secret(), "job"), timeout_s=30)
    with contextlib.ExitStack() as crowd:
        for _ in range(300):
            crowd.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))


def test_the_drivers_ports_reject_unauthenticated_clients_and_the_job_continues(spark, tmp_path, caplog):
    trap, go = tmp_path / "executed", tmp_path / "go"
    before = listening()

    def main(go):
        import os

        import torch

        import horovod.torch as hvd

        hvd.init()
        over = 0.0
        while not over:
            over = float(hvd.allreduce(torch.tensor(float(os.path.exists(go))), name="over"))
        return hvd.allgather_object(hvd.rank())

    results = []
    job = threading.Thread(target=lambda: results.append(HorovodRunner(np=2).run(main, go=str(go))))
    job.start()
    try:
        deadline = 60
        while len(listening() - before) < 2 and deadline > 0:
            job.join(0.1)
            deadline -= 0.1
        ours = listening() - before
        assert len(ours) == 2, "the stage's listener and the rendezvous"
        assert {address for address, _ in ours} == {"127.0.0.1"}
        for _, port in ours:
            attack(port, trap)
    finally:
        go.touch()
        job.join(100)
    assert results == [[0, 1]]
    assert not trap.exists()
    # The tests' cluster does not authenticate; a warning says so.
    assert caplog.text.count("Set spark.authenticate=true") == 1


def test_strict_mode_rejects_a_cluster_without_authentication(spark, monkeypatch):
    monkeypatch.setenv("HORA_STRICT", "1")
    with pytest.raises(ValueError, match=r"HORA_STRICT=1.*Set spark\.authenticate=true"):
        HorovodRunner(np=1).run(os.getpid)


# A job in local mode, without torch, that reveals its rank's key to the test and waits to be attacked.
LOCAL_JOB = """
import os, sys
from pyspark.sql import SparkSession
import horovod.spark

def work(flag):
    import hashlib, os, pathlib, time
    pathlib.Path(flag).with_name("secret").write_bytes(pathlib.Path(os.environ["HORA_SECRET_FILE"]).read_bytes())
    print("working", os.environ["HOROVOD_RANK"], flush=True)
    while not pathlib.Path(flag).exists():
        time.sleep(0.05)
    return hashlib.sha256(os.environ["TOKEN"].encode()).hexdigest()

if __name__ == "__main__":
    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.broadcast.compress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .getOrCreate()
    )
    env = {"PATH": os.environ["PATH"], "TOKEN": sys.argv[2]}
    print("RESULT", horovod.spark.run(work, (sys.argv[1],), num_proc=1, env=env), flush=True)
    spark.stop()
"""

# An attacker that uses only the standard library: requests the broadcast variables from Spark's block manager.
THIEF = """
def text(words):
    return struct.pack(">i", len(words)) + words.encode()

def exactly(sock, size):
    if not 0 <= size < 2**26:
        raise EOFError  # no answer of a block manager
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data

def ask(sock, kind, rest):
    sock.sendall(struct.pack(">qb", 9 + len(rest), kind) + rest)
    return exactly(sock, struct.unpack(">q", exactly(sock, 8))[0] - 8)

def fetch(port, name):
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        body = bytes(1) + text("app") + text("driver") + struct.pack(">i", 1) + text(name)
        answer = ask(sock, 3, struct.pack(">qi", 1, len(body)) + body)
        if answer[0] == 4:
            stream, _ = struct.unpack(">qi", answer[14:26])
            answer = ask(sock, 0, struct.pack(">qi", stream, 0))
            if answer[0] == 1:
                print(base64.b64encode(answer[13:]).decode())

for port in map(int, sys.argv[1:]):
    with contextlib.suppress(OSError, EOFError, struct.error):  # not the block manager's
        for number in range(4):
            fetch(port, f"broadcast_{number}_piece0")
"""


@pytest.mark.slow
@pytest.mark.skipif(not other_user.possible, reason=other_user.WHY_NOT)
def test_local_mode_does_not_leak_the_stages_secret_or_the_environment(tmp_path):
    (tmp_path / "job.py").write_text(LOCAL_JOB)
    flag, token = tmp_path / "finish", "a-password-of-the-user"
    with heard_on_loopback() as heard:
        job = JobProcess([sys.executable, "job.py", str(flag), token], tmp_path, PYSPARK_PYTHON=sys.executable)
        job.wait_for_text("working 0", 150)
        ports = {
            connection.laddr.port
            for process in job.processes()
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        blocks = [base64.b64decode(line) for line in other_user.run(THIEF, *map(str, ports)).split()]
        flag.touch()
        assert job.wait(150) == 0, job.text()
    assert job.text().count(hashlib.sha256(token.encode()).hexdigest()) == 1
    secret = Path(tmp_path / "secret").read_bytes()
    assert any(b"SparkTask" in block for block in blocks), "Spark does show its tasks to anybody"
    assert not any(secret in block for block in blocks)
    assert b"HORA/4" in heard, "the tasks' connections were heard"
    assert b'"kind":"start"' not in heard
    assert secret not in heard
    assert token.encode() not in heard
    assert "spark.authenticate" not in job.text()
