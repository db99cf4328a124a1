"""What this machine has: cores and memory this process may use, and its GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

from hora.memory import total_bytes
from hora.workers.capacity import Capacity

__all__ = ["measure"]


def measure(environ: Mapping[str, str]) -> Capacity:
    """The capacity of this machine, inside the limits of its container."""
    return Capacity(cores=tuple(sorted(os.sched_getaffinity(0))), memory_gib=total_bytes() / 2**30, gpus=_gpus(environ))


def _gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(item.strip() for item in visible.split(",") if item.strip() and item.strip() != "-1")
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        found = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    lines = [line for line in found.stdout.splitlines() if line.startswith("GPU ")]
    return tuple(str(number) for number in range(len(lines)))
