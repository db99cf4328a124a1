"""Hosts joined by a cable, for tests and benchmarks: network namespaces without names, each of which lives as long as a
process that holds it, which ends with this one."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence


class Host:
    """A network namespace. AssertionError or CalledProcessError where this machine does not let us make one."""

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
        """The command that runs this one inside."""
        return ["nsenter", "--target", str(self.pid), "--net", *command]

    def run(self, *command: str) -> None:
        subprocess.run(self.command(*command), check=True, capture_output=True, text=True, timeout=30)

    def close(self) -> None:
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.wait(10)


@contextlib.contextmanager
def joined(addresses: Sequence[str]) -> Iterator[list[Host]]:
    """Hosts with these addresses, whose ends of their cables are all called `cable`: two have one between them, more have
    one each to a switch, which is a namespace too."""
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
        for host, address in zip(made, addresses, strict=True):
            length = ["64", "dev", "cable", "nodad"] if ":" in address else ["24", "dev", "cable"]
            host.run("ip", "address", "add", f"{address}/{length[0]}", *length[1:])
            host.run("ip", "link", "set", "cable", "up")
        yield made


def _plug(host: Host, name: str, other: Host) -> None:
    """A cable: `name` at this end, `cable` at the other."""
    host.run("ip", "link", "add", name, "type", "veth", "peer", "name", "cable", "netns", str(other.pid))
