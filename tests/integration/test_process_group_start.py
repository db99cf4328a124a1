"""How a program of its own starts a process group: what torch loads, and where the ranks meet."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
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
