"""Attacks on jobs with a store: forged entries, names taken by another user, floods at a low descriptor limit.

Uses commands, etcd's own API and sockets only. docs/security.md lists these tests and related ones in other files.
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from attacked_jobs import Meeting, script
from job_process import BIN, JobProcess

import other_user
from waiting import wait_until

needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd (Debian: etcd-server)")
WAIT = """
import pathlib, sys, time
import horovod.torch as hvd
hvd.init()
print("training", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.1)
print("trained", flush=True)
"""


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        opened = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [sock.getsockname()[1] for sock in opened]


class Etcd:
    def __init__(self, folder: Path) -> None:
        clients, peers = (f"http://127.0.0.1:{port}" for port in free_ports(2))
        self.url = clients
        self.process = subprocess.Popen(
            ["etcd", "--name", "m", "--data-dir", str(folder / "etcd"), "--log-level", "error", "--logger", "zap",
             "--listen-client-urls", clients, "--advertise-client-urls", clients, "--listen-peer-urls", peers,
             "--initial-advertise-peer-urls", peers, "--initial-cluster", f"m={peers}"],
            stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def ask(self, path: str, **question: str) -> dict:
        request = urllib.request.Request(f"{self.url}/v3/kv/{path}", json.dumps(question).encode())
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    def answers(self) -> bool:
        with suppress(OSError):
            return self.names() is not None
        return False

    def names(self) -> list[str]:
        everything = base64.b64encode(b"\0").decode()
        found = self.ask("range", key=everything, range_end=everything).get("kvs", [])
        return [base64.b64decode(one["key"]).decode() for one in found]

    def put(self, key: str, value: bytes) -> None:
        self.ask("put", key=base64.b64encode(key.encode()).decode(), value=base64.b64encode(value).decode())

    def value(self, key: str) -> bytes:
        found = self.ask("range", key=base64.b64encode(key.encode()).decode())
        return base64.b64decode(found["kvs"][0]["value"]) if "kvs" in found else b""


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    made = Etcd(tmp_path)
    try:
        wait_until("etcd answers", made.answers, 60)
        yield made
    finally:
        made.process.kill()
        made.process.wait(30)


class StoreJob:
    """A job of one node that trains until `finish` is called."""

    def __init__(self, folder: Path, etcd: Etcd, *, port: int, limits: str = "true") -> None:
        folder.mkdir(exist_ok=True)
        self.flag = folder / "finish"
        secret = folder.parent / "secret"
        if not secret.exists():
            secret.touch(mode=0o600)
            secret.write_text("s" * 64)
        place = ["--nnodes", "1", "--node-rank", "0", "--meet", f"127.0.0.1:{port}", "--start-timeout", "200"]
        train = [sys.executable, script(folder, WAIT), str(self.flag)]
        line = [str(BIN / "hora"), "run", *place, "-np", "1", "--min-np", "1", *train]
        settings = {"HORA_STORE": etcd.url.replace("http", "etcd"), "HORA_SECRET_FILE": str(secret)}
        self.job = JobProcess(["sh", "-c", f'{limits}; exec "$@"', "sh", *line], folder, **settings)

    def begun(self) -> StoreJob:
        self.job.wait_for_text("training")
        return self

    def finish(self) -> str:
        self.flag.touch()
        assert self.job.wait() == 0, self.job.text()
        assert "trained" in self.job.text()
        assert "Traceback" not in self.job.text(), self.job.text()
        return self.job.text()


@pytest.mark.security
@needs_etcd
def test_forged_entries_in_the_store_do_not_end_a_job(tmp_path: Path, etcd: Etcd):
    job = StoreJob(tmp_path / "job", etcd, port=free_ports(1)[0]).begun()
    (prefix,) = {key.rpartition("/")[0] for key in etcd.names() if key.endswith("/leader")}
    forged = {
        "stray": b"\xff\xfe no text",
        "over": json.dumps({"run": "another", "status": 0}).encode(),
        "where": json.dumps({"term": 1, "host": "127.0.0.1", "port": 1}).encode(),
        "deep/er": b"[",
    }
    for key, value in forged.items():
        etcd.put(f"{prefix}/{key}", value)
    for key in ("stray", "over", "where"):
        job.job.wait_for_text(f"the entry '{key}' in the store")
    assert "was not written by a node of this job" in job.finish()


@pytest.mark.security
@needs_etcd
def test_a_forged_leader_in_the_store_delays_an_election_by_no_more_than_a_lease(tmp_path: Path, etcd: Etcd):
    """Overwrites the entry of a living leader, which restores it, and that of no leader, which the next job removes."""
    (port,) = free_ports(1)
    first = StoreJob(tmp_path / "first", etcd, port=port).begun()
    (key,) = [name for name in etcd.names() if name.endswith("/leader")]
    own, forged = etcd.value(key), json.dumps({"name": "another"}).encode()
    etcd.put(key, forged)
    wait_until("the leader has restored its entry", lambda: etcd.value(key) == own, 60)
    first.finish()
    wait_until("the entry is gone with its leader", lambda: etcd.value(key) == b"", 60)
    etcd.put(key, forged)
    text = StoreJob(tmp_path / "second", etcd, port=port).begun().finish()
    assert "the entry 'leader' in the store" in text
    assert etcd.value(key) != forged


@pytest.mark.security
@needs_etcd
@pytest.mark.skipif(not other_user.possible, reason=other_user.WHY_NOT)
def test_another_users_process_that_looks_like_an_agent_does_not_keep_a_job_with_a_store_from_starting(
    tmp_path, etcd: Etcd
):
    (port,) = free_ports(1)
    first = StoreJob(tmp_path / "first", etcd, port=port).begun()
    lines = [process.cmdline() for process in first.job.processes()]
    words = next(line[-3:] for line in lines if "hora.launch.ha.following" in line)
    first.finish()
    other = other_user.start('print("here", flush=True)\nsys.stdin.readline()', *words)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "here\n"
        assert psutil.Process(other.pid).cmdline()[-3:] == words
        StoreJob(tmp_path / "second", etcd, port=port).begun().finish()
    finally:
        other.communicate("\n", timeout=30)


def crowd_at(ports: set[int], stack: ExitStack) -> None:
    for port in ports:
        for _ in range(400):
            silent = stack.enter_context(socket.socket())
            silent.setblocking(False)
            silent.connect_ex(("127.0.0.1", port))


@pytest.mark.security
@needs_etcd
def test_a_flood_at_a_low_descriptor_limit_does_not_end_a_job_with_a_store(tmp_path: Path, etcd: Etcd):
    """The node's relay and agent, the leader's rendezvous and the rank's control tree may each open 256 files."""
    job = StoreJob(tmp_path / "job", etcd, port=free_ports(1)[0], limits="ulimit -S -n 256").begun()
    listening = {
        connection.laddr.port
        for process in job.job.processes()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    with ExitStack() as stack:
        crowd_at(listening, stack)
        text = job.finish()
    assert text.count("no connection can be accepted") <= 4 * len(listening), text
    job.job.assert_nothing_left()


@pytest.mark.security
def test_a_flood_at_256_descriptors_does_not_end_a_job_on_one_host(tmp_path: Path):
    meeting = Meeting(tmp_path, limits="ulimit -S -n 256").begun()
    with ExitStack() as stack:
        crowd_at(meeting.ports(), stack)
        meeting.finish()
