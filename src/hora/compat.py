"""Compatibility with old worker modules and session variables, on platforms that do not provide them.

    python -m hora.compat script.py [args]     runs a script that imports `cdsw` or `cml.workers_v1`
    hora.compat.install()                      makes the names importable in this process

`cdsw` and `cml` exist on Cloudera machines, so they are not shipped as packages, and a real one is never replaced.
Commands that the script runs find this Python first, and a substitute for `mpirun` (`hora mpirun`) if there is none.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
import sys
import types
from pathlib import Path

from hora import workers
from hora.launch.environment import put_first_on_path, set_variables, variables
from hora.workers.backend import new_id, session_variables
from hora.workers.gateway import new_name

_FUNCTIONS = ("launch_workers", "await_workers", "list_workers", "stop_workers")


def install() -> list[str]:
    """Make `cdsw`, `cml.workers_v1` and `cml.utils_v1` importable and set a session's variables; return new names."""
    installed = []
    for name in ("cdsw", "cml", "cml.workers_v1", "cml.utils_v1"):
        if name in sys.modules or _exists(name):
            continue
        sys.modules[name] = _module(name)
        installed.append(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
    session = session_variables("127.0.0.1", 8080, variables().get("USER", "user"), *new_name())
    set_variables({"CDSW_ENGINE_ID": new_id(), "CDSW_MASTER_ID": ""} | session | variables())  # a worker has them
    return installed


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # its parent is one of ours, or has no path
        return False


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name, f"Hora's stand-in for {name}: worker functions over local processes.")
    if name == "cml":
        module.__path__ = []
    elif name == "cml.utils_v1":
        module._emulate_cdsw = lambda: sys.modules["cdsw"]  # type: ignore[attr-defined]
    else:
        for function in _FUNCTIONS:
            setattr(module, function, getattr(workers, function))
    return module


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print("usage: python -m hora.compat script.py [arguments of the script]", file=sys.stderr)
        raise SystemExit(2)
    install()
    # The PATH of a session's image: `python3` and `horovodrun` of this installation, and an `mpirun`.
    put_first_on_path(os.path.dirname(sys.executable))
    if shutil.which("mpirun") is None:
        put_first_on_path(str(Path(__file__).with_name("bin")))
        set_variables({"HORA_PYTHON": sys.executable, "HORA_COMPAT_PID": str(os.getpid())} | variables())
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
