"""Shared memory does not depend on the size or presence of /dev/shm, and no file is left in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare for a /dev/shm of its own"
)

TRAIN = """
import os, signal, sys, torch
import horovod.torch as hvd
hvd.init()
big = torch.full((30_000_000,), float(hvd.rank() + 1))
hvd.allreduce_(big, op=hvd.Sum, name="big")
assert float(big[0]) == float(big[-1]) == 3.0
model = torch.nn.Linear(2000, 2000)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
model(torch.ones(2, 2000)).sum().backward()
optimizer.step()
print("in /dev/shm:", sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else "missing")
if len(sys.argv) > 1 and hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
hvd.barrier()
"""


def run(tmp_path: Path, *arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    command = [sys.executable, "-m", "hora", "run", "-np", "2", sys.executable, str(script), *arguments]
    if before:
        command = ["unshare", "--mount", "sh", "-c", f'{before} && exec "$@"', "sh", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def mine() -> set[str]:
    return {entry.name for entry in os.scandir("/dev/shm") if "hora" in entry.name}


@needs_namespaces
@pytest.mark.parametrize(
    "before",
    [
        pytest.param("mount -t tmpfs -o size=64m tmpfs /dev/shm", marks=pytest.mark.slow),
        pytest.param("mount -t tmpfs -o ro,size=4k tmpfs /dev/shm", marks=pytest.mark.slow),
        "umount -l /dev/shm",
    ],
    ids=["64 MB", "read-only", "missing"],
)
def test_a_large_reduction_with_little_or_no_dev_shm(tmp_path, before):
    done = run(tmp_path, before=before)
    assert done.returncode == 0, done.stderr
    assert "in /dev/shm: []" in done.stdout


@pytest.mark.parametrize(
    "arguments", [pytest.param((), id="in peace", marks=pytest.mark.slow), pytest.param(("die",), id="by SIGKILL")]
)
def test_nothing_is_left(tmp_path, arguments):
    before = mine()
    done = run(tmp_path, *arguments)
    assert (done.returncode == 0) == (not arguments), done.stderr
    assert mine() <= before
