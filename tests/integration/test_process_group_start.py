"""How a program of its own starts a process group: what torch loads, and where the ranks meet."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch
from job_process import lines_of, run_command
from packaging.version import Version

ALONE = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("hora", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
print(type(dist.group.WORLD).__name__, tensor.tolist())
dist.destroy_process_group()
"""


def _alone(tmp_path, **env):
    command = [sys.executable, "-c", ALONE, str(tmp_path / "store")]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[0]


def test_a_group_of_one_process(tmp_path):
    assert _alone(tmp_path) == "HoraProcessGroup [1.0, 1.0, 1.0]"


@pytest.mark.skipif(Version(torch.__version__) < Version("2.14"), reason="torch 2.14 loads backends by their name")
def test_torch_loads_the_backend_when_a_program_names_it(tmp_path):
    assert _alone(tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "HoraProcessGroup [1.0, 1.0, 1.0]"


GROUPS = """
import os, socket, sys
import torch
import torch.distributed as dist

dist.init_process_group(sys.argv[1])
group = dist.new_group([1, 0]) if sys.argv[1] == "gloo" else dist.new_group([0, 1])
tensor = torch.ones(3)
dist.all_reduce(tensor, group=group)
objects = [None, None]
dist.all_gather_object(objects, dist.get_rank())
own = {os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if number != "3"
       if os.path.exists(f"/proc/self/fd/{number}")}
found = []
for table in ("/proc/net/tcp", "/proc/net/tcp6"):
    with open(table) as file:
        rows = [line.split() for line in file.readlines()[1:]]
    found += [words[1] for words in rows if words[3] == "0A" and f"socket:[{words[9]}]" in own]
try:
    socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 5).close()
    store = "a store"
except ConnectionRefusedError:
    store = "no store"
dist.barrier()
dist.destroy_process_group()
dist.init_process_group(sys.argv[1])  # again: nothing of the first one disturbs it
dist.all_reduce(tensor)
dist.destroy_process_group()
everywhere = [address for address in found if set(address.partition(":")[0]) == {"0"}]
print(tensor.tolist(), objects, store, everywhere)
"""


@pytest.mark.parametrize("backend", ["hora", "gloo"])
def test_under_our_launcher_torchs_store_is_at_the_authenticated_rendezvous(tmp_path, backend):
    script = tmp_path / "train.py"
    script.write_text(GROUPS)
    status, out, err = run_command("hora", "run", "-np", "2", "python", str(script), backend)
    assert status == 0, err
    for rank in range(2):
        assert lines_of(out, rank) == ["[4.0, 4.0, 4.0] [0, 1] no store []"]


STORES = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIMIT = timedelta(seconds=60)


def check(rank, size, **where):
    dist.init_process_group("hora", rank=rank, world_size=size, timeout=LIMIT, **where)
    tensor = torch.full((3,), rank + 1.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size * (size + 1) / 2] * 3, tensor
    dist.destroy_process_group()


def work(rank, folder, ports):
    check(rank, 2, init_method=f"file://{folder}/url")
    check(rank, 2, init_method=f"tcp://127.0.0.1:{ports[0]}")
    check(rank, 2, store=dist.FileStore(f"{folder}/store", 2))
    store = dist.TCPStore("127.0.0.1", ports[1], 2, is_master=rank == 0, timeout=LIMIT)
    check(rank, 2, store=store)
    check(rank, 2, store=dist.PrefixStore("again", store))  # the same store, another group


if __name__ == "__main__":
    check(0, 1, store=dist.HashStore())  # it is memory of one process
    mp.spawn(work, (sys.argv[1], [int(port) for port in sys.argv[2:]]), nprocs=2)
    print("all stores")
"""


def test_ranks_that_torch_multiprocessing_spawns_meet_at_every_store(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(STORES)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [str(each.getsockname()[1]) for each in (one, other)]
    command = [sys.executable, str(script), str(tmp_path), *ports]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "all stores\n"), done.stderr


RESTARTED = """
import os, signal, sys
import torch
import torch.distributed as dist

attempt, path = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), sys.argv[1]
dist.init_process_group("hora")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
state = torch.load(path) if os.path.exists(path) else {"steps": 0, "sum": torch.zeros(1)}
while state["steps"] < 6:
    model(torch.ones(3, 4)).sum().backward()
    if (attempt, rank, state["steps"]) == (0, 1, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    if (attempt, rank, state["steps"]) == (1, 0, 4):
        raise ValueError("the second attempt fails, too")
    part = torch.full((1,), rank + 1.0)
    dist.all_reduce(part)
    state = {"steps": state["steps"] + 1, "sum": state["sum"] + part}
    if rank == 0:
        torch.save(state, path + ".new")
        os.replace(path + ".new", path)
    dist.barrier()
print(f"attempt {attempt}: {state['steps']} steps, sum {state['sum'].item():g}", flush=True)
dist.destroy_process_group()
"""


def test_torchrun_restarts_a_job_whose_ranks_die(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(RESTARTED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    command = [*torchrun, str(script), str(tmp_path / "state")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["attempt 2: 6 steps, sum 18"] * 2


SPAWNS = r"""
import os, socket
import torch.distributed as dist
import torch.multiprocessing as mp


def child(number, port):
    os.environ.update(RANK=str(number), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    os.write(1, f"{dist.get_rank()} of {dist.get_world_size()}\n".encode())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    mp.start_processes(child, (port,), nprocs=2, start_method="fork")
"""


def test_a_group_of_processes_that_a_rank_starts_is_its_own(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SPAWNS)
    status, out, err = run_command("hora", "run", "-np", "2", "python", str(script))
    assert status == 0, err
    for rank in range(2):
        assert sorted(lines_of(out, rank)) == ["0 of 2", "1 of 2"]


LOSES_A_RANK = """
import os, signal, sys
from datetime import timedelta
import torch
import torch.distributed as dist

for attempt in range(3):
    dist.init_process_group("hora", timeout=timedelta(seconds=60))
    size = dist.get_world_size()
    try:
        for step in range(3):
            tensor = torch.ones(2)
            dist.all_reduce(tensor)
            if size == 3 and dist.get_rank() == 1 and step == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        print(f"attempt {attempt}: {tensor.tolist()} of {size} ranks", flush=True)
        break
    except RuntimeError as error:
        print("failed:", "rank 1" in str(error), flush=True)
    finally:
        dist.destroy_process_group()
"""


def test_a_program_starts_its_group_again_after_a_death(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(LOSES_A_RANK)
    command = ("hora", "run", "-np", "3", "--min-np", "2", "--max-np", "3", "python", str(script))
    status, out, err = run_command(*command)
    assert status == 0, err
    assert out.count("failed: True") == 2
    assert out.count("attempt 1: [2.0, 2.0] of 2 ranks") == 2
