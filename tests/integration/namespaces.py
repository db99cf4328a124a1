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
    """Two hosts with these addresses, whose ends of the cable are both called `cable`."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in addresses:
            made.append(Host())
            stack.callback(made[-1].close)
        first, second = made
        first.run("ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(second.pid))
        for host, address in zip(made, addresses, strict=True):
            host.run("ip", "address", "add", f"{address}/24", "dev", "cable")
            host.run("ip", "link", "set", "cable", "up")
        yield made
