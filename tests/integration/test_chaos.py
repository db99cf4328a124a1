"""Short version of `make chaos`."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from unittest import mock

import pytest
from chaos import Chaos, chaos_on_hosts

pytestmark = pytest.mark.slow


def test_chaos_of_a_few_faults(tmp_path: Path):
    Chaos(tmp_path, seed=1).run(4)


@pytest.mark.parametrize("name", ["restore forgets the model", "sync forgets the model"])
def test_chaos_notices_mutants(tmp_path: Path, name: str):
    """Training that commits now and then goes back several steps."""
    chaos = Chaos(tmp_path, seed=1, more={"mutant": name})
    try:
        with pytest.raises(AssertionError):
            chaos.run(4)
    finally:
        chaos.job.kill()


def test_500_steps_with_20_deaths_are_bit_identical_to_500_steps_without(tmp_path: Path):
    with mock.patch("chaos.FAULTS", [signal.SIGKILL]):
        Chaos(tmp_path, seed=2, per_step=True).run(20, min_steps=500)


@pytest.mark.netns
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("nsenter"), reason="needs root and nsenter")
def test_chaos_on_three_hosts(tmp_path: Path):
    with chaos_on_hosts(tmp_path, seed=3, per_step=True) as chaos:
        chaos.run(6)


@pytest.mark.netns
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("nsenter"), reason="needs root and nsenter")
def test_chaos_on_three_hosts_whose_launcher_is_started_again(tmp_path: Path):
    with chaos_on_hosts(tmp_path, seed=1, restarts=True, per_step=True) as chaos:
        chaos.run(12)


@pytest.mark.netns
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("nsenter"), reason="needs root and nsenter")
@pytest.mark.skipif(not shutil.which("etcd") or not shutil.which("etcdctl"), reason="needs etcd-server and etcd-client")
def test_chaos_on_three_hosts_that_may_all_lead(tmp_path: Path):
    with chaos_on_hosts(tmp_path, seed=1, store=True, per_step=True) as chaos:
        chaos.run(8)
