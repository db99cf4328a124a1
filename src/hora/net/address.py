"""Addresses of this machine: is a host this one, and which of our addresses do the others reach.

Not here: reaching a host (`ssh`). Nothing is sent: connecting a UDP socket only asks the routing table.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Collection
from pathlib import Path

__all__ = ["interface_address", "is_local", "listening_address", "resolve", "source_address"]

_SIOCGIFADDR = 0x8915
_GLOBAL_SCOPE, _HOST_SCOPE = "00", "10"  # of /proc/net/if_inet6
_ANY_PORT = 9  # a UDP connect needs some port number; nothing is ever sent to it


def resolve(hostname: str, family: socket.AddressFamily = socket.AF_INET) -> list[str]:
    """The addresses of a name, IPv4 by default; empty when it has none (an alias of ssh, perhaps)."""
    try:
        found = socket.getaddrinfo(hostname, None, family, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_local(hostname: str) -> bool:
    """Return whether the name resolves to one of this machine's own IPv4 addresses."""
    return any(_is_own(address) for address in resolve(hostname))


def _is_own(address: str) -> bool:
    # Only an own address can be bound. This also knows 127.0.0.2 and the further addresses of an interface.
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def listening_address(hostname: str, *, one_host: bool) -> str:
    """Return the address to listen on, so that whoever has this name of ours can connect, and nobody else more
    than can be helped.

    That is one address, but where the name does not tell which: it is that of a service in front of us, or it means
    loopback here and something else elsewhere. `one_host`: all of them are on this machine.
    """
    addresses = resolve(hostname)
    own = [address for address in addresses or resolve(hostname, socket.AF_INET6) if _is_own(address)]
    if own and (one_host or not (own[0].startswith("127.") or own[0] == "::1")):
        return own[0]
    return "0.0.0.0" if addresses else "::"


def source_address(address: str) -> str:
    """Our own address from which packets to `address` leave, IPv4 where it has one; OSError if there is no route."""
    found = socket.getaddrinfo(address, _ANY_PORT, type=socket.SOCK_DGRAM)
    family, *_, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def interface_address(nics: Collection[str]) -> str:
    """The address of the first (by name) of these interfaces, IPv4 if one has it; ValueError names what exists."""
    for nic in sorted(nics):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", nic.encode()[:15]))
            except OSError:
                continue
        return socket.inet_ntoa(reply[20:24])
    for nic in sorted(nics):
        for address in _ipv6_addresses(nic):
            return address
    existing = ", ".join(name for _, name in socket.if_nameindex())
    raise ValueError(
        f"none of the network interfaces {', '.join(sorted(nics))} has an address on this machine; it has {existing}"
    )


def _ipv6_addresses(nic: str) -> list[str]:
    """Those that other hosts can reach without naming an interface of their own."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return []
    fields = [line.split() for line in lines]
    return [
        socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
        for address, _, _, scope, _, name in fields
        if name == nic and scope in (_GLOBAL_SCOPE, _HOST_SCOPE)
    ]
