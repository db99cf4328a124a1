"""Jobs inside an allocation of a real Slurm: both nodes are used, the first failure is named, the slots are free afterwards."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from job_process import BIN, JobProcess
from slurm_cluster import SlurmCluster, missing
from test_ssh import SPY

from waiting import wait_until

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.timeout(600)]

TRAIN = """
import os, torch
import horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
print("rank", hvd.rank(), "of", hvd.size(), "sum", total, "on", os.environ["SLURMD_NODENAME"], flush=True)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def allocated(slurm: SlurmCluster, work, *command: str, tasks: int = 1) -> JobProcess:
    """A command inside an allocation of both nodes."""
    argv = ["salloc", "-Q", "-N2", f"--ntasks-per-node={tasks}", str(BIN / command[0]), *command[1:]]
    return JobProcess(argv, work, **slurm.environment)


def test_both_nodes_are_used_and_what_was_not_allocated_is_refused(slurm, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    job = allocated(slurm, tmp_path, "horovodrun", "-np", "2", sys.executable, "train.py")
    assert job.wait(240) == 0, job.text()
    assert "[0]<stdout>:rank 0 of 2 sum 2.0 on n1" in job.text()
    assert "[1]<stdout>:rank 1 of 2 sum 2.0 on n2" in job.text()
    job.assert_nothing_left(60)
    slurm.wait_until_free()
    (tmp_path / "more").mkdir()
    job = allocated(slurm, tmp_path / "more", "hora", "run", "-np", "9", "true")
    assert job.wait(120) == 2
    assert "-np 9, but the Slurm job has 2 tasks and 2 cores on 2 nodes" in job.text()
    slurm.wait_until_free()


def test_the_first_failure_is_named_in_a_batch_script_of_an_mpirun_line(slurm, tmp_path):
    script = tmp_path / "batch.sh"
    fails = "echo rank $HOROVOD_RANK on $HOROVOD_HOSTNAME; test $HOROVOD_RANK != 3 || { echo oh no >&2; exit 7; }; sleep 600"
    script.write_text(f"#!/bin/sh\n{BIN}/hora mpirun -np 4 sh -c '{fails}'\n")
    job = JobProcess(
        ["sbatch", "--wait", "-N2", "--ntasks-per-node=2", "-o", str(tmp_path / "out"), str(script)],
        tmp_path,
        **slurm.environment,
    )
    assert job.wait(240) == 7
    said = (tmp_path / "out").read_text()
    assert "Process name: 3\nExit code: 7" in said
    assert "rank 3 on n2\n" in said
    job.assert_nothing_left(60)
    slurm.wait_until_free()


def test_the_secret_is_in_no_process_list_and_no_environment(slurm, tmp_path):
    job = allocated(slurm, tmp_path, "hora", "run", "-np", "2", sys.executable, "-c", SPY)
    assert job.wait(240) == 0, job.text()
    assert all(f"[{rank}]<stdout>:True []\n" in job.text() for rank in (0, 1)), job.text()
    job.assert_nothing_left(60)
    slurm.wait_until_free()


def test_the_elements_of_a_job_array_are_jobs_of_their_own(slurm, tmp_path):
    script = tmp_path / "batch.sh"
    show = "echo element $SLURM_ARRAY_TASK_ID rank $HOROVOD_RANK of $HOROVOD_SIZE on $SLURMD_NODENAME"
    script.write_text(f"#!/bin/sh\nexec {BIN}/horovodrun -np 2 sh -c '{show}'\n")
    line = [
        "sbatch",
        "--wait",
        "--array=0-1",
        "-N2",
        "--ntasks-per-node=1",
        "-o",
        str(tmp_path / "out.%a"),
        str(script),
    ]
    job = JobProcess(line, tmp_path, **slurm.environment)
    assert job.wait(240) == 0
    for element in (0, 1):
        said = (tmp_path / f"out.{element}").read_text()
        assert f"element {element} rank 0 of 2 on n1\n" in said
        assert f"element {element} rank 1 of 2 on n2\n" in said
    job.assert_nothing_left(60)
    slurm.wait_until_free()


def test_an_allocation_that_is_taken_away_leaves_nothing(slurm, tmp_path):
    """`scancel`, or the end of the time limit: Slurm ends what it knows of, and the launcher the rest."""
    job = allocated(slurm, tmp_path, "hora", "run", "-np", "2", "sh", "-c", "echo I run; sleep 600")
    wait_until("both ranks run", lambda: job.text().count("I run") == 2, 120)
    slurm.command("scancel", "--user=root")
    job.wait(120)
    job.assert_nothing_left(90)
    slurm.wait_until_free()


@pytest.mark.parametrize("victim", ["worker", "agent", "launcher"])
def test_nothing_is_left_and_the_nodes_are_free_after_any_death(slurm, tmp_path, victim):
    job = allocated(
        slurm, tmp_path, "hora", "run", "-np", "2", "sh", "-c", "echo pid $$ on $HOROVOD_HOSTNAME; sleep 600"
    )
    wait_until("both ranks run", lambda: job.text().count("pid ") == 2, 120)
    by_name = {
        "worker": [p for p in job.processes() if p.cmdline()[:1] == ["sleep"]],
        "agent": [
            p for p in job.processes() if "hora.launch.agent.node" in p.cmdline() and "srun" not in p.cmdline()[0]
        ],
        "launcher": [p for p in job.processes() if p.cmdline()[1:4] == [str(BIN / "hora"), "run", "-np"]],
    }
    by_name[victim][-1].send_signal(signal.SIGKILL)
    status = job.wait(240)
    assert status != 0 or victim == "launcher"  # salloc says 0 where its command is killed
    if victim == "worker":
        assert "Exit code: 137" in job.text()
    if victim == "agent":
        assert "the supervisor on host n" in job.text()
    job.assert_nothing_left(90)
    slurm.wait_until_free()


def test_a_signal_before_the_time_limit_lets_the_ranks_commit_and_leave(slurm, tmp_path):
    """What `sbatch --signal=B:TERM@60` sends to a batch script, which the launcher has replaced."""
    training = str(Path(__file__).with_name("leaving_training.py"))
    script = tmp_path / "batch.sh"
    line = f"{BIN}/hora run -np 2 --min-np 2 {sys.executable} {training} {tmp_path}/commits 100000"
    script.write_text(f"#!/bin/sh\nexec {line}\n")
    out = tmp_path / "out"
    job = JobProcess(["sbatch", "--wait", "-N2", "-n2", "-o", str(out), str(script)], tmp_path, **slurm.environment)
    wait_until("some steps", lambda: out.exists() and "step 3 of 2" in out.read_text(), 240)
    (number,) = slurm.command("squeue", "-h", "-o", "%A").split()
    slurm.command("scancel", "--batch", "--signal=TERM", number)
    assert job.wait(240) == 75, out.read_text()
    assert "all ranks have committed and left" in out.read_text()
    assert list((tmp_path / "commits").glob("*.json"))
    job.assert_nothing_left(60)
    slurm.wait_until_free()
