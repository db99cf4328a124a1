"""Addresses of this machine: whether a host is this machine, and which of its addresses other hosts reach.

It sends nothing: connecting a UDP socket only queries the routing table. `ssh` reaches other hosts.
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
_ANY_PORT = 9  # a UDP connect needs a port number; nothing is sent to it


def resolve(hostname: str, family: socket.AddressFamily = socket.AF_INET) -> list[str]:
    """Return the addresses of a name, IPv4 by default; empty if it has none (such as an ssh alias)."""
    try:
        found = socket.getaddrinfo(hostname, None, family, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_local(hostname: str) -> bool:
    """Return whether the name resolves to an IPv4 address of this machine."""
    return any(_is_own(address) for address in resolve(hostname))


def _is_own(address: str) -> bool:
    # Only an own address can be bound. This includes 127.0.0.2 and secondary addresses of an interface.
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def listening_address(hostname: str, *, one_host: bool) -> str:
    """Return the address to listen on so that peers with this name of ours can connect, as restrictively as possible.

    That is a single address unless the name does not identify it: it may belong to a service in front of this host, or
    mean loopback here and another address elsewhere. `one_host`: all peers are on this machine.
    """
    addresses = resolve(hostname)
    own = [address for address in addresses or resolve(hostname, socket.AF_INET6) if _is_own(address)]
    if own and (one_host or not (own[0].startswith("127.") or own[0] == "::1")):
        return own[0]
    return "0.0.0.0" if addresses else "::"


def source_address(address: str) -> str:
    """Return our source address for packets to `address`, IPv4 if it has one; raises OSError if there is no route."""
    found = socket.getaddrinfo(address, _ANY_PORT, type=socket.SOCK_DGRAM)
    family, *_, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def interface_address(nics: Collection[str]) -> str:
    """Return the address of the first (by name) of these interfaces, IPv4 if one has it; ValueError if none has."""
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
    """Return the addresses that other hosts can reach without naming an interface of their own."""
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
