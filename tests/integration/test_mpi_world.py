"""Programs that use mpi4py beside `hvd` under horovodrun, with a real Open MPI and a real MPICH."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from job_process import HOROVODRUN, JobProcess, run_command

PROGRAM = """
import os, signal, sys
import torch, horovod.torch as hvd
from mpi4py import MPI
hvd.init()
comm = MPI.COMM_WORLD
assert (comm.Get_rank(), comm.Get_size()) == (hvd.rank(), hvd.size())
total = float(hvd.allreduce(torch.ones(3), op=hvd.Sum)[0])
print("sums", comm.allreduce(comm.rank + 1), total, MPI.Get_library_version().split()[0], flush=True)
comm.Barrier()
if "--kill" in sys.argv and comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
comm.Barrier()
"""


def installed(folder: Path, *packages: str) -> Path:
    options = ("--quiet", "--no-deps", "--ignore-installed", "--prefix", str(folder))
    argv = [sys.executable, "-m", "pip", "install", *options, *packages]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        pytest.skip(f"mpi4py cannot be installed: {done.stderr[-300:]}")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return installed(tmp_path_factory.mktemp("packages"), "mpi4py>=4.1", "mpich>=4.2")


def environment(folder: Path, name: str) -> dict[str, str]:
    """Return the variables with which mpi4py loads this MPI library."""
    if name == "Open" and shutil.which("mpirun") is None:
        pytest.skip("no Open MPI")
    library = "libmpi.so.40" if name == "Open" else str(folder / "lib" / "libmpi.so.12")
    return {"PYTHONPATH": str(next(folder.rglob("site-packages"))), "MPI4PY_LIBMPI": library}


@pytest.mark.parametrize("name", ["Open", "MPICH"])
def test_mpi4py_and_hvd_agree_under_horovodrun(name, folder):
    env = environment(folder, name)
    code, out, err = run_command("horovodrun", "-np", "2", sys.executable, "-c", PROGRAM, env=env)
    assert code == 0, err
    assert out.count(f"sums 3 2.0 {name}") == 2, out


def test_hora_mpi_0_leaves_mpi_ranks_in_worlds_of_one(folder):
    env = {**environment(folder, "Open"), "HORA_MPI": "0"}
    show = "from mpi4py import MPI; print('size', MPI.COMM_WORLD.size)"
    code, out, err = run_command("horovodrun", "-np", "2", sys.executable, "-c", show, env=env)
    assert (code, out.count("size 1")) == (0, 2), err


def test_a_killed_rank_ends_the_others_in_an_mpi_barrier(folder, tmp_path):
    env = environment(folder, "Open")
    before = set(Path("/dev/shm").iterdir())
    job = JobProcess([*HOROVODRUN, "-np", "2", sys.executable, "-c", PROGRAM, "--kill"], tmp_path, **env)
    assert job.wait() != 0
    job.assert_nothing_left()
    assert "sums 3 2.0 Open" in job.text()
    assert set(Path("/dev/shm").iterdir()) <= before
