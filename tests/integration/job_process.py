"""Launchers in separate processes, and checks for leftovers: for tests that run commands and kill processes.

Every process of a job inherits a token in its environment, so a test finds all remaining processes, even orphaned
or renamed ones.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from waiting import wait_until

LIMIT_S = 240.0
BIN = Path(sys.executable).parent
HOROVODRUN = [sys.executable, "-m", "horovod.runner.launch"]


def wait_until_gone(*pids: int) -> None:
    """Wait until none of these processes runs any more."""
    for pid in pids:
        wait_until(f"process {pid} is gone", lambda pid=pid: not _runs(pid))


def _runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


_started: set[_MarkedProcess] = set()


class _MarkedProcess:
    """A process whose descendants are identified by a token in their environment."""

    def __init__(self, argv: list[str], environment: Mapping[str, str], **rest: Any) -> None:
        self.token = f"HORA_TEST_TOKEN={secrets.token_hex(8)}".encode()
        name, value = self.token.decode().split("=")
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, env={**environment, name: value}, **rest)
        _started.add(self)

    def processes(self) -> list[psutil.Process]:
        """Return every living process of the job, including daemons."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if self.token in (entry / "environ").read_bytes():
                        found.append(psutil.Process(int(entry.name)))
                except (OSError, psutil.NoSuchProcess):
                    continue
        return found

    def kill(self) -> None:
        """Kill the remaining processes of the job."""
        _started.discard(self)
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(LIMIT_S)

    def wait_for_the_last(self, limit_s: float) -> None:
        try:
            wait_until("every process of the job is gone", lambda: not self.processes(), limit_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; left: {self.processes()}") from None


def kill_what_is_left() -> None:
    """Kill the jobs of a failed test, so that they do not disturb the following tests."""
    for job in list(_started):
        job.kill()


class JobProcess(_MarkedProcess):
    """A launcher with its own temporary directory, whose output can be read while it runs."""

    def __init__(self, argv: list[str], work: Path, **environment: str) -> None:
        self.temporary = work / "tmp"
        self.temporary.mkdir()
        self.log = work / "log"
        with self.log.open("wb") as log:
            own = {"TMPDIR": str(self.temporary)}
            super().__init__(argv, os.environ | environment | own, stdout=log, stderr=subprocess.STDOUT, cwd=work)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, limit_s: float = LIMIT_S) -> int:
        return self.process.wait(limit_s)

    def wait_for_text(self, text: str, limit_s: float = LIMIT_S) -> None:
        def arrived() -> bool:
            return text in self.text() or self.process.poll() is not None

        wait_until(f"{text!r} is printed", arrived, limit_s)
        assert text in self.text(), self.text()

    def agents(self) -> list[psutil.Process]:
        """Return the guardian and the agent, in this order."""
        found = [p for p in self.processes() if any("hora.launch.agent.agent" in part for part in p.cmdline())]
        return sorted(found, key=lambda p: p.pid)

    def assert_nothing_left(self, limit_s: float = 60.0) -> None:
        """Check for leftover processes and temporary files. Ports and memfd segments end with their processes."""
        self.wait_for_the_last(limit_s)
        assert list(self.temporary.iterdir()) == []


class CommandProcess(_MarkedProcess):
    """`hora` or `horovodrun` as typed by a user, with stdout and stderr captured."""

    def __init__(
        self,
        *argv: str,
        cwd: Path | str | None = None,
        env: Mapping[str, str | None] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> None:
        full: dict[str, str | None] = {**os.environ, **(env or {})}
        full["PATH"] = f"{BIN}{os.pathsep}{full['PATH']}"
        super().__init__(
            [*prefix, str(BIN / argv[0]), *argv[1:]],
            {name: value for name, value in full.items() if value is not None},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def finish(self, limit_s: float = 2 * LIMIT_S) -> tuple[int, str, str]:
        """Return exit status, stdout and stderr, after checking that no process is left."""
        out, err = self.process.communicate(timeout=limit_s)
        self.wait_for_the_last(LIMIT_S)
        return self.process.returncode, out, err

    def __enter__(self) -> CommandProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.process.communicate(timeout=LIMIT_S)


def run_command(*argv: str, **rest: Any) -> tuple[int, str, str]:
    """Run a command; return its exit status, stdout and stderr. No process of it may be left."""
    with CommandProcess(*argv, **rest) as command:
        return command.finish()


def lines_of(output: str, rank: int) -> list[str]:
    """Return the lines that one rank printed on stdout."""
    prefix = f"[{rank}]<stdout>:"
    return [line[len(prefix) :] for line in output.splitlines() if line.startswith(prefix)]


@contextmanager
def running(*argv: str, ready: Path, count: int, **rest: Any) -> Iterator[CommandProcess]:
    """Start a job and wait until `count` ranks have created a file in the folder `ready`."""
    with CommandProcess(*argv, **rest) as job:
        wait_until(
            f"{count} ranks have started",
            lambda: len(list(ready.iterdir())) >= count or job.process.poll() is not None,
        )
        assert job.process.poll() is None, job.process.communicate()
        yield job
