"""Effects of an import in a fresh interpreter, and effects that it must not have."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["hora", "hora.cli", "hora.world", "hora.launch", "horovod", "sparkdl"])
def test_import_needs_neither_torch_nor_pyspark(module):
    code = (
        f"import {module}, sys; print(sorted(m for m in ('torch', 'pyspark', 'numpy', 'pandas') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_a_rank_of_an_estimator_does_not_import_spark():
    """Importing Spark takes as long as importing torch."""
    code = (
        "import hora.spark.estimator.training, hora.spark.lightning.training, sys; "
        "print(sorted(m for m in ('pyspark', 'pandas', 'lightning') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.stdout.strip() == "[]", done.stderr


def test_importing_the_front_loads_its_submodules():
    """Old code uses `hvd.mpi_ops.x` and `hvd.compression.x` after only `import horovod.torch as hvd`."""
    code = (
        "import horovod.torch as hvd; hvd.compression.Compressor, hvd.functions.broadcast_object, "
        "hvd.optimizer.DistributedOptimizer, hvd.sync_batch_norm.SyncBatchNorm, hvd.elastic.state.TorchState; "
        "assert hvd.mpi_ops._basics.Average == hvd.Average and not hvd.mpi_ops._basics.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stderr) == (0, "")


def test_import_has_no_side_effects():
    """No thread, no output, no change of the environment, no warning."""
    code = (
        "import os, threading; before = dict(os.environ); import horovod.torch as hvd; "
        "assert threading.active_count() == 1 and dict(os.environ) == before and not hvd.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
