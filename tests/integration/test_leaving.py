"""SIGTERM to an elastic job: its ranks commit and exit, and a new job resumes from their commit."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
from job_process import BIN, JobProcess
from test_agent import TwoNodes

from waiting import wait_until

TRAINING = str(Path(__file__).with_name("leaving_training.py"))
LEFT = 75


def last_step(job: JobProcess) -> int:
    return max(map(int, re.findall(r"step (\d+) of", job.text())), default=0)


def wait_for_step(job: JobProcess, step: int) -> None:
    wait_until(f"step {step}", lambda: last_step(job) >= step or job.process.poll() is not None, 120)
    assert job.process.poll() is None, job.text()


def test_a_job_commits_on_sigterm_and_resumes(tmp_path):
    def started(name: str, num_steps: int) -> JobProcess:
        (tmp_path / name).mkdir()
        command = [sys.executable, TRAINING, str(tmp_path / "commits"), str(num_steps)]
        return JobProcess([str(BIN / "horovodrun"), "-np", "2", "--min-np", "2", *command], tmp_path / name)

    job = started("first", 100_000)
    wait_for_step(job, 3)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(120) == LEFT, job.text()
    assert "all ranks have committed and left" in job.text()
    job.assert_nothing_left()
    step = last_step(job)
    again = started("again", step + 2)
    assert again.wait(120) == 0, again.text()
    assert f"resumed at step {step}" in again.text()


@pytest.mark.slow
def test_a_node_leaves_on_sigterm_and_rejoins(tmp_path):
    command = [sys.executable, TRAINING, str(tmp_path / "commits"), "100000"]
    nodes = TwoNodes(tmp_path, "-np", "2", "--min-np", "1", *command)
    controller, agent = nodes.jobs
    wait_for_step(controller, 3)
    agent.process.send_signal(signal.SIGTERM)
    assert agent.wait(120) == LEFT, agent.text() + controller.text()
    agent.assert_nothing_left()
    wait_until("the first node goes on alone", lambda: "of 1\n" in controller.text(), 120)
    assert "failed" not in controller.text()
    nodes.jobs.append(nodes.started(1, tmp_path / "again"))
    wait_until("it is one of two again", lambda: "of 2\n" in controller.text().rpartition("of 1\n")[2], 120)
    controller.process.send_signal(signal.SIGTERM)
    assert controller.wait(120) == LEFT
    assert nodes.jobs[2].wait(120) == LEFT
    nodes.assert_nothing_left()
