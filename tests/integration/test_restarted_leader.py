"""Runs whose leader is killed and whose command is typed again: the ranks train on, and nothing is started again.

All nodes are processes of this machine. The leader's node has an agent of its own, which outlives the leader.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from job_process import BIN, LIMIT_S, JobProcess

from waiting import wait_until

HERE = Path(__file__).parent
LEADS = "this process leads the job now"


def free_port() -> int:
    """Return a port that is free, as is the next one."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
            try:
                with socket.create_server(("127.0.0.1", port + 1)):
                    return port
            except OSError:
                continue


class Run:
    """The same command on three nodes, each with one rank that runs `store_training.py`."""

    def __init__(self, work: Path, *, leader_timeout: int = 120, number: int = 3) -> None:
        self.work, self.folder, self.run_id = work, work / "training", "first"
        self.folder.mkdir()
        self.number, self.port, self._limit = number, free_port(), str(leader_timeout)
        self.secret = work / "secret"
        self.secret.touch(mode=0o600)
        self.secret.write_text("5" * 64)
        self.jobs: list[JobProcess] = []
        self.nodes = [self.start(index) for index in range(number)]

    def start(self, index: int) -> JobProcess:
        """Type the command of a node."""
        folder = self.work / str(len(self.jobs))
        folder.mkdir()
        place = ["--nnodes", str(self.number), "--node-rank", str(index), "--meet", f"127.0.0.1:{self.port}"]
        size = ["-np", str(self.number), "--min-np", "1", "--slots-per-host", "1", "--start-timeout", str(int(LIMIT_S))]
        again = ["--run-id", self.run_id, "--leader-timeout", self._limit]
        training = [sys.executable, str(HERE / "store_training.py"), str(self.folder)]
        environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(self.work / "inductor")}
        line = [str(BIN / "hora"), "run", *place, *size, *again, *training]
        self.jobs.append(JobProcess(line, folder, HORA_SECRET_FILE=str(self.secret), **environment))
        return self.jobs[-1]

    def kill_leader(self) -> None:
        self.nodes[0].process.send_signal(signal.SIGKILL)
        self.nodes[0].process.wait(30)

    def type_again(self) -> None:
        said = self.text().count(LEADS)
        self.nodes[0] = self.start(0)
        self.wait("the new process leads", lambda: self.text().count(LEADS) > said)

    def wait(self, what: str, happened) -> None:
        try:
            wait_until(what, happened, LIMIT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}") from None

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

    def wait_for_more_steps(self, worker: int = 0, *, number: int = 20) -> None:
        step = self.last(worker) + number
        self.wait(f"step {step}", lambda: self.last(worker) >= step)

    def text(self) -> str:
        return "\n".join(f"--- process {number}\n{job.text()}" for number, job in enumerate(self.jobs))

    def finish(self, *, statuses: tuple[int, ...] = (0, 0, 0)) -> None:
        (self.folder / "stop").touch()
        assert tuple(node.wait(LIMIT_S) for node in self.nodes) == statuses, self.text()
        for job in self.jobs:
            job.assert_nothing_left(60)

    def assert_nothing_lost(self) -> None:
        """Check that every worker kept one process from first to last step and took each step once."""
        for worker in range(self.number):
            steps = self.steps(worker)
            assert len({pid for pid, _, _ in steps}) == 1
            assert [step for _, step, _ in steps] == list(range(1, len(steps) + 1))
            assert {size for _, _, size in steps} == {self.number}


def test_a_killed_leader_is_typed_again_and_the_ranks_train_on(tmp_path: Path):
    run = Run(tmp_path)
    run.wait_for_more_steps()
    for _ in range(2):
        run.kill_leader()
        run.wait_for_more_steps()
        run.type_again()
        run.wait_for_more_steps()
    run.finish()
    run.assert_nothing_lost()
    assert "has finished at step" in run.nodes[0].text(), "it prints what the ranks print"


def test_a_rank_dies_while_there_is_no_leader(tmp_path: Path):
    """The survivors wait for the next leader, which gives them a world without the dead rank."""
    run = Run(tmp_path)
    run.wait_for_more_steps()
    run.kill_leader()
    (pid,) = {pid for pid, _, _ in run.steps(2)}
    os.kill(pid, signal.SIGKILL)
    run.type_again()
    run.wait("two are left", lambda: run.steps(0)[-1][2] == 2)
    run.wait_for_more_steps()
    run.finish()
    assert [step for _, step, _ in run.steps(0)] == list(range(1, len(run.steps(0)) + 1)), "a step was lost"
    assert len({pid for pid, _, _ in run.steps(0)}) == 1


@pytest.mark.slow
def test_a_leader_dies_again_while_its_agents_return(tmp_path: Path):
    run = Run(tmp_path)
    run.wait_for_more_steps()
    run.kill_leader()
    for _ in range(3):
        run.nodes[0] = run.start(0)
        wait_until("it listens", lambda: listens(run.port), 60)
        run.kill_leader()
    run.type_again()
    run.wait_for_more_steps()
    run.finish()
    run.assert_nothing_lost()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_a_node_is_lost_while_there_is_no_leader(tmp_path: Path):
    run = Run(tmp_path)
    run.wait_for_more_steps()
    run.kill_leader()
    run.nodes[1].kill()
    run.type_again()
    run.wait("two are left", lambda: run.steps(0)[-1][2] == 2)
    run.nodes[1] = run.start(1)
    run.wait("a new node has joined", lambda: run.steps(0)[-1][2] == 3)
    run.finish()
    assert [step for _, step, _ in run.steps(0)] == list(range(1, len(run.steps(0)) + 1)), "a step was lost"


@pytest.mark.slow
def test_all_processes_of_the_first_node_are_killed_and_its_command_typed_again(tmp_path: Path):
    """As when a container's first process dies: the ranks of the other nodes stay."""
    run = Run(tmp_path)
    run.wait_for_more_steps()
    run.nodes[0].kill()
    run.type_again()
    run.wait("a new rank has joined", lambda: run.last(3) > 0 and run.steps(1)[-1][2] == 3)
    run.finish()
    for worker in (1, 2):
        steps = run.steps(worker)
        assert len({pid for pid, _, _ in steps}) == 1
        assert [step for _, step, _ in steps] == list(range(1, len(steps) + 1)), "a step was lost"


def test_nothing_is_left_when_nobody_leads_for_too_long(tmp_path: Path):
    run = Run(tmp_path, leader_timeout=3)
    run.wait_for_more_steps(number=5)
    run.kill_leader()
    for node in run.nodes[1:]:
        assert node.wait(120) == 1, run.text()
        assert "nobody has led the job for 3 s (--leader-timeout)" in node.text()
    for job in run.jobs:
        job.assert_nothing_left(60)


@pytest.mark.slow
def test_a_second_leader_on_the_same_machine_is_told_that_there_is_one(tmp_path: Path):
    run = Run(tmp_path)
    run.wait_for_more_steps(number=5)
    second = run.start(0)
    assert second.wait(60) != 0
    assert f"cannot listen at 127.0.0.1:{run.port} for the nodes" in second.text()
    run.wait_for_more_steps(number=5)
    run.finish()
    run.assert_nothing_lost()


@pytest.mark.slow
def test_agents_of_another_run_begin_anew(tmp_path: Path):
    """Another `--run-id` names another training: workers of the run before are ended."""
    run = Run(tmp_path)
    run.wait_for_more_steps(number=5)
    run.kill_leader()
    old = {pid for worker in range(3) for pid, _, _ in run.steps(worker)}
    run.run_id = "second"
    run.nodes[0] = run.start(0)
    run.wait("the new run trains", lambda: run.steps(0)[-1][0] not in old and run.steps(0)[-1][2] == 3)
    assert LEADS not in run.text()
    run.finish()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--run-id", "one"], "add --join (or --nnodes) and --min-np"),
        (["--run-id", "one", "--min-np", "1"], "add --join (or --nnodes) and --min-np"),
        (
            ["--run-id", "a b", "--min-np", "1", "--nnodes", "1", "--node-rank", "0", "--meet", "here"],
            "up to 64 letters",
        ),
    ],
    ids=["a fixed size", "without nodes that join", "an invalid name"],
)
def test_a_run_that_cannot_be_led_on_is_refused(more: list[str], why: str):
    line = [str(BIN / "hora"), "run", "-np", "1", *more, "true"]
    said = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 2
    assert why in said.stderr
