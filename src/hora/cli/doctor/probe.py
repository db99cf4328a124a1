"""Facts about one host, without judgement. Runs as `python -m hora.cli.doctor.probe` on the host, by ssh or locally.

It prints one JSON line of facts, including a port on which it listens. Then it reads one JSON line, a list of
`[address, port]`, and prints a second one with the results of connecting to them (null, or the error). At the top it
imports only the standard library and the modules for environment and memory: a broken torch must be a fact, not a
crash.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import mmap
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from hora.launch.processes import variables
from hora.memory import available_bytes
from hora.net import sockets
from hora.net.acceptor import Acceptor

MARK = "== hora doctor =="  # a login shell may print something first
_CONNECT_LIMIT_S = 5.0
_TOOL_LIMIT_S = 30.0


def facts() -> dict[str, Any]:
    """Return everything about this host that a finding may need."""
    from hora.legacy.check_build import probe_build
    from hora.version import foreign_conflict

    return {
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "free_threaded": not getattr(sys, "_is_gil_enabled", lambda: True)(),
        "executable": sys.executable,
        **{name: _tried(importlib.metadata.version, name) for name in ("hora", "torch", "pyspark", "mpi4py")},
        "foreign_horovod": foreign_conflict(),
        "cores": len(os.sched_getaffinity(0)),
        "memfd": _memfd_problem(),
        "memory_bytes": _tried(available_bytes),
        "shm_bytes": _tried(_free_bytes, "/dev/shm"),
        "tmp_bytes": _tried(_free_bytes, "/tmp"),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "gpus": _gpus(),
        "java": _java(),
        "build": probe_build(),
    }


def _tried(look: Callable[..., Any], *arguments: str) -> Any:
    """Return what can be found out; None if it is missing."""
    try:
        return look(*arguments)
    except (OSError, importlib.metadata.PackageNotFoundError):
        return None


def _memfd_problem() -> str | None:
    """Return None if shared memory works: allocate some, map it, write and read it."""
    try:
        descriptor = os.memfd_create("hora-doctor", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, 1 << 20)
            with mmap.mmap(descriptor, 1 << 20) as memory:
                memory[:4] = b"hora"
                return None if memory[:4] == b"hora" else "what was written did not come back"
        finally:
            os.close(descriptor)
    except (OSError, AttributeError) as error:
        return str(error)


def _free_bytes(path: str) -> int:
    return shutil.disk_usage(path).free


def _tool(argv: list[str]) -> str | None:
    """Return the output of a program; None if it is missing or fails."""
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=_TOOL_LIMIT_S, text=True, errors="replace", check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _gpus() -> list[str]:
    listed = _tool(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"])
    return listed.splitlines() if listed else []


def _java() -> str | None:
    home = variables().get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else "java"
    text = _tool([java, "-version"])
    return text.splitlines()[0] if text else None


async def _serve(listener: socket.socket) -> None:
    """Accept connections and close them: peers only check that this host can be reached."""
    acceptor: Acceptor[None] = Acceptor(asyncio.get_running_loop(), turn_away=lambda stranger, why: None)
    acceptor.watch(listener, lambda arrival: arrival.sock.close())
    await asyncio.Event().wait()


def _reach(address: str, port: int) -> str | None:
    try:
        socket.create_connection((address, port), timeout=_CONNECT_LIMIT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def main() -> None:
    with sockets.listen((sys.argv[1], 0)) as listener:
        threading.Thread(target=asyncio.run, args=(_serve(listener),), name="hora-doctor-accept", daemon=True).start()
        known = facts() | {"port": listener.getsockname()[1]}
        print(MARK + json.dumps(known | {"clock_s": time.time()}), flush=True)
        line = sys.stdin.readline()
        if line:
            answers = [_reach(address, port) for address, port in json.loads(line)]
            print(MARK + json.dumps(answers), flush=True)
            sys.stdin.readline()  # wait until all hosts have tried: the doctor then closes the pipe


if __name__ == "__main__":
    main()
