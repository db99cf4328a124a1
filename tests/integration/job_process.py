"""A launcher in a process of its own, and what it leaves behind: for tests that kill things.

Every process of a job inherits a token in its environment, so that whatever is left of it can be found
however it was started, orphaned or renamed.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

LIMIT_S = 60.0
HOROVODRUN = [sys.executable, "-m", "horovod.runner.launch"]


def wait_until(what: str, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Poll for something that other processes bring about."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting until {what}"
        time.sleep(0.02)


class JobProcess:
    """A launcher's process, started with its own temporary directory."""

    def __init__(self, argv: list[str], work: Path, **environment: str) -> None:
        self.token = f"HORA_TEST_TOKEN={secrets.token_hex(8)}".encode()
        self.temporary = work / "tmp"
        self.temporary.mkdir()
        self.log = work / "log"
        name, value = self.token.decode().split("=")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=work,
                env=os.environ | environment | {name: value, "TMPDIR": str(self.temporary)},
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, limit_s: float = LIMIT_S) -> int:
        return self.process.wait(limit_s)

    def wait_for_text(self, text: str) -> None:
        def arrived() -> bool:
            return text in self.text() or self.process.poll() is not None

        wait_until(f"{text!r} is printed", arrived)
        assert text in self.text(), self.text()

    def processes(self) -> list[psutil.Process]:
        """Every living process of the job, wherever it has gone."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if self.token in (entry / "environ").read_bytes():
                        found.append(psutil.Process(int(entry.name)))
                except (OSError, psutil.NoSuchProcess):
                    continue
        return found

    def supervisors(self) -> list[psutil.Process]:
        """Guardian and supervisor, in this order."""
        found = [p for p in self.processes() if any("hora.launch.supervisor" in part for part in p.cmdline())]
        return sorted(found, key=lambda p: p.pid)

    def assert_nothing_left(self, limit_s: float = 20.0) -> None:
        """No process, no temporary file. A port or a memfd segment cannot outlive its processes."""
        wait_until("every process of the job is gone", lambda: not self.processes(), limit_s)
        assert list(self.temporary.iterdir()) == []
