"""Running `hora` and `horovodrun` as a user does, with a mark in the environment that leftovers show."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
_MARK = "HORA_TEST_MARK"
_LIMIT_S = 120.0


def wait_until(happened: Callable[[], object], what: str, limit_s: float = 60.0) -> None:
    """Poll, with a limit: other processes' ends have no event of their own."""
    limit = time.monotonic() + limit_s
    while not happened():
        if time.monotonic() > limit:
            raise TimeoutError(f"{what} did not happen within {limit_s:.0f} s")
        time.sleep(0.05)


class CommandProcess:
    """A launcher under test. `leftovers()` are the processes, however far removed, that have its mark."""

    def __init__(
        self,
        *argv: str,
        cwd: Path | str | None = None,
        env: Mapping[str, str | None] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> None:
        self.mark = uuid.uuid4().hex
        full: dict[str, str | None] = {**os.environ, **(env or {}), _MARK: self.mark}
        full["PATH"] = f"{BIN}{os.pathsep}{full['PATH']}"
        self.process = subprocess.Popen(
            [*prefix, str(BIN / argv[0]), *argv[1:]],
            cwd=cwd,
            env={name: value for name, value in full.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def leftovers(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if self.mark.encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:  # it ended while we looked
                    continue
        return found

    def finish(self, limit_s: float = _LIMIT_S) -> tuple[int, str, str]:
        """Exit status, output and error output; then nothing may be left."""
        out, err = self.process.communicate(timeout=limit_s)
        wait_until(lambda: not self.leftovers(), f"the end of processes {self.leftovers()}")
        return self.process.returncode, out, err

    def __enter__(self) -> CommandProcess:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [self.process.pid, *self.leftovers()] if self.process.poll() is None else self.leftovers():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.communicate(timeout=_LIMIT_S)


def run_command(*argv: str, **rest: Any) -> tuple[int, str, str]:
    """A command's exit status, output and error output; nothing of it may be left."""
    with CommandProcess(*argv, **rest) as command:
        return command.finish()


def lines_of(output: str, rank: int) -> list[str]:
    """What one rank printed on stdout."""
    prefix = f"[{rank}]<stdout>:"
    return [line[len(prefix) :] for line in output.splitlines() if line.startswith(prefix)]


@contextmanager
def running(*argv: str, ready: Path, count: int, **rest: Any) -> Iterator[CommandProcess]:
    """A job under way: `count` ranks have made a file in the folder `ready`."""
    with CommandProcess(*argv, **rest) as job:
        wait_until(
            lambda: len(list(ready.iterdir())) >= count or job.process.poll() is not None,
            f"the start of {count} ranks",
        )
        assert job.process.poll() is None, job.process.communicate()
        yield job
