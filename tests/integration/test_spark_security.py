"""Attacks on every port that a job on Spark listens on. Nothing is executed and the job goes on."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import socket
import struct
import threading

import psutil
import pytest

from hora.errors import AuthenticationError
from hora.net.connection import connect
from hora.net.wire import ClientHandshake, Credentials, new_secret
from sparkdl import HorovodRunner

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]


class Exploit:
    """Unpickling it leaves a trace."""

    def __init__(self, trap):
        self.trap = trap

    def __reduce__(self):
        return os.system, (f"touch {self.trap}",)


def listening():
    """Listening sockets of this process, the driver, and of all ranks below (or beside) it."""
    return {
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def answer(port, data):
    """All that the port says before it hangs up. It may do so in the middle of our words."""
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
        assert len(answer(port, data)) in ((0, 64) if data.startswith(hello) else (0,))
    with pytest.raises(AuthenticationError):
        connect(("127.0.0.1", port), Credentials(new_secret(), "job"), timeout_s=30)
    with contextlib.ExitStack() as crowd:
        for _ in range(300):
            crowd.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))


def test_strangers_at_the_drivers_ports_are_turned_away_and_the_job_goes_on(spark, tmp_path):
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
