"""Jobs that keep their state in etcd: leaders die, are stopped and resume, and the ranks continue to train.

Uses a real etcd server.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from job_process import BIN, JobProcess
from lease_server import certificates, lease_server
from namespaces import Host

from hora.launch.ha.etcd import Etcd as EtcdStore
from hora.launch.ha.store import StoreError
from hora.launch.providers.kubernetes import ManifestRequest, manifests
from hora.watch.address import find_pages
from waiting import wait_until

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd (Debian: etcd-server)")
HERE = Path(__file__).parent


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [sock.getsockname()[1] for sock in opened]


def secret_file(folder: Path) -> Path:
    """Create a secret file; all nodes run on this machine."""
    made = folder / "secret"
    made.touch(mode=0o600)
    made.write_text("s" * 64)
    return made


class Etcd:
    """A cluster at 127.0.0.1. `tls`: arguments that enable TLS. `hosts`: run a member on each of these hosts, at the
    given address.
    """

    def __init__(
        self,
        folder: Path,
        tls: list[str] | None = None,
        *,
        number: int = 1,
        hosts: Sequence[tuple[Host, str]] = (),
    ) -> None:
        self._folder = folder
        number = len(hosts) or number
        addresses = [address for _, address in hosts] or ["127.0.0.1"] * number
        self.ports = free_ports(number)
        peers = [f"http://{address}:{port}" for address, port in zip(addresses, free_ports(number), strict=True)]
        cluster = ",".join(f"m{index}={peer}" for index, peer in enumerate(peers))
        scheme = "https" if tls else "http"
        self._commands = []
        self.members = [f"{address}:{port}" for address, port in zip(addresses, self.ports, strict=True)]
        for index, (member, peer) in enumerate(zip(self.members, peers, strict=True)):
            client = f"{scheme}://{member}"
            self._commands.append([
                *(hosts[index][0].command() if hosts else ()),
                "etcd", "--name", f"m{index}", "--data-dir", str(folder / f"etcd.{index}"), "--log-level", "error",
                "--logger", "zap", "--listen-client-urls", client, "--advertise-client-urls", client,
                "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", cluster,
                *(tls or []),
            ])  # fmt: skip
        self.url = f"{'etcds' if tls else 'etcd'}://{','.join(self.members)}"
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def port(self) -> int:
        return self.ports[0]

    def start(self) -> None:
        """Start the members that are not running."""
        for index, command in enumerate(self._commands):
            if index not in self._running:
                with (self._folder / "etcd.log").open("ab") as log:
                    self._running[index] = subprocess.Popen(command, stdout=log, stderr=log)

    def wait(self, store: EtcdStore) -> None:
        def answers() -> bool:
            with contextlib.suppress(StoreError):
                store.read()
                return True
            return False

        wait_until("etcd answers", answers, 60)

    def kill(self, index: int) -> None:
        member = self._running.pop(index)
        member.kill()
        member.wait(30)

    def stop(self) -> None:
        for index in list(self._running):
            self.kill(index)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    made = Etcd(tmp_path)
    made.start()
    made.wait(EtcdStore.from_url(made.url))
    yield made
    made.stop()


class Nodes:
    """The same command on several nodes, all on this machine, each with one rank that runs `script`."""

    def __init__(
        self, work: Path, store: str, script: str, number: int = 3, limit_s: int = 120, **environment: str
    ) -> None:
        self.folder, self._work, self._number = work / "training", work, number
        self.folder.mkdir()
        (self._meet,) = free_ports(1)
        self._command = ["--start-timeout", str(limit_s), sys.executable, str(HERE / script), str(self.folder)]
        self._environment = {"HORA_STORE": store, "OMP_NUM_THREADS": "1", **environment}
        self._environment["TORCHINDUCTOR_CACHE_DIR"] = str(work / "inductor")  # torch creates it and leaves it
        self.jobs: list[JobProcess] = []
        for index in range(number):
            self.start(index)

    def start(self, index: int) -> JobProcess:
        """Start or restart the process of a node."""
        folder = self._work / str(len(self.jobs))
        folder.mkdir()
        place = ["--nnodes", str(self._number), "--node-rank", str(index), "--meet", f"127.0.0.1:{self._meet}"]
        size = ["-np", str(self._number), "--min-np", "1", "--slots-per-host", "1"]
        line = [str(BIN / "hora"), "run", *place, *size, *self._command]
        self.jobs.append(JobProcess(line, folder, HORA_SECRET_FILE=str(secret_file(folder)), **self._environment))
        return self.jobs[-1]

    def steps(self, worker: int) -> list[list[int]]:
        """Return pid, step and world size of each step of a worker."""
        try:
            lines = (self.folder / f"worker.{worker}").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [list(map(int, line.split())) for line in lines if len(line.split()) == 3]

    def last(self, worker: int = 0) -> int:
        steps = self.steps(worker)
        return steps[-1][1] if steps else 0

    def wait_for_step(self, step: int, worker: int = 0) -> None:
        try:
            wait_until(f"step {step}", lambda: self.last(worker) >= step, 120)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}") from None

    def wait_for_leader(self, *, other_than: JobProcess | None = None) -> JobProcess:
        """Return the leading node: the one that prints the ranks' output."""

        def leader() -> JobProcess | None:
            marks = {job: job.text().rfind("step ") for job in self.jobs if job is not other_than}
            return next((job for job, mark in marks.items() if mark >= 0), None)

        try:
            wait_until("a node leads", lambda: leader() is not None, 60)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}") from None
        found = leader()
        assert found is not None
        return found

    def text(self) -> str:
        return "\n".join(f"--- node {index}\n{job.text()}" for index, job in enumerate(self.jobs))

    def finish(self, jobs: list[JobProcess]) -> None:
        (self.folder / "stop").touch()
        statuses = [job.wait(120) for job in jobs]
        assert statuses == [0] * len(jobs), self.text()
        for job in self.jobs:
            job.assert_nothing_left(60)

    def assert_nothing_lost(self, *, workers: int) -> None:
        """Check that every worker kept one process from first to last step and took each step once."""
        for worker in range(workers):
            steps = self.steps(worker)
            assert len({pid for pid, _, _ in steps}) == 1
            assert [step for _, step, _ in steps] == list(range(1, len(steps) + 1))
            assert {size for _, _, size in steps} == {workers}


@pytest.fixture(params=["etcd", pytest.param("kubernetes", marks=pytest.mark.slow)])
def store(request, tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a store, and the variables that it needs."""
    if request.param == "etcd":
        yield request.getfixturevalue("etcd").url, {}
        return
    certificates(tmp_path)
    request = ManifestRequest(name="train", image="i", command=("true",), min_nodes=1, any_leader=True)
    with lease_server(tmp_path, manifests("job", request)) as server:
        yield server.url(request.state), server.environment


def test_another_node_leads_after_the_leader_is_killed_without_disturbing_ranks(store, tmp_path: Path):
    nodes = Nodes(tmp_path, store[0], "store_training.py", HORA_DASHBOARD="1", **store[1])
    nodes.wait_for_step(20)
    leader = nodes.wait_for_leader()
    leader.process.send_signal(signal.SIGKILL)
    next_one = nodes.wait_for_leader(other_than=leader)
    nodes.wait_for_step(nodes.last() + 20)
    assert "this process leads the job now" in next_one.text()
    assert_page_goes_on(next_one)
    nodes.finish([job for job in nodes.jobs if job is not leader])
    nodes.assert_nothing_lost(workers=3)


def assert_page_goes_on(job: JobProcess) -> None:
    """Check that the live page of a new leader shows all ranks and their progress."""
    job.wait_for_text("see it live", 60)
    (page,) = [page for page in find_pages() if page.pid == job.process.pid]
    asking = urllib.request.Request(f"{page.url}api/run", headers={"Authorization": f"Bearer {page.token}"})

    def shown() -> dict[str, Any]:
        with urllib.request.urlopen(asking, timeout=30) as answer:
            return dict(json.loads(answer.read())["head"])

    wait_until("the page shows that the ranks train", lambda: shown()["state"] == "training", 60)
    before = shown()["step"]
    wait_until("it shows more steps", lambda: shown()["step"] > before + 5, 60)


@pytest.mark.slow
def test_a_stopped_leader_does_not_lead_after_it_resumes(etcd: Etcd, tmp_path: Path):
    nodes = Nodes(tmp_path, etcd.url, "store_rank.py")
    nodes.wait_for_step(20)
    leader = nodes.wait_for_leader()
    leader.process.send_signal(signal.SIGSTOP)
    next_one = nodes.wait_for_leader(other_than=leader)
    time.sleep(30)  # how long the leader stays stopped, at least
    leader.process.send_signal(signal.SIGCONT)
    leader.wait_for_text("does not lead the job any more", 60)
    nodes.wait_for_step(nodes.last() + 40)
    assert "this process leads the job now" not in leader.text()
    said = len(leader.text())
    nodes.wait_for_step(nodes.last() + 20)
    assert len(leader.text()) == said, "it prints what another one prints"
    assert "this process leads the job now" in next_one.text()
    nodes.finish(nodes.jobs)
    nodes.assert_nothing_lost(workers=3)


@pytest.mark.slow
def test_etcd_is_killed_and_restarted(etcd: Etcd, tmp_path: Path):
    """Without the store no node leads, but the ranks continue to train; once it is back, a node leads."""
    nodes = Nodes(tmp_path, etcd.url, "store_rank.py")
    nodes.wait_for_step(20)
    leader = nodes.wait_for_leader()
    etcd.stop()
    leader.wait_for_text("does not lead the job any more", 60)
    nodes.wait_for_step(nodes.last() + 40)
    etcd.start()
    wait_until("a node leads again", lambda: "this process leads the job now" in nodes.text(), 60)
    nodes.wait_for_step(nodes.last() + 20)
    nodes.finish(nodes.jobs)
    nodes.assert_nothing_lost(workers=3)


@pytest.mark.slow
def test_the_leader_keeps_its_term_while_one_of_three_etcd_members_restarts(tmp_path: Path):
    cluster = Etcd(tmp_path, number=3)
    cluster.start()
    try:
        cluster.wait(EtcdStore.from_url(cluster.url))
        nodes = Nodes(tmp_path, f"{cluster.url}?ttl=10", "store_rank.py")
        nodes.wait_for_step(20)
        leader = nodes.wait_for_leader()
        for index in range(3):
            cluster.kill(index)
            step = nodes.last()
            nodes.wait_for_step(step + 250)  # longer than the lease
            cluster.start()
            cluster.wait(EtcdStore.from_url(f"etcd://127.0.0.1:{cluster.ports[index]}"))
        assert "does not lead the job any more" not in nodes.text()
        assert nodes.wait_for_leader() is leader
        nodes.finish(nodes.jobs)
        nodes.assert_nothing_lost(workers=3)
    finally:
        cluster.stop()


@pytest.mark.slow
def test_a_new_leader_handles_the_death_of_a_rank(etcd: Etcd, tmp_path: Path):
    """The new leader detects the death, blacklists the slot and starts the next generation."""
    nodes = Nodes(tmp_path, etcd.url, "store_training.py")
    nodes.wait_for_step(20)
    leader = nodes.wait_for_leader()
    leader.process.send_signal(signal.SIGKILL)
    nodes.wait_for_leader(other_than=leader)
    (pid,) = {pid for pid, _, _ in nodes.steps(2)}
    subprocess.run(["kill", "-9", str(pid)], check=True, timeout=30)
    wait_until("two are left", lambda: nodes.steps(0)[-1][2] == 2, 120)
    nodes.finish([job for job in nodes.jobs if job is not leader])
    assert [step for _, step, _ in nodes.steps(0)] == list(range(1, len(nodes.steps(0)) + 1)), "a step was lost"
    assert len({pid for pid, _, _ in nodes.steps(0)}) == 1


@pytest.mark.slow
def test_node_processes_are_killed_and_restarted_without_disturbing_ranks(etcd: Etcd, tmp_path: Path):
    """A restarted process may become leader; the workers of its node stay with the agent that holds them."""
    nodes = Nodes(tmp_path, etcd.url, "store_training.py")
    nodes.wait_for_step(20)
    alive, leads = list(nodes.jobs), "this process leads the job now"
    for index in range(3):  # until only restarted processes are left
        said = nodes.text().count(leads)
        alive[index].process.send_signal(signal.SIGKILL)
        alive[index].process.wait(30)
        alive[index] = nodes.start(index)
        nodes.wait_for_step(nodes.last() + 100)
        assert nodes.text().count(leads) <= said + 1
    wait_until("one that was started again leads", lambda: any(leads in job.text() for job in nodes.jobs[3:]), 60)
    nodes.finish(alive)
    nodes.assert_nothing_lost(workers=3)


@pytest.mark.slow
def test_nothing_is_left_after_every_node_is_killed(etcd: Etcd, tmp_path: Path):
    nodes = Nodes(tmp_path, etcd.url, "store_rank.py", HORA_LAUNCHER_TIMEOUT="5")
    nodes.wait_for_step(5)
    for job in nodes.jobs:
        job.process.send_signal(signal.SIGKILL)
    for job in nodes.jobs:
        job.wait(30)
        job.assert_nothing_left(120)


def test_an_unusable_store_is_reported(tmp_path: Path):
    nodes = Nodes(tmp_path, "etcd://me:secret@127.0.0.1:1", "store_rank.py", number=1, limit_s=1)
    assert nodes.jobs[0].wait(120) == 1, nodes.text()
    assert "no member of the store (HORA_STORE) answers: 127.0.0.1:1" in nodes.text()
    assert "secret@" not in nodes.text()
    nodes.jobs[0].assert_nothing_left()


@pytest.mark.slow
def test_another_node_leads_after_the_leader_gets_sigterm(etcd: Etcd, tmp_path: Path):
    nodes = Nodes(tmp_path, etcd.url, "store_training.py")
    nodes.wait_for_step(20)
    leader = nodes.wait_for_leader()
    leader.process.send_signal(signal.SIGTERM)
    assert leader.wait(120) == 75, nodes.text()
    leader.assert_nothing_left(60)
    others = [job for job in nodes.jobs if job is not leader]
    wait_until("another node leads", lambda: any("leads the job now" in job.text() for job in others), 60)
    survivor = next(worker for worker in range(3) if nodes.steps(worker)[-1][2] == 2)
    nodes.wait_for_step(nodes.last(survivor) + 20, survivor)
    nodes.finish(others)
    assert [step for _, step, _ in nodes.steps(survivor)] == list(range(1, len(nodes.steps(survivor)) + 1))
