"""The same command on two nodes, without ssh.

Both nodes are this machine; all communication between them goes through the agents.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest
from job_process import BIN, JobProcess
from test_ssh import SPY

from waiting import wait_until

TRAIN = """
import os, torch
import horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
own = [name for name in ("OF_NODE_0", "OF_NODE_1") if name in os.environ]
print("rank", hvd.rank(), "of", hvd.size(), "sum", total, own, flush=True)
"""
HORA = str(BIN / "hora")


# For each platform: the flags and variables that define a node's place, from its number and the rendezvous address.
PLACES = {
    "flags": lambda rank, meet: (["--nnodes", "2", "--node-rank", str(rank), "--meet", meet], {}),
    "Kubeflow": lambda rank, meet: (
        ["--join"],
        {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": meet.partition(":")[0],
            "PET_MASTER_PORT": meet.partition(":")[2],
        },
    ),
    "SkyPilot": lambda rank, meet: (
        ["--join", "--meet", meet],  # only the port matters; any free one will do here
        {
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NUM_GPUS_PER_NODE": "0",
            "SKYPILOT_TASK_ID": "sky-2026-01-01-00-00-00-000000_train_1-0",
        },
    ),
}


class TwoNodes:
    """Node 0, which runs the controller, and node 1."""

    def __init__(
        self,
        work: Path,
        *command: str,
        secrets: tuple[str, str] = ("s", "s"),
        limit_s: int = 120,
        platform: str = "flags",
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            self._meet = f"127.0.0.1:{sock.getsockname()[1]}"
        self._command, self._limit_s, self._platform = command, limit_s, platform
        self.jobs = [self.started(rank, work / str(rank), secrets[rank]) for rank in (0, 1)]

    def started(self, rank: int, folder: Path, text: str = "s") -> JobProcess:
        folder.mkdir()
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(text * 64)
        place, variables = PLACES[self._platform](rank, self._meet)
        own = {"HORA_SECRET_FILE": str(secret), f"OF_NODE_{rank}": "yes", **variables}
        line = [HORA, "run", *place, "--start-timeout", str(self._limit_s), *self._command]
        return JobProcess(line, folder, **own)

    def wait(self) -> list[int]:
        return [job.wait(150) for job in self.jobs]

    def assert_nothing_left(self) -> None:
        for job in self.jobs:
            job.assert_nothing_left(60)


def test_two_nodes_are_one_world_and_each_keeps_its_environment(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    nodes = TwoNodes(tmp_path, sys.executable, str(script), platform="Kubeflow")
    assert nodes.wait() == [0, 0], nodes.jobs[0].text() + nodes.jobs[1].text()
    assert "[0]<stdout>:rank 0 of 2 sum 2.0 ['OF_NODE_0']" in nodes.jobs[0].text()
    assert "[1]<stdout>:rank 1 of 2 sum 2.0 ['OF_NODE_1']" in nodes.jobs[0].text()
    nodes.assert_nothing_left()


def test_a_failure_on_the_other_node_is_reported_and_sets_every_exit_status(tmp_path):
    fails = "test $HOROVOD_RANK != 3 || { echo oh no >&2; exit 7; }; sleep 600"
    nodes = TwoNodes(tmp_path, "-np", "4", "sh", "-c", fails, platform="SkyPilot")
    assert nodes.wait() == [7, 7]
    assert "failed with exit code 7. Its last line: oh no" in nodes.jobs[0].text()
    assert "hora run: process 3 on host" in nodes.jobs[0].text()
    nodes.assert_nothing_left()


def test_a_silent_node_is_dropped_and_exits_when_it_resumes(tmp_path):
    """No process of the node answers or exits, as on a machine that swaps or whose disk hangs."""
    nodes = TwoNodes(tmp_path, "-np", "2", "--silence-timeout", "12", "sh", "-c", "echo I am $$; exec sleep 600")
    wait_until("both ranks run", lambda: nodes.jobs[0].text().count("I am") == 2, 120)
    controller, agent = nodes.jobs
    stopped = agent.processes()
    assert len(stopped) == 3  # guardian, agent and a rank
    for process in stopped:
        process.suspend()
    assert controller.wait(150) == 255
    assert "has not answered for 12 s and was given up; raise --silence-timeout" in controller.text()
    assert "hora run: process 1 on host" in controller.text()
    for process in stopped:
        process.resume()
    assert agent.wait(150) == 1
    assert "the first node, 127.0.0.1, is gone" in agent.text()
    nodes.assert_nothing_left()


@pytest.mark.parametrize("victim", ["worker", "agent", "guardian", "controller"])
def test_nothing_is_left_after_any_death(tmp_path, victim):
    nodes = TwoNodes(tmp_path, "-np", "2", "sh", "-c", "echo I am $$; exec sleep 600")
    wait_until("both ranks run", lambda: nodes.jobs[0].text().count("I am") == 2, 120)
    controller, agent = nodes.jobs
    if victim == "worker":
        (worker,) = [process for process in agent.processes() if process.cmdline() == ["sleep", "600"]]
        worker.kill()
    elif victim == "agent":
        (child,) = psutil.Process(agent.process.pid).children()
        child.kill()
    else:
        (agent if victim == "guardian" else controller).process.send_signal(signal.SIGKILL)
    statuses = nodes.wait()
    assert all(status != 0 for status in statuses), statuses
    if victim == "worker":
        assert statuses == [137, 137]
    if victim == "agent":
        assert "the agent on host" in controller.text()
    if victim == "controller":
        assert "the first node, 127.0.0.1, is gone" in agent.text()
    nodes.assert_nothing_left()


def test_the_secret_is_in_no_process_list_and_no_environment(tmp_path):
    nodes = TwoNodes(tmp_path, "-np", "2", sys.executable, "-c", SPY)
    assert nodes.wait() == [0, 0], nodes.jobs[0].text()
    assert all(f"[{rank}]<stdout>:True []\n" in nodes.jobs[0].text() for rank in (0, 1)), nodes.jobs[0].text()
    nodes.assert_nothing_left()


def test_nodes_that_do_not_find_one_another_report_the_cause(tmp_path):
    nodes = TwoNodes(tmp_path, "-np", "2", "true", secrets=("s", "t"), limit_s=5)
    assert nodes.wait() == [1, 1]
    assert "Node 1 did not come to port" in nodes.jobs[0].text()
    assert "does not hold this job's secret" in nodes.jobs[1].text() or "did not answer" in nodes.jobs[1].text()
    nodes.assert_nothing_left()


def test_a_secret_that_others_can_read_is_refused(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s" * 64)
    os.chmod(secret, 0o644)
    place = ["--nnodes", "1", "--node-rank", "0", "--meet", "127.0.0.1:29500"]
    job = JobProcess([HORA, "run", *place, "--secret-file", str(secret), "true"], tmp_path)
    assert job.wait() == 2
    assert "chmod 600" in job.text()
    (tmp_path / "again").mkdir()
    job = JobProcess([HORA, "run", *place, "true"], tmp_path / "again")
    assert job.wait() == 2
    assert "the nodes need a secret that they share" in job.text()
