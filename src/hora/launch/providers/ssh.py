"""Hosts that are reached by ssh: it starts an agent on each when one is needed.

ssh only starts the agent and passes the controller's address and the agent's own key on its standard input, so that
`ps` shows neither. Everything else, including workers' keys and environment, goes over the agent's own connection
(`agents`): after it has joined, the end of ssh has no effect.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hora.launch.processes import module_command, output_of
from hora.launch.providers.base import Commands, Order, StartError
from hora.launch.slots import HostInfo
from hora.net import sockets

_CONNECT_ATTEMPTS = 5
_CONNECT_LIMIT_S = 10
_SSH_FAILED = 255
_UNREACHED = (
    "could not connect to some hosts via ssh:\n{hosts}\nCheck their names, that they are up, and that `ssh HOST` logs "
    "in without a password (see --ssh-port and --ssh-identity-file)."
)
_UNUSABLE = (
    "ssh reaches these hosts, but Hora cannot be started there:\n{hosts}\nInstall the same Python environment on every "
    "host, at the same place: {python}"
)
_OPTIONS = {
    "PasswordAuthentication": "no",
    "StrictHostKeyChecking": "accept-new",  # a key that has changed is refused; HORA_SSH='ssh -o …' comes first
    "BatchMode": "yes",  # never prompt: the launcher cannot answer
    "LogLevel": "ERROR",
    "ConnectTimeout": str(_CONNECT_LIMIT_S),
    "ServerAliveInterval": "5",  # end by itself when the network is cut
}


@dataclass(frozen=True, kw_only=True)
class Ssh:
    """Settings for reaching hosts, and the Python to start there."""

    program: tuple[str, ...] = ("ssh",)  # ssh, perhaps with options
    # Not ssh but a script that takes a host and a command (`HORA_RSH_AGENT`), such as one around kubectl
    is_agent: bool = False
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

    def python(self, hostname: str, module: str, *args: str, attempts: int = 1) -> list[str]:
        """Return the argv that runs a module with the job's Python on a host."""
        return self.command(hostname, module_command(self.executable, module, *args), attempts=attempts)

    def command(self, hostname: str, command: Sequence[str], *, attempts: int = 1) -> list[str]:
        """Return the argv that runs a command on a host. Its words are quoted: ssh has a shell."""
        path = [f"PYTHONPATH={self.python_path}"] if self.python_path else []
        line = shlex.join(["exec", "env", *path, *command])
        if self.is_agent:
            return [*self.program, hostname, line]
        argv = list(self.program)
        for name, value in _OPTIONS.items():
            argv += ["-o", f"{name}={value}"]
        argv += ["-o", f"ConnectionAttempts={attempts}", hostname]
        if self.port is not None:
            argv += ["-p", str(self.port)]
        if self.identity_file is not None:
            argv += ["-i", self.identity_file]
        return [*argv, line]

    def real_name(self, hostname: str) -> str:
        """Return the name or address that ssh uses for a host, which may be an alias in its configuration."""
        shown = "" if self.is_agent else output_of([*self.program, "-G", hostname], limit_s=_CONNECT_LIMIT_S)
        return next((line.split()[1] for line in shown.splitlines() if line.startswith("hostname ")), hostname)


class SshHosts:
    """Starts agents by ssh: see `Provider`. Every agent has its own key, so no host can pose as another."""

    def __init__(self, hosts: Sequence[HostInfo], ssh: Ssh, *, verbose: bool = False) -> None:
        self._hosts, self._ssh, self._verbose = tuple(hosts), ssh, verbose
        self._commands = Commands()

    def hosts(self) -> Sequence[HostInfo]:
        return self._hosts

    def start(self, host: str, order: Order) -> None:
        """Run ssh, which ends with the agent. After it has joined, the end of ssh has no effect."""
        argv = self._ssh.command(host, order.command, attempts=_CONNECT_ATTEMPTS)
        if self._verbose:
            print(shlex.join(argv), file=sys.stderr, flush=True)
        try:
            status, said = self._commands.run(host, argv, order)
        except OSError as error:
            raise StartError(f"cannot run {argv[0]!r}: {error.strerror}; is ssh installed?", _UNREACHED) from None
        unreached = status < 0 or status == _SSH_FAILED
        message = _UNREACHED if unreached else _UNUSABLE.replace("{python}", order.command[0])
        raise StartError(said or f"exit status {status}, no output", message)

    def ended(self, host: str, why: str) -> None:
        self._commands.end(host)

    def close(self) -> None:
        self._commands.close()


def reachable_address(hostnames: Iterable[str], ssh: Ssh) -> str:
    """Return this machine's address for these remote hosts: the source address of the route to them."""
    sources: list[str] = []
    for hostname in hostnames:
        found = sockets.resolve(hostname) or sockets.resolve(ssh.real_name(hostname))
        with contextlib.suppress(OSError):
            sources += [sockets.source_address(target) for target in found[:1]]
    # A host behind loopback (a tunnel, a test) can often use another address too. Without a route ssh's error is clear.
    return next((source for source in sources if not source.startswith("127.")), (*sources, "127.0.0.1")[0])
