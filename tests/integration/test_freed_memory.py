"""After hvd.init() the process keeps freed memory, unless the user disables that."""

from __future__ import annotations

import os
import subprocess
import sys

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
        [sys.executable, "-c", SCRIPT], env=env | variables, capture_output=True, text=True, timeout=280, check=True
    )
    return int(done.stdout)


def test_freed_memory_stays() -> None:
    assert num_bytes_kept() > 0.9 * NUM_BYTES


def test_the_user_can_turn_it_off() -> None:
    assert num_bytes_kept(HORA_KEEP_FREED_MEMORY="0") < 0.1 * NUM_BYTES
