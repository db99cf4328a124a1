"""Hosts that are reached by ssh: it starts an agent on each when one is needed.

ssh only starts the agent and passes the controller's address and the agent's own key on its standard input, so that
`ps` shows neither. Everything else, including workers' keys and environment, goes over the agent's own connection
(`agents`): after it has joined, the end of ssh has no effect.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hora.launch.agent.protocol import Join
from hora.launch.controller.agents import Agents, credentials, end_starter, start_agent
from hora.launch.controller.launcher import AgentHandle
from hora.launch.limits import STARTER_END_S
from hora.launch.processes import ended_by_signals, module_command, output_of
from hora.net import sockets
from hora.net.session import SessionPeer
from hora.net.wire import ANYBODY, Credentials, new_secret

_CONNECT_ATTEMPTS = 5
_CONNECT_LIMIT_S = 10
_SSH_FAILED = 255
_SHOWN_BYTES = 4096
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
    """Settings for reaching hosts, and the Python to start there. `program`: ssh, perhaps with options.

    `is_agent`: not ssh, but what Open MPI calls an agent (`HORA_RSH_AGENT`), such as a script around `kubectl exec -i`:
    it takes a host and a command.
    """

    program: tuple[str, ...] = ("ssh",)
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
        """Return the argv that runs a module with the job's Python on a host. Its words are quoted: ssh has a shell."""
        path = [f"PYTHONPATH={self.python_path}"] if self.python_path else []
        line = shlex.join(["exec", "env", *path, *module_command(self.executable, module, *args)])
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


class SshHosts(Agents):
    """Starts agents over ssh, which connect to `listen`. `limit_s`: how long one may take to join.

    Every agent has its own number and key: a host can only speak for itself.
    """

    brings_environment = False

    def __init__(self, ssh: Ssh, listen: str, *, limit_s: float, verbose: bool = False, **limits: Any) -> None:
        self._ssh, self._limit_s, self._verbose = ssh, limit_s, verbose
        self._numbers = itertools.count()
        self._started: list[subprocess.Popen[bytes]] = []
        self._dismissed = False
        super().__init__((listen, 0), new_secret(), num_nodes=0, **limits)

    def is_own(self, hostname: str) -> bool:
        return sockets.is_local(hostname)

    def reach(self, hostnames: Iterable[str]) -> None:
        """Start agents on all these hosts in parallel; RuntimeError says what failed where."""
        with self._changed:
            nodes = [self._absent(name) for name in dict.fromkeys(hostnames)]
            self._changed.wait_for(
                lambda: all(node.peer or node.ended for node in nodes), self._limit_s + STARTER_END_S
            )
        failed = [node for node in nodes if node.peer is None]
        unreached = [node for node in failed if node.status in (None, _SSH_FAILED)]
        if unreached:
            raise RuntimeError(
                f"could not connect to some hosts via ssh:\n{_listed(unreached)}\nCheck their names, that they "
                "are up, and that `ssh HOST` logs in without a password (see --ssh-port and --ssh-identity-file)."
            )
        if failed:
            raise RuntimeError(
                f"ssh reaches these hosts, but Hora cannot be started there:\n{_listed(failed)}\nInstall the "
                f"same Python environment on every host, at the same place: {self._ssh.executable}"
            )

    def _absent(self, hostname: str) -> AgentHandle:
        """Return a new, expected node: the previous one has ended, or there was none."""
        index, node = next(self._numbers), AgentHandle(hostname)
        self._nodes[index] = node
        command = self._ssh.python(hostname, "hora.launch.agent.session", attempts=_CONNECT_ATTEMPTS)
        if self._verbose:
            print(shlex.join(command), file=sys.stderr, flush=True)
        name = f"hora-ssh {hostname}"
        threading.Thread(target=self._start, args=(index, node, command), name=name, daemon=True).start()
        return node

    def _start(self, index: int, node: AgentHandle, command: Sequence[str]) -> None:
        """Run ssh. Until its agent has joined, the end of ssh, or a long silence, is the end of the node.

        In its own thread: an exception from a signal, in the main thread, must not lose a process just started.
        """
        key, nodes, status = credentials(self._secret, index), {node.name: (index, 1)}, _SSH_FAILED
        limit_s = self._limit_s / 2  # so that its failure is reported in time
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        try:
            process = start_agent(command, (self.address, self.port), key, nodes, limit_s=limit_s, **pipes)
            with self._changed:
                node.starter = process
                self._started.append(process)
                if self._dismissed:
                    process.kill()
            timer = threading.Timer(self._limit_s, self._late, (node, process))
            timer.start()
            assert process.stderr is not None
            with process.stderr:
                while words := os.read(process.stderr.fileno(), _SHOWN_BYTES):
                    node.complaints.add(words)
            status = process.wait()
            timer.cancel()
        except OSError as error:
            node.complaints.add(f"cannot run {command[0]!r}: {error.strerror}; is ssh installed?".encode())
        with self._changed:
            if node.peer is not None:
                return
            self._nodes.pop(index, None)
            node.lost(_SSH_FAILED if status < 0 else status)
            self._changed.notify_all()

    def _late(self, node: AgentHandle, process: subprocess.Popen[bytes]) -> None:
        with self._changed:
            if node.peer is None and not node.ended:
                node.complaints.add(f"no answer within {self._limit_s:.0f} s (--start-timeout)".encode())
                process.kill()

    def dismiss(self, status: int) -> None:
        with self._changed:
            self._dismissed = True
            for node in self._nodes.values():
                if node.peer is None:
                    node.kill()
        super().dismiss(status)
        deadline = time.monotonic() + STARTER_END_S
        for process in self._started:
            end_starter(process, max(deadline - time.monotonic(), 0.0))

    # ---- in the server's thread -----------------------------------------------------------------------------------

    def _credentials(self, speaker: int) -> Credentials:
        return credentials(self._secret, max(speaker, 0))

    def _misplaced(self, peer: SessionPeer, index: int, slots: int) -> str:
        expected = index == peer.speaker != ANYBODY and index in self._nodes and self._nodes[index].peer is None
        return "" if expected else "nobody waits for it any more"

    def _admitted(self, index: int, name: str, joining: Join) -> AgentHandle:
        return self._nodes[index]


@contextlib.contextmanager
def open_hosts(hostnames: Iterable[str], ssh: Ssh, listen: str, **rest: Any) -> Iterator[SshHosts]:
    """Yield the hosts that ssh reaches, these first, until the job is over."""
    opened = SshHosts(ssh, listen, **rest)
    try:
        with ended_by_signals():
            opened.reach(hostnames)
        yield opened
    finally:
        opened.dismiss(0)


def _listed(nodes: Sequence[AgentHandle]) -> str:
    """List the messages of nodes that have not joined."""
    words = [node.complaints.text.strip() or f"exit status {node.status}, no output" for node in nodes]
    return "\n".join(f"  {node.name}: {said}" for node, said in zip(nodes, words, strict=True))


def reachable_address(hostnames: Iterable[str], ssh: Ssh) -> str:
    """Return this machine's address for these remote hosts: the source address of the route to them."""
    sources: list[str] = []
    for hostname in hostnames:
        found = sockets.resolve(hostname) or sockets.resolve(ssh.real_name(hostname))
        with contextlib.suppress(OSError):
            sources += [sockets.source_address(target) for target in found[:1]]
    # A host behind loopback (a tunnel, a test) can often use another address too. Without a route ssh's error is clear.
    return next((source for source in sources if not source.startswith("127.")), (*sources, "127.0.0.1")[0])
