"""ssh: how it is called, whether it gets through, and which of our addresses the hosts reach.

ssh only starts the supervisor. Its orders, with the job's secret and the workers' environment, travel on its standard
input, so that no `ps` on either machine shows them. The end of that input (we died, or ssh did) ends the remote
workers; silence for a while (the network was cut) ends ssh here. Called by `start`, the `launcher` and `hora doctor`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from hora.launch.control.interrupt import ended_by_signals
from hora.launch.environment import module_command
from hora.launch.host import supervisor
from hora.net import address

__all__ = ["Ssh", "check_hosts", "reachable_address"]

_CONNECT_ATTEMPTS = 5
_CONNECT_LIMIT_S = 10
_QUESTION_S = 5  # ssh asks a silent host so often
_SSH_FAILED = 255
_SHOWN_BYTES = 4096
_ECHOED = b"hora hears itself\n"
_OPTIONS = {
    "PasswordAuthentication": "no",
    "StrictHostKeyChecking": "accept-new",  # a key that has changed is refused; HORA_SSH='ssh -o …' comes first
    "BatchMode": "yes",  # never ask for anything: the launcher cannot answer
    "LogLevel": "ERROR",
    "ConnectTimeout": str(_CONNECT_LIMIT_S),
    "ServerAliveInterval": str(_QUESTION_S),
}


@dataclass(frozen=True, kw_only=True)
class Ssh:
    """Settings for reaching hosts, and the Python to start there. `program`: ssh, perhaps with options of its own.

    `is_agent`: not ssh, but what Open MPI calls an agent, such as a script around `kubectl exec -i`: it takes a host
    and a command. `silence_s`: ssh gives a host up that does not answer for so long.
    """

    program: tuple[str, ...] = ("ssh",)
    is_agent: bool = False
    port: int | None = None
    identity_file: str | None = None
    executable: str = sys.executable
    python_path: str = ""
    silence_s: int = 15

    @classmethod
    def from_environ(
        cls, environ: Mapping[str, str], *, port: int | None = None, identity_file: str | None = None
    ) -> Ssh:
        """As the user asks: `HORA_SSH` replaces the ssh command, options included (`ssh -J gate`); `HORA_RSH_AGENT` is
        a program that is called with a host and a command alone.
        """
        if identity_file is not None and not os.path.isfile(identity_file):
            raise ValueError(f"--ssh-identity-file: there is no file {identity_file!r}")
        if port is not None and not 0 < port < 65536:
            raise ValueError(f"--ssh-port must lie in 1..65535, but it is {port}")
        folders = environ.get("PYTHONPATH", "").split(os.pathsep)
        name = "HORA_RSH_AGENT" if environ.get("HORA_RSH_AGENT") else "HORA_SSH"
        try:
            program = tuple(shlex.split(environ.get(name) or "ssh"))
        except ValueError as error:
            raise ValueError(f"{name} is not a command line: {error}, in {environ[name]}") from None
        return cls(
            program=program,
            is_agent=name == "HORA_RSH_AGENT",
            port=port,
            identity_file=identity_file,
            python_path=os.pathsep.join(os.path.abspath(folder) for folder in folders if folder),
        )

    def command(self, hostname: str, remote: Sequence[str], *, attempts: int = 1) -> list[str]:
        """The argv that runs `remote` on a host. ssh hands it to a shell there, so each word is quoted."""
        line = " ".join(shlex.quote(word) for word in remote)
        if self.is_agent:
            return [*self.program, hostname, line]
        argv = list(self.program)
        for name, value in _OPTIONS.items():
            argv += ["-o", f"{name}={value}"]
        argv += ["-o", f"ServerAliveCountMax={-(-self.silence_s // _QUESTION_S)}"]
        argv += ["-o", f"ConnectionAttempts={attempts}", hostname]
        if self.port is not None:
            argv += ["-p", str(self.port)]
        if self.identity_file is not None:
            argv += ["-i", self.identity_file]
        return [*argv, line]

    def python(self, hostname: str, module: str, *args: str, attempts: int = 1) -> list[str]:
        """The argv that runs a module with the job's Python on a host."""
        path = [f"PYTHONPATH={self.python_path}"] if self.python_path else []
        return self.command(
            hostname, ["exec", "env", *path, *module_command(self.executable, module, *args)], attempts=attempts
        )

    def supervisor(self, hostname: str, *args: str) -> list[str]:
        """The argv that starts a supervisor on a host."""
        return self.python(hostname, "hora.launch.host.supervisor", *args, attempts=_CONNECT_ATTEMPTS)

    def real_name(self, hostname: str) -> str:
        """The name or address that ssh itself uses for a host, which may be an alias of its configuration."""
        if self.is_agent:
            return hostname
        found = subprocess.run(
            [*self.program, "-G", hostname],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CONNECT_LIMIT_S,
            check=False,
        )
        for line in found.stdout.splitlines():
            if line.startswith("hostname "):
                return line.split()[1]
        return hostname


def check_hosts(hostnames: Iterable[str], ssh: Ssh, *, limit_s: float) -> None:
    """Start a supervisor on every host at once, each ending by itself; RuntimeError says what failed."""
    unreached: dict[str, str] = {}
    unusable: dict[str, str] = {}
    limit = time.monotonic() + limit_s
    hostnames = list(dict.fromkeys(hostnames))
    with ended_by_signals(), contextlib.ExitStack() as stack:
        if ssh.is_agent and hostnames:
            _check_input(hostnames[0], ssh, limit_s)
        checks = [stack.enter_context(_Check(name, ssh)) for name in hostnames]
        for check in checks:
            reached, problem = check.result(limit, limit_s)
            if problem:
                (unusable if reached else unreached)[check.hostname] = problem
    if unreached:
        raise RuntimeError(
            f"could not connect to some hosts via ssh:\n{_listed(unreached)}\nCheck their names, that they "
            "are up, and that `ssh HOST` logs in without a password (see --ssh-port and --ssh-identity-file)."
        )
    if unusable:
        raise RuntimeError(
            f"ssh reaches these hosts, but Hora cannot be started there:\n{_listed(unusable)}\nInstall the "
            f"same Python environment on every host, at the same place: {ssh.executable}"
        )


def _check_input(hostname: str, ssh: Ssh, limit_s: float) -> None:
    """An agent must pass standard input on: that is where orders and the job's secret travel."""
    argv = ssh.command(hostname, ["cat"])
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # the checks report whatever keeps it from running
        done = subprocess.run(argv, input=_ECHOED, capture_output=True, timeout=limit_s, check=False)
        if done.returncode != 0 or _ECHOED in done.stdout:
            return
        raise RuntimeError(
            f"{shlex.join(ssh.program)} does not pass its standard input on to {hostname}, so no order can reach it; "
            "with `kubectl exec`, say `kubectl exec -i`"
        )


class _Check:
    """One trial: a supervisor that has nothing to read ends at once, after it has shown its mark."""

    def __init__(self, hostname: str, ssh: Ssh) -> None:
        self.hostname = hostname
        self._argv = ssh.supervisor(hostname)

    def __enter__(self) -> _Check:
        self._stdout, self._stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self._nothing, end = os.pipe()
        os.close(end)
        try:
            self._process = subprocess.Popen(
                self._argv, stdin=self._nothing, stdout=self._stdout, stderr=self._stderr, start_new_session=True
            )
        except OSError as error:
            raise RuntimeError(f"cannot run {self._argv[0]!r}: {error.strerror}; is ssh installed?") from None
        return self

    def result(self, limit: float, limit_s: float) -> tuple[bool, str]:
        """Return whether ssh got through, and what went wrong ("" if nothing did)."""
        try:
            code = self._process.wait(max(limit - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            return False, f"no answer within {limit_s:.0f} s (--start-timeout)"
        output, errors = self._text(self._stdout), self._text(self._stderr)
        if supervisor.MARK.decode() in output:
            return True, ""
        return code != _SSH_FAILED, errors or output or f"exit status {code}, no output"

    @staticmethod
    def _text(file: IO[bytes]) -> str:
        file.seek(0)
        return file.read(_SHOWN_BYTES).decode(errors="replace").rstrip(" \r")

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._nothing)
        self._stdout.close()
        self._stderr.close()


def _listed(problems: Mapping[str, str]) -> str:
    return "\n".join(f"  {name}: {text.strip()}" for name, text in problems.items())


def reachable_address(hostnames: Iterable[str], ssh: Ssh) -> str:
    """Our address that these remote hosts can connect to: the one from which we reach them."""
    sources: list[str] = []
    for hostname in hostnames:
        found = address.resolve(hostname) or address.resolve(ssh.real_name(hostname))
        for target in found[:1]:
            try:
                sources.append(address.source_address(target))
            except OSError as error:
                raise RuntimeError(f"there is no way from here to {hostname} ({target}): {error}") from None
    if not sources:
        raise RuntimeError(
            "none of the hosts has an address here, so it is unclear where to listen for them; choose a "
            "network with --network-interfaces"
        )
    # A host that is reached through loopback (a tunnel, a test) can often use another address too.
    return next((source for source in sources if not source.startswith("127.")), sources[0])
