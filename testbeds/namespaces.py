"""Hosts joined by a cable, for tests and benchmarks: unnamed network namespaces, each of which lives as long as its
holder process, which exits with this one."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path


class Host:
    """A network namespace. Raises AssertionError or CalledProcessError if this machine does not allow one."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo ready; exec cat >/dev/null"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n", "cannot make a network namespace: that needs root"
        self.pid = self._holder.pid
        self.namespace = f"/proc/{self.pid}/ns/net"
        self.run("ip", "link", "set", "lo", "up")

    def command(self, *command: str) -> list[str]:
        """Return the command line that runs `command` in the namespace."""
        return ["nsenter", "--target", str(self.pid), "--net", *command]

    def run(self, *command: str) -> None:
        subprocess.run(self.command(*command), check=True, capture_output=True, text=True, timeout=30)

    def close(self) -> None:
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.wait(10)


@contextlib.contextmanager
def joined(addresses: Sequence[str]) -> Iterator[list[Host]]:
    """Create hosts with these addresses. Each host's end of the cable is called `cable`. Two hosts share one cable;
    more hosts are connected by a switch, which is another namespace.
    """
    with contextlib.ExitStack() as stack:
        made = []
        for _ in addresses:
            made.append(Host())
            stack.callback(made[-1].close)
        if len(made) == 2:
            _plug(made[0], "cable", made[1])
        else:
            switch = Host()
            stack.callback(switch.close)
            switch.run("ip", "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
            switch.run("ip", "link", "set", "bridge", "up")
            for number, host in enumerate(made):
                _plug(switch, f"port{number}", host)
                switch.run("ip", "link", "set", f"port{number}", "master", "bridge", "up")
        _start(made, addresses)
        yield made


@contextlib.contextmanager
def badly_joined(addresses: Sequence[str], *, delay_s: float, loss: float, seed: int = 0) -> Iterator[list[Host]]:
    """Create two hosts with these addresses, joined by a cable that delays each packet and drops a share `loss` of
    them. Raise CalledProcessError if this machine does not allow it.
    """
    with contextlib.ExitStack() as stack:
        made = []
        for _ in addresses:
            made.append(Host())
            stack.callback(made[-1].close)
        script = str(Path(__file__).with_name("bad_cable.py"))
        command = [sys.executable, script, *(str(host.pid) for host in made), str(delay_s), str(loss), str(seed)]
        cable = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert cable.stdin is not None
        assert cable.stdout is not None
        stack.callback(cable.wait, 10)
        stack.callback(cable.stdin.close)
        if cable.stdout.readline() != b"ready\n":
            raise subprocess.CalledProcessError(cable.wait(10), command)
        _start(made, addresses)
        yield made


def _start(hosts: Sequence[Host], addresses: Sequence[str]) -> None:
    """Assign the addresses and bring the interfaces up."""
    for host, address in zip(hosts, addresses, strict=True):
        length = ["64", "dev", "cable", "nodad"] if ":" in address else ["24", "dev", "cable"]
        host.run("ip", "address", "add", f"{address}/{length[0]}", *length[1:])
        host.run("ip", "link", "set", "cable", "up")


def _plug(host: Host, name: str, other: Host) -> None:
    """Connect two hosts by a cable: `name` at the first end, `cable` at the other."""
    host.run("ip", "link", "add", name, "type", "veth", "peer", "name", "cable", "netns", str(other.pid))
