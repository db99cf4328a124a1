"""Programs that use mpi4py beside `hvd` under horovodrun, with a real Open MPI and a real MPICH."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from job_process import HOROVODRUN, CommandProcess, JobProcess, run_command

import other_user
from waiting import wait_until

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


@pytest.mark.parametrize("name", ["Open", "MPICH"])
def test_hora_mpi_0_leaves_mpi_ranks_in_worlds_of_one(name, folder):
    """The names of Open MPI's mpirun, which ranks have all the same, start no MPI world."""
    env = {**environment(folder, name), "HORA_MPI": "0"}
    show = "import os; from mpi4py import MPI; print('size', MPI.COMM_WORLD.size, 'of', os.environ[NAME])"
    show = show.replace("NAME", "'OMPI_COMM_WORLD_SIZE'")
    code, out, err = run_command("horovodrun", "-np", "2", sys.executable, "-c", show, env=env)
    assert (code, out.count("size 1 of 2")) == (0, 2), err


PLACE = """
import os, horovod.torch as hvd
hvd.init()
def place():
    both = ("OMPI_COMM_WORLD_SIZE", hvd.size()), ("OMPI_COMM_WORLD_RANK", hvd.rank())
    both += ("OMPI_COMM_WORLD_LOCAL_SIZE", hvd.local_size()), ("OMPI_COMM_WORLD_LOCAL_RANK", hvd.local_rank())
    assert all(os.environ[name] == str(value) for name, value in both), os.environ
    return os.environ["OMPI_COMM_WORLD_SIZE"], os.environ.get("PMI_SIZE")
"""


@pytest.mark.parametrize(
    ("options", "mpi", "pmi"),
    [((), "0", None), ((), "1", "2"), (("--min-np", "2"), "1", None), (("-H", "localhost:1,127.0.0.2:1"), "1", None)],
)
def test_programs_that_ask_for_the_names_of_open_mpi_see_the_world_of_hvd(options, mpi, pmi):
    """DeepXDE, for one, trains a model of its own on every rank without them. PMI's would promise an MPI world."""
    program = PLACE + f"print('world of', place() == ('2', {pmi!r}))"
    line = ["horovodrun", "-np", "2", *options, sys.executable, "-c", program]
    code, out, err = run_command(*line, env={"HORA_MPI": mpi})
    assert (code, out.count("world of True")) == (0, 2), out + err


def test_functions_see_the_names_of_open_mpi(tmp_path):
    asks = PLACE + "print('world of', place()[0])"
    run = f"import horovod; horovod.run(exec, args=({asks!r}, {{}}), np=2)"
    code, out, err = run_command(sys.executable, "-c", run)
    assert (code, out.count("world of 2")) == (0, 2), out + err


def test_a_killed_rank_ends_the_others_in_an_mpi_barrier(folder, tmp_path):
    env = environment(folder, "Open")
    before = set(Path("/dev/shm").iterdir())
    job = JobProcess([*HOROVODRUN, "-np", "2", sys.executable, "-c", PROGRAM, "--kill"], tmp_path, **env)
    assert job.wait() != 0
    job.assert_nothing_left()
    assert "sums 3 2.0 Open" in job.text()
    assert set(Path("/dev/shm").iterdir()) <= before


DEAF = """
import os, socket, time
from pathlib import Path
rank, deaf, seen = os.environ["HOROVOD_RANK"], Path("deaf"), Path("seen")

def wait_for(path):
    while not path.exists():
        time.sleep(0.05)

if rank == "0":
    sock = socket.socket(fileno=int(os.environ["PMI_FD"]))
    sock.sendall(b"cmd=put key=a value=" + b"v" * 1000 + b"\\n")
    sock.settimeout(1)
    sent, question = 0, b"cmd=get key=a\\n"
    try:
        while True:
            sent += sock.send(question * 100)
    except TimeoutError:
        deaf.touch()
    wait_for(seen)
    sock.settimeout(60)
    answers = sock.makefile("rb")
    rest = -sent % len(question)
    expected = 1 + sent // len(question)
    lines = [answers.readline() for _ in range(expected)]
    sock.sendall(question[len(question) - rest :])
    lines += [answers.readline()] if rest else []
    print("answers", lines[0], {line.split(b"=")[-1] for line in lines[1:]} == {b"v" * 1000 + b"\\n"}, flush=True)
else:
    wait_for(deaf)
    print("the agent forwards output", flush=True)
    seen.touch()
"""


def test_a_rank_that_reads_no_answers_of_its_mpi_world_holds_up_nobody(tmp_path):
    """It gets all of them once it reads."""
    job = JobProcess([*HOROVODRUN, "-np", "2", sys.executable, "-c", DEAF], tmp_path, HORA_MPI="1")
    assert job.wait() == 0, job.text()
    assert "[1]<stdout>:the agent forwards output" in job.text()
    assert "[0]<stdout>:answers b'cmd=put_result rc=0 msg=success\\n' True" in job.text()
    job.assert_nothing_left()


STRANGER = """
import socket, sys
held = [socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=60) for _ in range(50)]
print("holds", flush=True)
sys.stdin.read()
"""
JOINS = """
import ctypes, os, time
from pathlib import Path
while not Path("strangers are there").exists():
    time.sleep(0.05)
library, me = ctypes.CDLL("libpmix.so.2"), ctypes.create_string_buffer(260)
assert library.PMIx_Init(me, None, 0) == 0 and library.PMIx_Fence(None, 0, None, 0) == 0
print("joined as", os.environ["PMIX_RANK"], flush=True)
library.PMIx_Finalize(None, 0)
"""


@pytest.mark.skipif(not other_user.possible, reason=other_user.WHY_NOT)
def test_silent_connections_of_another_user_do_not_keep_ranks_from_their_mpi_world(tmp_path):
    """The library reads from one connection after another, 10 s from a silent one: only its own user's reach it."""
    try:
        ctypes.CDLL("libpmix.so.2")
    except OSError:
        pytest.skip("no Open MPI with PMIx")
    job = JobProcess([*HOROVODRUN, "-np", "2", sys.executable, "-c", JOINS], tmp_path, HORA_MPI="1")

    def ports() -> list[int]:
        found = [c for p in job.agents()[1:] for c in p.net_connections("tcp") if c.status == "LISTEN"]
        return [c.laddr.port for c in found]

    wait_until("the agent listens for its ranks", ports)
    strangers = [other_user.start(STRANGER, str(port)) for port in ports()]
    try:
        assert all(stranger.stdout.readline() == "holds\n" for stranger in strangers)
        (tmp_path / "strangers are there").touch()
        assert job.wait() == 0, job.text()
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.communicate()
    assert all(f"joined as {rank}" in job.text() for rank in (0, 1))
    job.assert_nothing_left()


MEET = """
import os, sys
import torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([float(sys.argv[1])]), op=hvd.Sum).item()
os.write(1, f"rank {hvd.rank()} of {hvd.size()} sum {total}\\n".encode())  # at once: mpirun joins pieces of lines
"""


@pytest.mark.parametrize("package", ["mpich", pytest.param("impi-rt", marks=pytest.mark.slow)])
def test_ranks_of_two_mpiruns_on_one_host_meet_their_own_without_an_address(package, tmp_path):
    """Their own `mpirun`, under a shell in which ranks are not its children, of a user who runs it twice at once."""
    mpi, program = installed(tmp_path / "mpi", package), tmp_path / "meet.py"
    program.write_text(MEET)
    mpirun = [str(mpi / "bin" / "mpirun"), "-n", "2", "sh", "-c", f"{sys.executable} {program} $0; true"]
    env = {"PATH": f"{mpi / 'bin'}:/usr/bin:/bin", "LD_LIBRARY_PATH": str(mpi / "lib"), "OMP_NUM_THREADS": "1"}
    with CommandProcess(*mpirun, "1", env=env) as first, CommandProcess(*mpirun, "10", env=env) as second:
        for job, total in ((first, 2.0), (second, 20.0)):
            code, out, err = job.finish()
            assert code == 0, err
            assert sorted(filter(None, out.splitlines())) == [f"rank {rank} of 2 sum {total}" for rank in (0, 1)], err
