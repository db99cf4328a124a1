"""Host discovery: a fixed list, or a script that is polled.

The script is a shell command, as Horovod's users write it: one `host` or `host:slots` a line. A thread runs it and
reports changes. It may take its time; the job does not wait for it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from hora.launch.slots import HostInfo

__all__ = ["DiscoveryScript", "HostWatch", "parse_discovered"]

_INTERVAL_S = 1.0
_RUN_LIMIT_S = 60.0
_SHOWN_BYTES = 2000

_log = logging.getLogger("hora.launch")


def parse_discovered(text: str, default_slots: int | None) -> list[HostInfo]:
    """Reads the script's output. ValueError for a host without slots when there is no default."""
    found: dict[str, HostInfo] = {}
    for line in text.splitlines():
        content = line.strip()
        if not content:
            continue
        if ":" not in content:
            if default_slots is None:
                raise ValueError(
                    f"the host discovery script names host {content!r} without slots; print `{content}:N`, or give "
                    "--slots-per-host"
                )
            content = f"{content}:{default_slots}"
        try:
            host = HostInfo.from_string(content)
        except ValueError as error:
            raise ValueError(f"the host discovery script printed a line that names no host. {error}") from None
        found[host.hostname] = host
    return list(found.values())


class HostWatch(Protocol):
    """Source of the current hosts: a script, the tasks of a Spark stage."""

    def watch(self, known: Sequence[HostInfo], changed: Callable[[Sequence[HostInfo]], None]) -> None:
        """Call `changed`, in any thread, with each list of hosts that differs from the one before."""

    def close(self) -> None:
        """Call it no more."""


class DiscoveryScript:
    """A script that lists hosts. `watch` polls it every second, until closed."""

    def __init__(self, command: str, *, default_slots: int | None) -> None:
        self._command, self._default_slots = command, default_slots
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def watch(self, known: Sequence[HostInfo], changed: Callable[[Sequence[HostInfo]], None]) -> None:
        """Call `changed`, in a thread, with each list of hosts that differs from the one before."""
        self._thread = threading.Thread(
            target=self._watch, args=(list(known), changed), name="hora-discovery", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        with self._lock:
            if self._process is not None:
                _kill_group(self._process)
        if self._thread is not None:
            self._thread.join(_INTERVAL_S + 5.0)

    def _watch(self, known: list[HostInfo], changed: Callable[[Sequence[HostInfo]], None]) -> None:
        failing = False
        while not self._stop.wait(_INTERVAL_S):
            try:
                found = self.ask()
                failing = False
            except (RuntimeError, ValueError) as error:
                if not failing and not self._stop.is_set():
                    _log.warning("%s; it is tried again every %g s", error, _INTERVAL_S)
                failing = True
                continue
            if found != known and not self._stop.is_set():
                known = found
                changed(found)

    def ask(self) -> list[HostInfo]:
        """Run the script and return its hosts. RuntimeError when it fails, ValueError when it cannot be understood."""
        with self._lock:
            if self._stop.is_set():
                return []
            process = self._process = subprocess.Popen(
                self._command,
                shell=True,  # the user's own command line, with its own arguments
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        try:
            out, err = process.communicate(timeout=_RUN_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"the host discovery script {self._command!r} did not end within {_RUN_LIMIT_S:g} s"
            ) from None
        finally:
            with self._lock:
                _kill_group(process)
                process.wait()
                self._process = None
        if process.returncode != 0:
            output = (err or out)[-_SHOWN_BYTES:].decode(errors="replace").strip() or "no output"
            raise RuntimeError(
                f"the host discovery script {self._command!r} failed with exit status {process.returncode}: {output}"
            )
        return parse_discovered(out.decode(errors="replace"), self._default_slots)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End the script and what it started in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
