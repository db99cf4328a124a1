"""Runs `run_gpu_checks.py`, which needs a CUDA device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_everything_that_needs_a_gpu():
    script = Path(__file__).with_name("run_gpu_checks.py")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=850)
    assert run.returncode == 0, run.stdout + run.stderr
