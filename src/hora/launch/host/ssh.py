"""The ssh launcher: a supervisor on every host, reached by ssh where the host is another machine.

ssh only starts the supervisor. Its orders, with the job's secret and the workers' environment, travel on its
standard input, so that no `ps` on either machine shows them. The end of that input (we died, or ssh did) ends
the remote workers; silence for a while (the network was cut) ends ssh here. Used by `start` and by elastic
jobs, which may start workers on further hosts later.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO

from hora.launch.control.interrupt import ended_by_signals
from hora.launch.host import supervisor
from hora.launch.host.connection import Host, local_supervisor_command
from hora.launch.job import LaunchEvents, WorkerSpec
from hora.net import address

__all__ = ["Ssh", "SshLauncher", "check_hosts", "reachable_address"]

_CONNECT_ATTEMPTS = 5
_CONNECT_LIMIT_S = 10
_SILENCE_S, _SILENCES = 5, 3  # ssh gives a host up after this many unanswered questions, this far apart
# A launcher that says nothing for so long is gone, or cut off: its remote workers end. Longer than it takes a
# user who suspended it by accident to notice.
_HEARTBEAT_S, _HEARTBEAT_LIMIT_S = 10.0, 60.0
_CLOSE_SLACK_S = 15.0
_SSH_FAILED = 255
_SHOWN_BYTES = 4096
_OPTIONS = {
    "PasswordAuthentication": "no",
    "StrictHostKeyChecking": "no",
    "BatchMode": "yes",  # never ask for anything: nobody is there to answer
    "LogLevel": "ERROR",
    "ConnectTimeout": str(_CONNECT_LIMIT_S),
    "ServerAliveInterval": str(_SILENCE_S),
    "ServerAliveCountMax": str(_SILENCES),
}
# What another machine must not get: functions of our shell, our directories and devices, somebody's secret.
_PRIVATE = re.compile(r"BASH_FUNC_.*|OLDPWD|.*CUDA_VISIBLE_DEVICES|_HOROVOD_SECRET_KEY")


@dataclass(frozen=True, kw_only=True)
class Ssh:
    """How to reach hosts and which Python to start there. `program`: ssh, perhaps with options of its own."""

    program: tuple[str, ...] = ("ssh",)
    port: int | None = None
    identity_file: str | None = None
    executable: str = sys.executable
    python_path: str = ""

    @classmethod
    def from_environ(
        cls, environ: Mapping[str, str], *, port: int | None = None, identity_file: str | None = None
    ) -> Ssh:
        """As the user asks: `HORA_SSH` replaces the ssh command, options included (`ssh -J gate`)."""
        if identity_file is not None and not os.path.isfile(identity_file):
            raise ValueError(f"--ssh-identity-file: there is no file {identity_file!r}")
        if port is not None and not 0 < port < 65536:
            raise ValueError(f"--ssh-port must lie in 1..65535, but it is {port}")
        folders = environ.get("PYTHONPATH", "").split(os.pathsep)
        try:
            program = tuple(shlex.split(environ.get("HORA_SSH") or "ssh"))
        except ValueError as error:
            raise ValueError(f"HORA_SSH is not a command line: {error}, in {environ['HORA_SSH']}") from None
        return cls(
            program=program,
            port=port,
            identity_file=identity_file,
            python_path=os.pathsep.join(os.path.abspath(folder) for folder in folders if folder),
        )

    def command(self, hostname: str, remote: Sequence[str], *, attempts: int = 1) -> list[str]:
        """The argv that runs `remote` on a host. ssh hands it to a shell there, so each word is quoted."""
        argv = list(self.program)
        for name, value in _OPTIONS.items():
            argv += ["-o", f"{name}={value}"]
        argv += ["-o", f"ConnectionAttempts={attempts}", hostname]
        if self.port is not None:
            argv += ["-p", str(self.port)]
        if self.identity_file is not None:
            argv += ["-i", self.identity_file]
        return [*argv, " ".join(shlex.quote(word) for word in remote)]

    def python(self, hostname: str, module: str, *args: str, attempts: int = 1) -> list[str]:
        """The argv that runs a module with the job's Python on a host."""
        path = [f"PYTHONPATH={self.python_path}"] if self.python_path else []
        return self.command(hostname, ["exec", "env", *path, self.executable, "-m", module, *args], attempts=attempts)

    def real_name(self, hostname: str) -> str:
        """The name or address that ssh itself uses for a host, which may be an alias of its configuration."""
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
    with ended_by_signals(), contextlib.ExitStack() as stack:
        checks = [stack.enter_context(_Check(name, ssh)) for name in dict.fromkeys(hostnames)]
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


class _Check:
    """One trial: a supervisor that has nothing to read ends at once, after it has shown its mark."""

    def __init__(self, hostname: str, ssh: Ssh) -> None:
        self.hostname = hostname
        self._argv = ssh.python(hostname, "hora.launch.host.supervisor", attempts=_CONNECT_ATTEMPTS)

    def __enter__(self) -> _Check:
        self._stdout, self._stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=self._stdout,
                stderr=self._stderr,
                start_new_session=True,
            )
        except OSError as error:
            raise RuntimeError(f"cannot run {self._argv[0]!r}: {error.strerror}; is ssh installed?") from None
        return self

    def result(self, limit: float, limit_s: float) -> tuple[bool, str]:
        """Whether ssh got through, and what went wrong ("" if nothing did)."""
        try:
            code = self._process.wait(max(limit - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            return False, f"no answer within {limit_s:.0f} s (--start-timeout)"
        said, complained = self._text(self._stdout), self._text(self._stderr)
        if supervisor.MARK.decode() in said:
            return True, ""
        return code != _SSH_FAILED, complained or said or f"exit status {code}, no output"

    @staticmethod
    def _text(file: IO[bytes]) -> str:
        file.seek(0)
        return file.read(_SHOWN_BYTES).decode(errors="replace").rstrip(" \r")

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
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


class SshLauncher:
    """Starts workers on any hosts, this one included. `listen`: our address that all of them reach."""

    def __init__(self, ssh: Ssh, *, listen: str, verbose: bool = False) -> None:
        self._ssh, self._listen, self._verbose = ssh, listen, verbose
        self._hosts: dict[str, Host] = {}
        self._grace_s = 0.0

    @property
    def bind_address(self) -> str:
        return self._listen

    @property
    def advertised_address(self) -> str:
        return self._listen

    def start(self, workers: Sequence[WorkerSpec], events: LaunchEvents) -> None:
        self._grace_s = max([self._grace_s, *(spec.grace_s for spec in workers)])
        by_host: dict[str, list[WorkerSpec]] = {}
        for spec in workers:
            by_host.setdefault(spec.slot.hostname, []).append(spec)
        # First all connections, then the workers: ssh takes its time, and so the hosts take it together.
        remote = {name for name in by_host if not address.is_local(name)}
        for name in by_host:
            if name in self._hosts and self._hosts[name].ended:  # it was cut off; it may be back
                self._hosts.pop(name).wait(_CLOSE_SLACK_S)
            if name not in self._hosts:
                self._hosts[name] = self._connect(name, name in remote, events)
        for name, specs in by_host.items():
            self._hosts[name].start([_for_elsewhere(spec) for spec in specs] if name in remote else specs)

    def _connect(self, name: str, remote: bool, events: LaunchEvents) -> Host:
        if not remote:
            return Host(name, local_supervisor_command(), events)
        limit = str(_HEARTBEAT_LIMIT_S)
        command = self._ssh.python(name, "hora.launch.host.supervisor", limit, attempts=_CONNECT_ATTEMPTS)
        if self._verbose:
            print(shlex.join(command), file=sys.stderr, flush=True)
        return Host(name, command, events, inherit_env=True, heartbeat_s=_HEARTBEAT_S)

    def terminate(self, workers: Iterable[int], *, grace_s: float) -> None:
        chosen = list(workers)
        for host in self._hosts.values():
            host.terminate(chosen, grace_s=grace_s)

    def close(self) -> None:
        hosts, self._hosts = list(self._hosts.values()), {}
        for host in hosts:
            host.finish(grace_s=self._grace_s)
        limit = time.monotonic() + self._grace_s + _CLOSE_SLACK_S
        for host in hosts:
            host.wait(max(limit - time.monotonic(), 0.1))


def _for_elsewhere(spec: WorkerSpec) -> WorkerSpec:
    return replace(spec, env={name: value for name, value in spec.env.items() if not _PRIVATE.fullmatch(name)})
