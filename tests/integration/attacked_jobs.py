"""Victim jobs for the attack tests, started from the command line, and a packet capture of the loopback interface."""

from __future__ import annotations

import socket
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from job_process import HOROVODRUN, JobProcess

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


MEETING = """
import pathlib, sys
import torch
import horovod.torch as hvd
hvd.init()
rounds, over = 0, False
while not over:
    finish = torch.tensor([float(pathlib.Path(sys.argv[1]).exists()), float(hvd.rank())])
    over, total = hvd.allreduce(finish, op=hvd.Sum, name=f"round {rounds % 10}").tolist()
    assert total == 1.0, total
    rounds += 1
    if rounds == 1:
        print("meeting", hvd.rank(), flush=True)
assert hvd.allgather_object({"rank": hvd.rank()}) == [{"rank": 0}, {"rank": 1}]
print("done", hvd.rank(), flush=True)
"""


class Meeting:
    """A two-rank job that runs allreduces until `finish` is called."""

    def __init__(
        self,
        folder: Path,
        *,
        limits: str = "true",
        inside: Callable[..., list[str]] = lambda *command: list(command),
        **environment: str,
    ) -> None:
        self.flag = folder / "finish"
        line = [*HOROVODRUN, "-np", "2", sys.executable, script(folder, MEETING), str(self.flag)]
        limited = ["sh", "-c", f'{limits}; exec "$@"', "sh", *line]
        self.job = JobProcess(inside(*limited), folder, **environment)

    def begun(self) -> Meeting:
        for rank in (0, 1):
            self.job.wait_for_text(f"meeting {rank}")
        return self

    def ports(self) -> set[int]:
        return {
            connection.laddr.port
            for process in self.job.processes()
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }

    def finish(self) -> None:
        self.flag.touch()
        assert self.job.wait() == 0, self.job.text()
        assert all(f"done {rank}" in self.job.text() for rank in (0, 1))
        self.job.assert_nothing_left()


@contextmanager
def heard_on_loopback() -> Iterator[bytearray]:
    """Capture all packets on the loopback interface. Requires root."""
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
            yield heard
        finally:
            over.set()
            thread.join(30)
