"""Addresses of this machine: is a host this one, and which of our addresses do the others reach.

Not here: reaching a host (`ssh`). Nothing is sent: connecting a UDP socket only asks the routing table.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Collection

__all__ = ["interface_address", "is_local", "listening_address", "resolve", "source_address"]

_SIOCGIFADDR = 0x8915
_ANY_PORT = 9  # a UDP connect needs some port number; nothing is ever sent to it


def resolve(hostname: str) -> list[str]:
    """The IPv4 addresses of a name; empty when it has none (an alias of ssh, perhaps)."""
    try:
        found = socket.getaddrinfo(hostname, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_local(hostname: str) -> bool:
    """Whether the name resolves to one of this machine's own IPv4 addresses."""
    return any(_is_own(address) for address in resolve(hostname))


def _is_own(address: str) -> bool:
    # Only an own address can be bound. This also knows 127.0.0.2 and the further addresses of an interface.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def listening_address(hostname: str, *, one_host: bool) -> str:
    """Where to listen, so that all who were told this name for us reach us, and nobody else more than can be helped.

    That is one address, but where the name does not tell which: it is that of a service in front of us, or it means
    loopback here and something else elsewhere. `one_host`: all of them are on this machine.
    """
    addresses = resolve(hostname)
    own = [address for address in addresses if _is_own(address)]
    if own and (one_host or not own[0].startswith("127.")):
        return own[0]
    return "0.0.0.0" if addresses else "::"


def source_address(address: str) -> str:
    """Our own address from which packets to `address` leave; OSError if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, _ANY_PORT))
        return str(probe.getsockname()[0])


def interface_address(nics: Collection[str]) -> str:
    """The IPv4 address of the first (by name) of these interfaces; ValueError names what exists."""
    for nic in sorted(nics):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", nic.encode()[:15]))
            except OSError:
                continue
        return socket.inet_ntoa(reply[20:24])
    existing = ", ".join(name for _, name in socket.if_nameindex())
    raise ValueError(
        f"none of the network interfaces {', '.join(sorted(nics))} has an IPv4 address on this machine; "
        f"it has {existing}"
    )
