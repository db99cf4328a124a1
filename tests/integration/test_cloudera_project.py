"""Cloudera's tutorial project, unmodified: `import cdsw`, idle workers, mpirun across them, a second terminal."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from job_process import BIN, JobProcess

from waiting import wait_until

COMPAT = [sys.executable, "-m", "hora.compat"]
STARTER = """
import os
import cdsw

workers = cdsw.launch_workers(n=2, cpu=2, memory=4, nvidia_gpu=0, code="import time\\ntime.sleep(3600)")
ids = [worker["id"] for worker in workers]
running = cdsw.await_workers(ids, wait_for_completion=False, timeout_seconds=120)
ips = [worker["ip_address"] for worker in running["workers"]]
hosts = ",".join(ip + ":1" for ip in ips)
status = os.system(
    "mpirun -np 2 -H " + hosts + " -bind-to none -map-by slot -mca pml ob1 -mca btl ^openib"
    " -mca plm_rsh_args '-p 2222 -o StrictHostKeyChecking=no' -mca btl_tcp_if_include eth0 python3 train.py"
)
print("status", status, [worker["status"] for worker in cdsw.list_workers()], flush=True)
"""
STOPPER = """
import cdsw
print([worker["status"] for worker in cdsw.list_workers()])
print([response.status_code for response in cdsw.stop_workers()])
"""
TRAIN = """
import os, time
import torch
import horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
print("rank", hvd.rank(), "of", hvd.size(), "sum", total, os.environ["OMPI_COMM_WORLD_RANK"], flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.fixture
def project(tmp_path):
    """A folder with the scripts, and a PATH that has a shell but no mpirun."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name, text in (("starter.py", STARTER), ("stopper.py", STOPPER), ("train.py", TRAIN)):
        (folder / name).write_text(text)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sh").symlink_to(shutil.which("sh"))
    return folder


def start(project, *before: str) -> JobProcess:
    path = {"PATH": str(project.parent / "bin")}
    return JobProcess([*before, *COMPAT, "starter.py"], project, **path)


def wait_for_both_ranks(job: JobProcess) -> None:
    job.wait_for_text("rank 0 of 2 sum 2.0 0")
    job.wait_for_text("rank 1 of 2 sum 2.0 1")


def ranks_of(job: JobProcess) -> list[int]:
    """Return the processes of a job that have a rank."""
    found = []
    for process in job.processes():
        with contextlib.suppress(OSError):  # it has just ended
            if b"\0HOROVOD_RANK=" in Path(f"/proc/{process.pid}/environ").read_bytes():
                found.append(process.pid)
    return found


def test_the_project_runs_unmodified_and_a_second_terminal_stops_its_workers(project):
    job = start(project)
    wait_for_both_ranks(job)
    second = subprocess.run([*COMPAT, "stopper.py"], cwd=project, capture_output=True, text=True, timeout=280)
    assert second.stdout == "['running', 'running']\n[204, 204]\n", second.stderr
    assert ranks_of(job) == []  # stopping workers ends their ranks
    assert job.wait() == 0
    assert re.search(r"hora: process \d on host 127\.0\.1\.\d failed .*its worker \w+ was stopped", job.text())
    assert f"status {143 << 8} ['stopped', 'stopped']" in job.text()
    if len(os.sched_getaffinity(0)) < 4:
        assert "workers with 2 CPU cores each were requested" in job.text()
    job.assert_nothing_left()


ELASTIC = """
import subprocess
from hora import workers

launched = workers.launch_workers(2, cpu=0.5, memory=1, code="import time; time.sleep(3600)")
running = workers.await_workers(launched, wait_for_completion=False, timeout_seconds=120)["workers"]
hosts = ",".join(worker["ip_address"] + ":1" for worker in running)
line = ["horovodrun", "-np", "2", "--min-np", "1", "-H", hosts, "python", "elastic.py"]
print("status", subprocess.run(line).returncode, flush=True)
"""
ELASTIC_TRAIN = """
import os, time
import horovod.torch as hvd

@hvd.elastic.run
def train(state):
    print("rank", hvd.rank(), "of", hvd.size(), flush=True)
    while hvd.size() > 1:
        hvd.barrier()
        time.sleep(0.05)
    print("alone", flush=True)
    while not os.path.exists("go on"):
        time.sleep(0.05)

hvd.init()
train(hvd.elastic.TorchState(epoch=0))
"""


def test_an_elastic_job_continues_without_a_stopped_worker(project):
    (project / "starter.py").write_text(ELASTIC)
    (project / "elastic.py").write_text(ELASTIC_TRAIN)
    job = JobProcess([sys.executable, "starter.py"], project, PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    job.wait_for_text("rank 1 of 2")
    stop = "from hora import workers; print(len(workers.stop_workers(workers.list_workers()[1])))"
    second = subprocess.run([sys.executable, "-c", stop], cwd=project, capture_output=True, text=True, timeout=280)
    assert second.stdout == "1\n", second.stderr
    assert len(ranks_of(job)) == 1
    job.wait_for_text("alone")
    (project / "go on").touch()
    assert job.wait() == 0
    assert "status 0" in job.text()
    job.assert_nothing_left()


DEVICES = """
import subprocess
import cdsw
workers = cdsw.launch_workers(n=2, cpu=1, memory=1, nvidia_gpu=1, code="import time; time.sleep(3600)")
running = cdsw.await_workers(workers, wait_for_completion=False, timeout_seconds=120)["workers"]
hosts = ",".join(worker["ip_address"] + ":1" for worker in running)
for command in ("mpirun", "horovodrun"):
    subprocess.run([command, "-np", "2", "-H", hosts, "sh", "-c", "echo device $CUDA_VISIBLE_DEVICES"], check=True)
"""


def test_ranks_at_the_workers_addresses_use_the_workers_gpus(project):
    """Device names suffice: no rank uses a device."""
    (project / "devices.py").write_text(DEVICES)
    env = {"PATH": str(project.parent / "bin"), "CUDA_VISIBLE_DEVICES": "hora-test-3,hora-test-5"}
    job = JobProcess([*COMPAT, "devices.py"], project, **env)
    assert job.wait(120) == 0, job.text()
    for line in ("device hora-test-3", "device hora-test-5"):
        assert job.text().count(line) == 2, job.text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_of_the_project_is_left_after_a_signal(project, number):
    """Ctrl-C reaches every process of the terminal; SIGKILL only the script's own process."""
    (project / "train.py").write_text("import time\nprint('training', flush=True)\ntime.sleep(600)")
    job = start(project, str(shutil.which("setsid")))
    wait_until("both ranks run", lambda: job.text().count("training") == 2)
    if number == signal.SIGINT:
        os.killpg(job.process.pid, number)
    else:
        job.process.send_signal(number)
    job.wait()
    job.assert_nothing_left(60.0)


def test_a_script_in_another_folder_sees_no_workers(project, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "list.py").write_text("import cdsw\nprint(cdsw.list_workers(), cdsw.stop_workers())")
    done = subprocess.run([*COMPAT, "list.py"], cwd=elsewhere, capture_output=True, text=True, timeout=280)
    assert done.stdout == "[] None\n", done.stderr


def test_installed_commands_start_ranks(tmp_path):
    """`hora mpirun --install` installs mpirun and mpiexec in a folder of the user's choice."""
    folder = tmp_path / "mpi-bin"
    hora = str(Path(sys.executable).with_name("hora"))
    said = subprocess.run([hora, "mpirun", "--install", str(folder)], capture_output=True, text=True, check=True)
    assert f"export PATH={folder}:$PATH" in said.stdout
    show = "echo $HOROVOD_RANK $OMPI_COMM_WORLD_LOCAL_RANK of $OMPI_COMM_WORLD_SIZE $GREETING in $PWD"
    line = ["-np", "3", "-H", "127.0.0.2:2,127.0.0.3:2", "-map-by", "node", "-x", "GREETING=hello", "-tag-output"]
    done = subprocess.run(
        [folder / "mpiexec", *line, "-wdir", str(tmp_path), "sh", "-c", show],
        capture_output=True,
        text=True,
        timeout=280,
    )
    places = [f"[1,{rank}]<stdout>:{rank} {local} of 3 hello in {tmp_path}" for rank, local in ((0, 0), (1, 0), (2, 1))]
    assert sorted(done.stdout.splitlines()) == places, done.stderr
    again = subprocess.run([hora, "mpirun", "--install", str(folder)], capture_output=True, text=True)
    assert (again.returncode, "already a file" in again.stderr) == (2, True)


def test_mpirun_timeout_ends_the_job(tmp_path):
    hora = str(Path(sys.executable).with_name("hora"))
    job = JobProcess([hora, "mpirun", "-np", "1", "--timeout", "1", "sleep", "600"], tmp_path)
    assert job.wait() == 143
    assert "ended after 1 s (--timeout)" in job.text()
    wait_until("nothing is left", lambda: not job.processes())
