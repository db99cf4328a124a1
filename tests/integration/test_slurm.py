"""Jobs inside an allocation of a real Slurm: both nodes are used, the first failure is reported, and the slots are
freed afterwards.
"""

from __future__ import annotations

import re
import shutil
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from job_process import BIN, JobProcess
from slurm_cluster import SlurmCluster, missing
from test_ssh import SPY

from hora.launch.environment import first_variables
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
    """Run a command inside an allocation of both nodes."""
    argv = ["salloc", "-Q", "-N2", f"--ntasks-per-node={tasks}", str(BIN / command[0]), *command[1:]]
    return JobProcess(argv, work, **slurm.environment)


@pytest.mark.slow
def test_both_nodes_are_used_and_more_ranks_than_allocated_are_rejected(slurm, tmp_path):
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


SHOW = "rank $HOROVOD_RANK of $HOROVOD_SIZE, $HOROVOD_LOCAL_RANK of $HOROVOD_LOCAL_SIZE on $SLURMD_NODENAME"
FUNCTION = """
import os, sys
import hora

@hora.distributed(num_processes=3, on="slurm")
def place(*names):
    import os
    return [os.environ.get(name) for name in names]

for values in place.distributed("HOROVOD_RANK", "HOROVOD_LOCAL_SIZE", "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES"):
    print(*values)
"""


def test_a_function_on_nodes_with_unequal_tasks_sees_all_of_the_jobs_gpus(slurm, tmp_path):
    (tmp_path / "function.py").write_text(FUNCTION)
    line = ["salloc", "-Q", "-N2", "-n3", "--gres=gpu:2", sys.executable, "function.py"]
    job = JobProcess(line, tmp_path, **slurm.environment)
    assert job.wait(240) == 0, job.text()
    assert [text for text in job.text().splitlines() if "0,1" in text] == ["0 2 n1 0,1", "1 2 n1 0,1", "2 1 n2 0,1"]
    job.assert_nothing_left(60)
    slurm.wait_until_free()


def test_the_components_of_a_heterogeneous_job_are_one_world(slurm, tmp_path):
    sizes = ["-N1", "-n1", "--gpus-per-task=2", ":", "-N1", "-n2", "--gpus-per-task=1"]
    line = [str(BIN / "horovodrun"), "-np", "3", "sh", "-c", f"echo {SHOW}, GPUs $CUDA_VISIBLE_DEVICES"]
    job = JobProcess(["salloc", "-Q", *sizes, *line], tmp_path, **slurm.environment)
    assert job.wait(240) == 0, job.text()
    assert "[0]<stdout>:rank 0 of 3, 0 of 1 on n1, GPUs 0,1" in job.text()
    assert "[1]<stdout>:rank 1 of 3, 0 of 2 on n2, GPUs 0,1" in job.text()
    assert "[2]<stdout>:rank 2 of 3, 1 of 2 on n2, GPUs 0,1" in job.text()
    job.assert_nothing_left(60)
    slurm.wait_until_free()


def test_ranks_started_by_srun_find_one_another(slurm, tmp_path):
    """The nodes' names have no addresses here, so the rendezvous address is given explicitly."""
    (tmp_path / "train.py").write_text(TRAIN)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(sock.getsockname()[1])}
    line = ["salloc", "-Q", "-N2", "--ntasks-per-node=1", "srun", sys.executable, "train.py"]
    job = JobProcess(line, tmp_path, **slurm.environment, **rendezvous)
    assert job.wait(240) == 0, job.text()
    assert "rank 0 of 2 sum 2.0 on n1" in job.text()
    assert "rank 1 of 2 sum 2.0 on n2" in job.text()
    job.assert_nothing_left(60)
    slurm.wait_until_free()


STEP = """
import os, sys, time
from pathlib import Path
import torch, horovod.torch as hvd
step, rank = os.environ["SLURM_STEP_ID"], os.environ["SLURM_PROCID"]
needs = {"00": "begun.10", "01": "begun.10", "11": "ended.00"}.get(step + rank)  # the last rank of step 1 is late
while needs and not Path(needs).exists():
    time.sleep(0.05)
Path(f"begun.{step}{rank}").touch()
hvd.init()
ours = hvd.allreduce(torch.tensor([float(10 ** int(step))]), op=hvd.Sum).item()
if sys.argv[1:] == ["torch"]:
    torch.distributed.init_process_group("gloo")
    of_torch = torch.tensor([float(10 ** int(step))])
    torch.distributed.all_reduce(of_torch)
    ours += of_torch.item()
print(f"step {step} rank {rank} sum {ours}", flush=True)
Path(f"ended.{step}{rank}").touch()
"""


@pytest.mark.parametrize("also", ["", pytest.param("torch", marks=pytest.mark.slow)])
def test_two_steps_of_an_allocation_meet_themselves(slurm, tmp_path, also):
    """Neither knows of a rendezvous address: both derive it from what srun tells them."""
    (tmp_path / "step.py").write_text(STEP)
    step = f"srun --overlap -n2 {sys.executable} step.py {also}"
    line = ["salloc", "-Q", "-N1", "-n2", "sh", "-c", f"{step} & {step} & wait"]
    job = JobProcess(line, tmp_path, **slurm.environment, OMP_NUM_THREADS="1")
    job.wait(240)
    factor = 4 if also else 2
    expected = {f"step {step} rank {rank} sum {factor * 10.0**step}" for step in (0, 1) for rank in (0, 1)}
    assert {line for line in job.text().splitlines() if line.startswith("step ")} == expected, job.text()
    job.assert_nothing_left(60)
    slurm.wait_until_free()


WORLD = """
import os, sys, time
from pathlib import Path
import torch, horovod.torch as hvd
number, rank = int(os.environ.get("SLURM_ARRAY_TASK_ID") or os.environ["SLURM_STEP_ID"]), os.environ["SLURM_PROCID"]
Path(f"begun.{number}.{rank}").touch()
while len(list(Path().glob("begun.*"))) < int(sys.argv[1]):  # all worlds exist at the same time
    time.sleep(0.05)
hvd.init()
total = hvd.allreduce(torch.tensor([10.0 ** number]), op=hvd.Sum).item()
os.write(1, f"world {number} rank {rank} sum {total}\\n".encode())  # at once: srun joins pieces of lines
Path(f"ended.{number}.{rank}").touch()
while len(list(Path().glob("ended.*"))) < int(sys.argv[1]):
    time.sleep(0.05)
"""
TWO_WORLDS = {f"world {number} rank {rank} sum {2 * 10.0**number}" for number in (0, 1) for rank in (0, 1)}


def worlds_in(*texts: str) -> set[str]:
    return {line for text in texts for line in text.splitlines() if line.startswith("world ")}


def test_two_jobs_of_a_user_on_one_node_meet_themselves(slurm, tmp_path):
    """They are the elements of an array, and share a node: each is one `srun python` that is told no address."""
    (tmp_path / "world.py").write_text(WORLD)
    (tmp_path / "batch.sh").write_text(f"#!/bin/sh\nexec srun -O -n2 {sys.executable} world.py 4\n")
    options = ["--array=0-1", "-N1", "-w", "n1", "-n2", "-O", "-o", str(tmp_path / "out.%a")]
    job = JobProcess(["sbatch", "--wait", *options, "batch.sh"], tmp_path, **slurm.environment, OMP_NUM_THREADS="1")
    job.wait(240)
    assert worlds_in(*((tmp_path / f"out.{number}").read_text() for number in (0, 1))) == TWO_WORLDS
    job.assert_nothing_left(60)
    slurm.wait_until_free()


@pytest.mark.slow
def test_exclusive_steps_side_by_side_meet_themselves(slurm, tmp_path):
    (tmp_path / "world.py").write_text(WORLD)
    step = f"srun --exclusive -N1 -n2 {sys.executable} world.py 4"
    line = ["salloc", "-Q", "-N2", "-n4", "sh", "-c", f"{step} & {step} & wait"]
    job = JobProcess(line, tmp_path, **slurm.environment, OMP_NUM_THREADS="1")
    job.wait(240)
    assert worlds_in(job.text()) == TWO_WORLDS, job.text()
    job.assert_nothing_left(60)
    slurm.wait_until_free()


@pytest.mark.slow
def test_a_requeued_job_meets_as_a_new_world(slurm, tmp_path):
    """Its ranks have the number of the job that was interrupted in the middle of their `hvd.init()`."""
    (tmp_path / "world.py").write_text(
        "import os, time\nfrom pathlib import Path\n"
        "first, rank = 'SLURM_RESTART_COUNT' not in os.environ, os.environ['SLURM_PROCID']\n"
        "if first and rank == '1':\n    Path('half').touch()\n    time.sleep(600)  # rank 0 waits for it\n" + WORLD
    )
    (tmp_path / "batch.sh").write_text(f"#!/bin/sh\nexec srun -n2 {sys.executable} world.py 1\n")
    options = ["--requeue", "--open-mode=append", "-N1", "-n2", "-D", str(tmp_path), "-o", str(tmp_path / "out")]
    number = slurm.command("sbatch", "--parsable", *options, str(tmp_path / "batch.sh")).strip()
    wait_until("one rank has begun", (tmp_path / "half").exists, 120)
    slurm.command("scontrol", "requeue", number)
    wait_until("both ranks have met", lambda: len(worlds_in((tmp_path / "out").read_text())) == 2, 240)
    slurm.wait_until_free()


@pytest.mark.slow
def test_a_batch_script_with_mpirun_reports_the_first_failure(slurm, tmp_path):
    script = tmp_path / "batch.sh"
    shows = "echo rank $HOROVOD_RANK on $HOROVOD_HOSTNAME"
    fails = f"{shows}; test $HOROVOD_RANK != 3 || {{ echo oh no >&2; exit 7; }}; sleep 600"
    script.write_text(f"#!/bin/sh\n{BIN}/hora mpirun -np 4 sh -c '{fails}'\n")
    job = JobProcess(
        ["sbatch", "--wait", "-N2", "--ntasks-per-node=2", "-o", str(tmp_path / "out"), str(script)],
        tmp_path,
        **slurm.environment,
    )
    assert job.wait(240) == 7
    said = (tmp_path / "out").read_text()
    assert "hora mpirun: process 3 on host n2 failed with exit code 7. Its last line: oh no" in said
    assert "rank 3 on n2\n" in said
    job.assert_nothing_left(60)
    slurm.wait_until_free()


def test_the_secret_is_in_no_process_list_and_no_environment(slurm, tmp_path):
    job = allocated(slurm, tmp_path, "hora", "run", "-np", "2", sys.executable, "-c", SPY)
    assert job.wait(240) == 0, job.text()
    assert all(f"[{rank}]<stdout>:True []\n" in job.text() for rank in (0, 1)), job.text()
    job.assert_nothing_left(60)
    slurm.wait_until_free()


@pytest.mark.slow
def test_the_elements_of_a_job_array_are_separate_jobs(slurm, tmp_path):
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


def test_nothing_is_left_after_the_allocation_is_revoked(slurm, tmp_path):
    """On `scancel` or at the time limit Slurm ends the processes that it knows of, and the launcher the rest."""
    job = allocated(slurm, tmp_path, "hora", "run", "-np", "2", "sh", "-c", "echo I run; sleep 600")
    wait_until("both ranks run", lambda: job.text().count("I run") == 2, 120)
    slurm.command("scancel", "--user=root")
    job.wait(120)
    job.assert_nothing_left(90)
    slurm.wait_until_free()


@pytest.mark.parametrize("victim", ["worker", "agent", pytest.param("node", marks=pytest.mark.slow), "launcher"])
def test_nothing_is_left_and_the_nodes_are_free_after_any_death(slurm, tmp_path, victim):
    rank = ["sh", "-c", "echo pid $$ on $HOROVOD_HOSTNAME; sleep 600"]
    job = allocated(slurm, tmp_path, "hora", "run", "-np", "2", "--silence-timeout", "12", *rank)
    wait_until("both ranks run", lambda: job.text().count("pid ") == 2, 120)
    by_name = {
        "worker": [p for p in job.processes() if p.cmdline()[:1] == ["sleep"]],
        "agent": [
            p for p in job.processes() if "hora.launch.agent.session" in p.cmdline() and "srun" not in p.cmdline()[0]
        ],
        "launcher": [p for p in job.processes() if p.cmdline()[1:4] == [str(BIN / "hora"), "run", "-np"]],
    }
    if victim == "node":  # the node falls silent
        agent = by_name["agent"][-1]
        for process in [agent, *agent.children(recursive=True)]:
            process.suspend()
    else:
        by_name[victim][-1].send_signal(signal.SIGKILL)
    status = job.wait(240)
    assert status != 0 or victim == "launcher"  # salloc returns 0 if its command is killed
    if victim == "worker":
        assert "failed with exit code 137" in job.text()
    if victim == "agent":
        assert "the agent on host n" in job.text()
    if victim == "node":
        assert "has not answered for 12 s and was given up" in job.text()
    job.assert_nothing_left(90)
    slurm.wait_until_free()


@pytest.mark.slow
def test_a_signal_before_the_time_limit_lets_the_ranks_commit_and_leave(slurm, tmp_path):
    """Sends the signal of `sbatch --signal=B:TERM@60` to a batch script that has exec'ed the launcher."""
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


@pytest.mark.slow
def test_a_job_at_its_time_limit_is_requeued_and_resumes(slurm, tmp_path):
    """Covers the whole sequence: Slurm's signal before the limit, status 75, `scontrol requeue`, and resuming from the
    commits of the first run.
    """
    training = str(Path(__file__).with_name("leaving_training.py"))
    out = tmp_path / "out"
    line = f"{BIN}/hora run -np 2 --min-np 2 {sys.executable} {training} {tmp_path}/commits 100000"
    script = tmp_path / "batch.sh"
    script.write_text(
        f"#!/bin/sh\n{line} &\ntrap 'kill -TERM $!' TERM\nwait $!; wait $!\nstatus=$?\necho ended with $status\n"
        "test $status = 75 && scontrol requeue $SLURM_JOB_ID\nexit $status\n"
    )
    options = ["--requeue", "--open-mode=append", "--time=2", "--signal=B:TERM@45", "-N2", "-n2", "-o", str(out)]
    slurm.command("sbatch", *options, str(script))
    wait_until("Slurm has sent its signal", lambda: out.exists() and "ended with 75" in out.read_text(), 180)
    first = out.read_text()
    assert "all ranks have committed and left" in first
    last = int(re.findall(r"step (\d+) of 2", first)[-1])
    wait_until("it goes on", lambda: f"resumed at step {last}\n" in out.read_text(), 400)
    slurm.command("scancel", "--user=root")
    slurm.wait_until_free()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd (Debian: etcd-server)")
def test_the_other_node_continues_after_the_first_node_of_a_job_with_a_store_dies(slurm, tmp_path):
    from test_job_store import Etcd, EtcdStore, secret_file

    etcd = Etcd(tmp_path)
    etcd.start()
    try:
        etcd.wait(EtcdStore.from_url(etcd.url))
        training = str(Path(__file__).with_name("store_training.py"))
        step = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--no-kill", str(BIN / "hora"), "run", "--join"]
        line = ["salloc", "-Q", "-N2", "--no-kill", *step, "-np", "2", "--min-np", "1", sys.executable, training]
        own = {"HORA_STORE": etcd.url, "HORA_SECRET_FILE": str(secret_file(tmp_path)), "OMP_NUM_THREADS": "1"}
        own["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "inductor")
        job = JobProcess([*line, str(tmp_path)], tmp_path, **slurm.environment, **own)
        notes = {worker: tmp_path / f"worker.{worker}" for worker in (0, 1)}

        def last(worker: int) -> list[int]:
            lines = notes[worker].read_text().splitlines() if notes[worker].exists() else []
            return list(map(int, lines[-1].split())) if lines else [0, 0, 0]

        wait_until("some steps of two ranks", lambda: last(0)[1:] >= [10, 2], 240)
        wait_until("both take part", lambda: last(1)[1] >= 10, 60)
        (first,) = {worker for worker in (0, 1) if first_variables(last(worker)[0]).get("SLURMD_NODENAME") == "n1"}
        other = 1 - first
        for process in job.processes():
            if first_variables(process.pid).get("SLURMD_NODENAME") == "n1":
                with suppress(ProcessLookupError):
                    process.kill()
        wait_until("the other one goes on alone", lambda: last(other)[2] == 1, 120)
        step_then = last(other)[1]
        wait_until("it trains", lambda: last(other)[1] > step_then + 20, 120)
        (tmp_path / "stop").touch()
        job.wait(120)
        assert f"has finished at step {last(other)[1]}" in job.text(), job.text()
        steps = [list(map(int, line.split())) for line in notes[other].read_text().splitlines()]
        assert [step for _, step, _ in steps] == list(range(1, len(steps) + 1)), "a step was lost"
        assert len({pid for pid, _, _ in steps}) == 1
        job.wait_for_the_last(60)
        slurm.wait_until_free()
    finally:
        etcd.stop()
