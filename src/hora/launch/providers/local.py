"""This machine alone. Its agent is a child of the controller, at the other end of a socket (`controller.launcher`).

So nothing listens, and a job of one machine starts faster: `start` is for agents that connect like those of any other
host.
"""

from __future__ import annotations

from collections.abc import Sequence

from hora.launch.providers.base import Commands, Order, StartError
from hora.launch.slots import HostInfo


class ThisMachine:
    """See `Provider`."""

    def __init__(self, hosts: Sequence[HostInfo]) -> None:
        self._hosts = tuple(hosts)
        self._commands = Commands()

    def hosts(self) -> Sequence[HostInfo]:
        return self._hosts

    def start(self, host: str, order: Order) -> None:
        status, said = self._commands.run(host, order.command, order)
        raise StartError(said or f"exit status {status}, no output")

    def ended(self, host: str, why: str) -> None:
        self._commands.end(host)

    def close(self) -> None:
        self._commands.close()
