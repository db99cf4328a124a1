"""Programs whose ranks part in silence, as users write and start them: rank 0 says which rank, since when, and what."""

from __future__ import annotations

import textwrap

import pytest
from job_process import run_command

NO_BROADCAST = """
    import torch
    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for _ in range(30):
        optimizer.zero_grad()
        inputs = torch.randn(16, 8)
        torch.nn.functional.cross_entropy(model(inputs), (inputs.sum(1) > 0).long()).backward()
        optimizer.step()
    print("end of rank", hvd.rank())
"""

# Batch statistics differ between the ranks, so their validation losses do, and with them the learning rates.
PLATEAU = """
    import torch
    from torch import nn
    import horovod.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = torch.randn(600, 10)
    labels = ((inputs.sum(1) + 2 * torch.randn(600)) > 0).long()
    model = nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
    parted_for = 0
    while parted_for < 20:
        model.train()
        for batch in torch.arange(400).chunk(20)[hvd.rank() :: hvd.size()]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            scheduler.step(nn.functional.cross_entropy(model(inputs[400:]), labels[400:]).item())
        parted_for += len(set(hvd.allgather_object(optimizer.param_groups[0]["lr"]))) > 1 or parted_for > 0
        if optimizer.param_groups[0]["lr"] < 1e-7:
            scheduler.best = float("inf")
            optimizer.param_groups[0]["lr"] = 0.05
    print("end of rank", hvd.rank())
"""

DATA_PARALLEL = """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("hora")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (1 + dist.get_rank()))
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    print("end of rank", dist.get_rank())
    dist.destroy_process_group()
"""

PROGRAMS = {
    "broadcast": (NO_BROADCAST, "on rank 1", "hvd.broadcast_parameters"),
    "plateau": (PLATEAU, "learning rate", "average it first: hvd.allreduce(loss)"),
    "data parallel": (DATA_PARALLEL, "learning rate 0.05 on rank 1, 0.1 on rank 0", "since step 1"),
}


def run(tmp_path, program, **env):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(program))
    return run_command("hora", "run", "-np", "2", "python", str(script), cwd=tmp_path, env=env)


@pytest.mark.parametrize("name", PROGRAMS)
def test_rank_0_warns_once_and_the_training_goes_on(tmp_path, name):
    program, *words = PROGRAMS[name]
    code, stdout, stderr = run(tmp_path, program)
    assert code == 0, stderr
    assert stdout.count("end of rank") == 2
    (warning,) = [line for line in stderr.splitlines() if "drifted apart" in line]
    assert warning.startswith("[0]")
    assert all(word in warning for word in words), warning


@pytest.mark.parametrize("name", ["broadcast", "data parallel"])
def test_strict_ends_the_job_with_the_error(tmp_path, name):
    program, *words = PROGRAMS[name]
    code, stdout, stderr = run(tmp_path, program, HORA_STRICT="1")
    assert code != 0
    assert "end of rank" not in stdout
    assert "DriftError: the ranks have drifted apart" in stderr
    assert all(word in stderr for word in words), stderr


def test_ranks_that_leave_the_loop_in_different_epochs_are_named(tmp_path):
    program = NO_BROADCAST.replace("range(30)", "range(20 + 10 * hvd.rank())")
    code, stdout, stderr = run(tmp_path, program)
    assert code != 0
    assert "end of rank 0" in stdout
    assert "shut down by rank 0, which has made 20 steps; rank 1 reduces gradients of step 21" in stderr
    assert "while rank 1 still needed it: did it leave early?" in stderr
