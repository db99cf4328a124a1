"""`horovod.runner.util.network`: this machine's addresses and interfaces. Hora's own is `net.address`."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from hora.net.address import interface_address, is_local, resolve, source_address

__all__ = [
    "filter_local_addresses",
    "find_port",
    "get_driver_ip",
    "get_local_host_addresses",
    "get_local_intfs",
    "resolve_host_address",
]

T = TypeVar("T")
_LOOPBACK = "127.0.0.1"


def get_local_intfs(nic: str | None = None) -> set[str]:
    """The names of the interfaces that have an IPv4 address, or just this one if it has."""
    found = set()
    for _, name in socket.if_nameindex():
        with contextlib.suppress(ValueError):
            interface_address([name])
            found.add(name)
    return found if nic is None else found & {nic}


def get_local_host_addresses() -> set[str]:
    """The IPv4 addresses of this machine's interfaces."""
    return {interface_address([name]) for name in get_local_intfs()}


def resolve_host_address(host_name: str) -> str | None:
    """An IPv4 address of the host; None if the name has none."""
    return next(iter(resolve(host_name)), None)


def filter_local_addresses(all_host_names: Iterable[str]) -> list[str]:
    """The names that are other machines'. A name that cannot be resolved is taken for one."""
    return [name for name in all_host_names if not is_local(name)]


def find_port(server_factory: Callable[[tuple[str, int]], T]) -> tuple[T, int]:
    """A server on a free port of all interfaces, which the system chooses: `server_factory((host, 0))` and its port."""
    server = server_factory(("", 0))
    listening: Any = getattr(server, "socket", server)
    return server, int(listening.getsockname()[1])


def get_driver_ip(nics: Collection[str] | None) -> str:
    """This machine's address on one of these interfaces; with no names, the one that other machines reach."""
    if nics:
        return interface_address(nics)
    try:
        return source_address("192.0.2.1")  # a documentation address: selects the default route's interface
    except OSError:
        return _LOOPBACK
