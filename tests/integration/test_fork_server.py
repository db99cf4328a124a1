"""Workers forked from a process that has preloaded their modules behave like other workers."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from job_process import JobProcess, run_command

import horovod
from waiting import wait_until

pytestmark = pytest.mark.usefixtures("by_value")


def servers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            # Forked workers show the same command line; only the server's stdin is a socket.
            reads = os.readlink(f"/proc/{process.pid}/fd/0")
            if "--fork-server" in process.cmdline() and reads.startswith("socket:"):
                found.append(process)
        except (psutil.NoSuchProcess, OSError):
            continue
    return found


def test_modules_of_the_function_are_loaded_once_and_random_numbers_differ():
    def look() -> dict[str, object]:
        loaded = "torch" in sys.modules and "horovod.torch" in sys.modules
        import random

        import numpy
        import torch

        import horovod.torch  # noqa: F401 - the name in the function is the point

        return {
            "loaded": loaded,
            "parent": os.getppid(),
            "session": os.getsid(0) == os.getpid(),
            "arguments": sys.argv[1:],
            "random": (random.random(), numpy.random.rand(), torch.initial_seed()),
            "sum": torch.ones(100_000).sum().item(),
        }

    first, second = horovod.run(look, num_proc=2)
    assert first["loaded"]
    assert first["parent"] == second["parent"]
    assert first["session"]
    assert first["arguments"] == []
    assert all(ours != theirs for ours, theirs in zip(first["random"], second["random"], strict=True))
    assert first["sum"] == second["sum"] == 100_000.0


def test_creating_an_optimizer_imports_no_further_module():
    def look() -> list[str]:
        import torch

        before = set(sys.modules)
        torch.optim.SGD([torch.ones(1)], lr=1.0)
        return sorted(set(sys.modules) - before)

    assert horovod.run(look, num_proc=2) == [[], []]


def test_a_function_that_sets_the_number_of_threads_gets_it():
    def work() -> int:
        os.environ["OMP_NUM_THREADS"] = "1"
        import torch

        return torch.get_num_threads()

    assert horovod.run(work, num_proc=2) == [1, 1]


def test_exit_handlers_run_and_threads_are_joined(tmp_path: Path):
    def work() -> None:
        import atexit

        folder, rank = tmp_path, os.environ["HOROVOD_RANK"]
        atexit.register(lambda: (folder / f"handler {rank}").touch())

        def late() -> None:
            time.sleep(0.3)
            (folder / f"thread {rank}").touch()

        threading.Thread(target=late).start()
        sys.stdout.write("a last word")

    horovod.run(work, num_proc=2, output_filename=str(tmp_path / "logs"))
    made = sorted(path.name for path in tmp_path.iterdir() if path.is_file())
    assert made == ["handler 0", "handler 1", "thread 0", "thread 1"]
    assert (tmp_path / "logs/rank.1/stdout").read_text() == "[1]<stdout>:a last word\n"


def test_workers_start_without_a_fork_server_that_dies_while_loading():
    killed = []

    def kill() -> None:
        wait_until("a fork server runs", servers)
        servers()[0].kill()
        killed.append(True)

    def work() -> str:
        import torch

        return torch.__name__

    thread = threading.Thread(target=kill)
    thread.start()
    assert horovod.run(work, num_proc=2) == ["torch", "torch"]
    thread.join()
    assert killed


@pytest.mark.parametrize("where", ["server", "fork"])
def test_workers_are_executed_where_the_fork_server_cannot_fork(tmp_path: Path, monkeypatch, where: str):
    (tmp_path / "sitecustomize.py").write_text(
        "import errno, os\n"
        "real, server = os.fork, 0\n"
        "def fork():\n"
        "    global server\n"
        "    if open('/proc/self/comm').read() != 'hora-forks\\n':\n"
        "        return real()\n"
        "    server = server or os.getpid()\n"
        f"    if {where!r} == 'fork' and os.getpid() == server:\n"
        "        return real()\n"
        "    open(__file__ + '.failed', 'w').close()\n"
        "    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))\n"
        "os.fork = fork\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def work() -> tuple[str, int]:
        import torch

        return torch.__name__, int(os.environ["HOROVOD_RANK"])

    assert horovod.run(work, num_proc=2) == [("torch", 0), ("torch", 1)]
    assert (tmp_path / "sitecustomize.py.failed").exists()


def test_workers_survive_the_fork_server(tmp_path: Path):
    flag, here = tmp_path / "go on", tmp_path / "here"

    def work() -> int:
        rank = os.environ["HOROVOD_RANK"]
        here.with_name(f"here {rank}").touch()
        deadline = time.monotonic() + 60
        while not flag.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return int(rank)

    def kill() -> None:
        wait_until("both ranks work", lambda: len(list(tmp_path.glob("here ?"))) == 2)
        servers()[0].kill()
        wait_until("it is dead", lambda: not servers())
        flag.touch()

    thread = threading.Thread(target=kill)
    thread.start()
    assert horovod.run(work, num_proc=2) == [0, 1]
    thread.join()


@pytest.mark.parametrize("moment", ["loading", "working"])
def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path, moment: str):
    script = tmp_path / "script.py"
    script.write_text(
        "import horovod\n"
        "def work():\n"
        "    import time, os\n"
        "    print('working', os.environ['HOROVOD_RANK'], flush=True)\n"
        "    time.sleep(300)\n"
        f"    {'import torch' if moment == 'loading' else ''}\n"
        "if __name__ == '__main__':\n"
        "    horovod.run(work, num_proc=3)\n"
    )
    job = JobProcess([sys.executable, str(script)], tmp_path)
    if moment == "working":
        for rank in range(3):
            job.wait_for_text(f"working {rank}")
        assert len(job.processes()) == 3 + 1 + 3  # launcher, guardian, agent; fork server; ranks
    else:
        wait_until("the fork server loads", lambda: len(job.processes()) == 3 + 1)
    job.process.kill()
    job.wait()
    job.assert_nothing_left()


def test_a_single_worker_needs_no_fork_server():
    def look() -> bool:
        import psutil

        return any("--fork-server" in p.cmdline() for p in psutil.Process(os.getppid()).children())

    assert horovod.run(look, num_proc=1) == [False]
    assert horovod.run(look, num_proc=2) == [True, True]


SPARE = """
import sys
was_loaded = "torch" in sys.modules
import os, pickle, signal
import torch
import horovod.torch as hvd

class Kept:
    pass

hvd.init()
assert pickle.loads(pickle.dumps(Kept)) is Kept and sys.modules["__main__"].Kept is Kept
assert sys.argv[1:] == ["an argument"] and os.path.isabs(__file__)
net = torch.nn.Linear(2, 1)
first = net.weight.tolist()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters())
state = hvd.elastic.TorchState(net, optimizer, step=0, per_step=True)

@hvd.elastic.run
def train(state):
    sizes = [hvd.size()]
    while state.step < 10 or hvd.size() < 2:
        optimizer.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.step += 1
        if os.environ["HORA_WORKER"] == "1" and state.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()
    return sizes

train(state)
print("end", os.environ["HORA_WORKER"], was_loaded, first, hvd.size(), flush=True)
if hvd.rank() == 0:
    raise SystemExit(0)
"""


def test_a_spare_of_a_command_takes_the_place_of_a_dead_rank(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(SPARE)
    command = ["-np", "2", "--min-np", "1", "--spares", "1", sys.executable, str(script), "an argument"]
    status, output, errors = run_command("hora", "run", *command)
    assert status == 0, output + errors
    ends = [line.split("end ")[1] for line in output.splitlines() if "end " in line]
    assert sorted(line.split()[:2] for line in ends) == [["0", "True"], ["2", "True"]]
    assert len({line.partition("[[")[2] for line in ends}) == 1, "both begin with torch's own seed"


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no data')", 1, "no data"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_forked_program_ends_like_an_executed_one(tmp_path: Path, ending: str, status: int, said: str):
    script = tmp_path / "train.py"
    script.write_text(f"import sys\nimport torch\n{ending}\n")
    command = ["-np", "2", "--min-np", "2", "--spares", "1", sys.executable, "-u", str(script)]
    found, output, errors = run_command("hora", "run", *command)
    assert found == status, output + errors
    assert said in errors
    assert "program.py" not in errors, "the stack begins in the program"


def test_a_spare_needs_a_python_program():
    status, _, errors = run_command("hora", "run", "-np", "2", "--min-np", "1", "--spares", "1", "sh", "-c", "true")
    assert status != 0
    assert "--spares needs a command of the form `python SCRIPT …`" in errors


def test_a_program_that_sets_what_torch_reads_is_executed(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nos.environ['OMP_NUM_THREADS'] = '1'\nprint('torch' in sys.modules)\n")
    command = ["-np", "1", "--min-np", "1", "--spares", "1", sys.executable, str(script)]
    status, output, errors = run_command("hora", "run", *command)
    assert status == 0, errors
    assert "False" in output
    assert "sets variables that torch reads when it is imported" in errors
