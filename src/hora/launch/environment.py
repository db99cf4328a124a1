"""The environment of this process, for `hora.launch` and the packages above it: only this module reads and changes it.
Also the argv that runs one of our modules in a new process.

Callers interpret the variables. Agents and probes must start fast and import this, so it imports nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def variables() -> dict[str, str]:
    """Return a copy of the current environment."""
    return dict(os.environ)


def first_variables() -> dict[str, str]:
    """Return the environment with which this process, or the one it was forked from, was started."""
    with open("/proc/self/environ", "rb") as file:
        pairs = (entry.partition(b"=") for entry in file.read().split(b"\0"))
        return {os.fsdecode(name): os.fsdecode(value) for name, mark, value in pairs if mark}


def replace_variables(env: Mapping[str, str]) -> None:
    """Replace the environment, as a forked worker does instead of exec."""
    os.environ.clear()
    os.environ.update(env)


def set_variables(env: Mapping[str, str]) -> None:
    """Add these variables."""
    os.environ.update(env)


def set_missing(env: Mapping[str, str]) -> None:
    """Add those of these variables that are not set."""
    for name, value in env.items():
        os.environ.setdefault(name, value)


def put_first_on_path(*folders: str) -> None:
    """Put these folders first on PATH, for this process and its children."""
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join([*folders, *(entry for entry in path if entry not in folders)])


# As `python -m`, which however looks for modules in the current directory first: in a folder that others can write to
# (/tmp, a shared project) a planted file would run as the user. `-P` says the same from Python 3.11 on.
_RUN_MODULE = (
    "import sys; sys.path[:] = [entry for entry in sys.path if entry]; del sys.argv[0]; import runpy; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def module_command(executable: str, module: str, *args: str) -> tuple[str, ...]:
    """Return the argv of a Python that runs this module and imports nothing from the current directory."""
    return (executable, "-c", _RUN_MODULE, module, *args)
