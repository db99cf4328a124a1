"""After hvd.init() freed memory stays with the process, unless the user has chosen otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hora.config import EngineConfig

SCRIPT = """
import os
import numpy

import horovod.torch as hvd


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


hvd.init()
before = resident_bytes()
numpy.ones(10_000_000, dtype=numpy.float32)  # from glibc, as torch's tensors are except on ARM
print(resident_bytes() - before)
"""
NUM_BYTES = 40_000_000


def num_bytes_kept(**variables: str) -> int:
    unset = ("MALLOC_", "GLIBC_TUNABLES")
    env = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env | variables, capture_output=True, text=True, timeout=120, check=True
    )
    return int(done.stdout)


def test_freed_memory_stays() -> None:
    assert num_bytes_kept() > 0.9 * NUM_BYTES


def test_the_user_can_turn_it_off() -> None:
    assert num_bytes_kept(HORA_KEEP_FREED_MEMORY="0") < 0.1 * NUM_BYTES


@pytest.mark.parametrize(
    ("variables", "keeps"),
    [
        ({}, True),
        ({"GLIBC_TUNABLES": "glibc.cpu.x86_shstk=off"}, True),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}, False),
        ({"MALLOC_MMAP_THRESHOLD_": "131072"}, False),
        ({"MALLOC_MMAP_THRESHOLD_": "131072", "HORA_KEEP_FREED_MEMORY": "1"}, True),
    ],
)
def test_settings_of_the_users_own_are_left_alone(variables: dict[str, str], keeps: bool) -> None:
    assert EngineConfig.from_env(variables).keep_freed_memory is keeps
