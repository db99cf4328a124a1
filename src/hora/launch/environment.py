"""Environment variables of this process and of others on this machine.

Only this module reads and changes the environment of this process, for `hora.launch` and the packages above it; callers
interpret the variables. Agents import it at their start, so it imports little.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping


def variables() -> dict[str, str]:
    """Return a copy of the current environment."""
    return dict(os.environ)


def first_variables(pid: int | str = "self") -> dict[str, str]:
    """Return the environment with which a process, or the one it was forked from, was started; {} if it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        pairs = (entry.partition(b"=") for entry in file.read().split(b"\0"))
        return {os.fsdecode(name): os.fsdecode(value) for name, mark, value in pairs if mark}
    return {}


def replace_variables(env: Mapping[str, str]) -> None:
    """Replace the environment, as a forked worker does instead of exec."""
    os.environ.clear()
    os.environ.update(env)


def set_variables(env: Mapping[str, str]) -> None:
    """Add these variables."""
    os.environ.update(env)


def put_first_on_path(*folders: str) -> None:
    """Put these folders first on PATH, for this process and its children."""
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join([*folders, *(entry for entry in path if entry not in folders)])


def allocator_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a new process with this environment keeps freed memory.

    From 2.10 on torch for 64-bit ARM allocates with mimalloc, which returns freed pages to the kernel after 10 ms and
    reads its settings only when torch is loaded.
    """
    if platform.machine() != "aarch64" or env.get("HORA_KEEP_FREED_MEMORY") == "0" or "MIMALLOC_PURGE_DELAY" in env:
        return {}
    return {"MIMALLOC_PURGE_DELAY": "-1"}
