"""Real jobs end with a verdict that names the slow rank, and not the one that only waits for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from job_process import run_command

from hora.watch.compare import load_verdict

PROGRAM = """
import time

import torch

import horovod.torch as hvd


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 900

    def __getitem__(self, index):
        if hvd.rank() == 1 and index % 2 == 0:
            time.sleep(0.02)  # a slow disk
        return torch.ones(4)


hvd.init()
if hvd.rank() == 1:
    time.sleep(1.0)  # a late start
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for step, batch in enumerate(torch.utils.data.DataLoader(Rows(), batch_size=2)):
    optimizer.zero_grad()
    outputs = model(batch)
    # A collective in forward and in backward: here rank 0 waits for the data of rank 1.
    loss = hvd.allreduce(outputs, name="outputs").pow(2).mean()
    loss.backward()
    optimizer.step()
    if step % 50 == 49 and hvd.rank() == 0:
        torch.save(model.state_dict(), "model.pt")
"""


DDP = """
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("hora")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 4))
if dist.get_rank() == 1:
    model[2].register_full_backward_hook(lambda *_: time.sleep(0.03))  # a heavy one
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(200):
    optimizer.zero_grad()
    model(torch.ones(8, 64, requires_grad=True)).pow(2).mean().backward()
    time.sleep(0.002)  # clipping, logging
    optimizer.step()
"""

FSDP2 = """
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("hora")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 4))
fully_shard(model[0])
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(200):
    optimizer.zero_grad()
    loss = model(torch.ones(8, 64)).pow(2).mean()
    if dist.get_rank() == 1:
        time.sleep(0.03)
    loss.backward()
    optimizer.step()
"""


def _train(folder: Path, *flags: str, program: str = PROGRAM) -> tuple[str, dict]:
    (folder / "train.py").write_text(program)
    command = [sys.executable, "-m", "hora", "run", "-np", "2", *flags, sys.executable, "train.py"]
    code, _, errors = run_command(*command, cwd=folder, env={"OMP_NUM_THREADS": "1"})
    assert code == 0, errors
    return errors, json.loads((folder / "verdict.json").read_text())


def test_the_rank_with_slow_data_is_blamed_and_the_one_that_waits_for_it_is_not(tmp_path):
    errors, verdict = _train(tmp_path, "--verdict", "--record", str(tmp_path / "run.hora"))
    assert "hora: train.py: done after" in errors
    assert "slow: rank 1 on" in errors
    assert [one["rank"] for one in verdict["slow"]] == [1]
    assert verdict["slow"][0]["part"] == "data"
    assert "data loader of rank 1" in verdict["advice"]
    phases = {name: spread["mean"] for name, spread in verdict["phases"].items()}
    others_wait = phases["wait"] + phases["reduce"]
    assert others_wait > phases["forward"] + phases["backward"] + phases["between"]
    assert phases["checkpoint"] > 0
    assert load_verdict(tmp_path / "run.hora").phases == load_verdict(tmp_path / "verdict.json").phases


def test_a_ddp_training_has_phases_and_its_slow_rank_is_blamed(tmp_path):
    _, verdict = _train(tmp_path, "--verdict", program=DDP)
    assert verdict["num_steps"] == 200
    assert [one["rank"] for one in verdict["slow"]] == [1]
    phases = {name: spread["median"] for name, spread in verdict["phases"].items()}
    assert all(phases[name] > 0 for name in ("forward", "optimizer"))
    assert phases["backward"] > 14  # what the script sleeps there, averaged over the ranks
    assert phases["between"] > 1.9
    assert phases["wait"] + phases["reduce"] > phases["optimizer"]  # of rank 0, for rank 1's backward


def test_the_slow_rank_of_an_fsdp2_training_is_blamed(tmp_path):
    _, verdict = _train(tmp_path, "--verdict", program=FSDP2)
    assert verdict["num_steps"] == 200
    assert [(one["rank"], one["part"]) for one in verdict["slow"]] == [(1, "forward")]
    phases = {name: spread["median"] for name, spread in verdict["phases"].items()}
    assert phases["wait"] > phases["reduce"]  # rank 0 waits for rank 1, which is no reduction


def test_a_job_that_nobody_watches_has_no_verdict(tmp_path):
    (tmp_path / "train.py").write_text("import horovod.torch as hvd; hvd.init()")
    command = [sys.executable, "-m", "hora", "run", "-np", "1", sys.executable, "train.py"]
    code, _, errors = run_command(*command, cwd=tmp_path)
    assert code == 0, errors
    assert "done after" not in errors
    assert not (tmp_path / "verdict.json").exists()


def test_the_demo_of_faults_ends_with_its_verdict(tmp_path):
    command = [sys.executable, "-m", "hora", "demo", "faults", "-np", "2", "--no-browser", "--steps", "100"]
    code, _, errors = run_command(*command, cwd=tmp_path)
    assert code == 0, errors
    assert "hora: hora demo faults: done after" in errors
    assert json.loads((tmp_path / "verdict.json").read_text())["num_steps"] == 100
