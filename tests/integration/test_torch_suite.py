"""A quick selection of torch's own tests of a distributed backend; `make test-torch-distributed` runs all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("torch_suite.py")
SELECTION = (
    "not profiler and (test_all_reduce_sum or test_all_gather_into_cat_tensor_cpu or "
    "test_all_to_all_single_unequal_split or "
    "test_reduce_scatter_v_cpu or test_send_recv_any_source or test_isend or test_monitored_barrier_gloo_subgroup or "
    "test_gather_object or test_ddp_grad_div_uneven_inputs)"
)


def test_torchs_own_tests_pass():
    pytest.importorskip("expecttest")
    environment = {**os.environ, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", SELECTION, str(SUITE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout or "." in done.stdout, done.stdout
