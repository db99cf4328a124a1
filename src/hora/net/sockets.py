"""Sockets and addresses: listening, connecting, the other end of a local socket, and the addresses of this machine.

Abstract local names live in a network namespace and vanish with their process, so nothing is left in a file system. Any
process can connect to one, or take its name first, so both ends verify the other's user.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hora.config import allowed_ports

Where = str | tuple[str, int]  # the abstract name of a local socket, or a host's address and port

_BACKLOG = 1024
_CREDENTIALS = struct.Struct("3i")
_TIME = struct.Struct("ll")
_ESTABLISHED = "01"  # in /proc/net/tcp


class Process(NamedTuple):
    """A process at the other end of a local socket."""

    pid: int
    uid: int

    def __str__(self) -> str:
        return f"process {self.pid} of user {self.uid}"

    @property
    def trusted(self) -> bool:
        """Return whether it runs as our own user, or as root, which has full access anyway."""
        return self.uid in (os.geteuid(), 0)


def process_at(sock: socket.socket) -> Process:
    """Return the process at the other end, according to the kernel."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Process(pid, uid)


def user_at(sock: socket.socket) -> int | None:
    """Return the user of the process on this machine at the other end of a TCP connection; None if none holds it."""
    ends = f"{_as_listed(sock.getpeername(), sock.family)} {_as_listed(sock.getsockname(), sock.family)}"
    table = Path("/proc/net/tcp6" if sock.family == socket.AF_INET6 else "/proc/net/tcp")
    for words in map(str.split, table.read_text().splitlines()[1:]):
        # Any other state: the process has closed its end, and the kernel lists such connections as root's.
        if f"{words[1]} {words[2]}" == ends and words[3] == _ESTABLISHED:
            return int(words[7])
    return None


def _as_listed(name: tuple[Any, ...], family: int) -> str:
    """Return an address and its port as /proc/net/tcp lists them."""
    packed = socket.inet_pton(family, name[0].partition("%")[0])
    return "".join(f"{word:08X}" for (word,) in struct.iter_unpack("=I", packed)) + f":{name[1]:04X}"


def holder(name: str) -> Process | None:
    """Return the process that listens at this abstract name; None if none does or answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect("\0" + name)
            return process_at(sock)
        except OSError:
            return None


def listen(where: Where) -> socket.socket:
    """Return a listening socket. Port 0: the first free one of HORA_PORTS; without that, one of the system's choice."""
    if not isinstance(where, str):
        return _listen_tcp(*where)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind("\0" + where)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _listen_tcp(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    allowed = range(0) if port else allowed_ports()
    for candidate in allowed or (port,):
        try:
            return socket.create_server((address, candidate), family=family, backlog=_BACKLOG)
        except OSError as error:
            if not allowed or error.errno != errno.EADDRINUSE:
                raise
    raise OSError(
        errno.EADDRINUSE,
        f"all ports of HORA_PORTS={spelled(allowed)} are taken on {socket.gethostname()} ({address}); give this job "
        "more ports, or others",
    )


def free_port(address: str) -> int:
    """Return a port at which a library of others can listen: of HORA_PORTS the last free one, as ours take the first.

    Raises OSError if none is free.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for candidate in reversed(allowed_ports()):
        with contextlib.suppress(OSError), socket.create_server((address, candidate), family=family):
            return candidate
    with listen((address, 0)) as probe:
        return int(probe.getsockname()[1])


def spelled(ports: range) -> str:
    """Return the ports as the user gives them."""
    return f"{ports[0]}-{ports[-1]}"


def open_socket(where: Where, *, limit_s: float) -> socket.socket:
    """Return a connected, blocking socket; raises TimeoutError, or ConnectionError for another user's local name."""
    if isinstance(where, str):
        return _open_local(where, max(limit_s, 0.001))
    sock = socket.create_connection((_reachable(where[0]), where[1]), timeout=max(limit_s, 0.001))
    sock.settimeout(None)
    return sock


def _open_local(name: str, limit_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Not `settimeout`: a non-blocking local socket fails at once if others wait in the queue.
        _set_send_limit(sock, limit_s)
        try:
            sock.connect("\0" + name)
        except BlockingIOError:
            raise TimeoutError(f"{name} accepted no connection within {limit_s:g} s") from None
        _set_send_limit(sock, 0.0)
        owner = process_at(sock)
        if not owner.trusted:
            raise ConnectionError(f"the socket {name} belongs to user {owner.uid}, who must not see our requests")
    except BaseException:
        sock.close()
        raise
    return sock


def _set_send_limit(sock: socket.socket, limit_s: float) -> None:
    whole = int(limit_s)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(whole, int((limit_s - whole) * 1e6)))


def tune(sock: socket.socket, *, silence_limit_s: int) -> None:
    """Send small messages at once, and detect a vanished host within the silence limit.

    The kernel answers keep-alive probes, so a process that is merely stopped or busy does not count as dead.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(silence_limit_s // 4, 1))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(silence_limit_s // 4, 1))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_limit_s * 1000)


class Owner(Protocol):
    """Holder of sockets."""

    def abandon(self) -> None:
        """Close the sockets in a forked child, which has none of the parent's threads, and do nothing else."""


# A forked child (such as a DataLoader worker) inherits the sockets. While it keeps them open, peers do not see the
# death of its parent, and a name that the parent took stays taken.
_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def abandon_in_children(owner: Owner) -> None:
    """Make children that are forked from now on close the owner's sockets."""
    _owners.add(owner)


def forget(owner: Owner) -> None:
    """Unregister an owner that holds no sockets any more."""
    _owners.discard(owner)


def _after_fork_in_child() -> None:
    for owner in list(_owners):
        owner.abandon()
    _owners.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


_SIOCGIFADDR = 0x8915
_GLOBAL_SCOPE, _HOST_SCOPE = "00", "10"  # of /proc/net/if_inet6
_ANY_PORT = 9  # a UDP connect needs a port number; nothing is sent to it


def resolve(hostname: str, family: socket.AddressFamily = socket.AF_INET) -> list[str]:
    """Return the addresses of a name, IPv4 by default; empty if it has none (such as an ssh alias)."""
    try:
        found = socket.getaddrinfo(hostname, None, family, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        # A container may lack /etc/hosts.
        return ["127.0.0.1"] if hostname == "localhost" and family == socket.AF_INET else []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _reachable(hostname: str) -> str:
    """Return an address for `localhost`, which need not have one in the name service; other names unchanged."""
    return next(iter(resolve(hostname)), hostname) if hostname == "localhost" else hostname


def is_local(hostname: str) -> bool:
    """Return whether the name resolves to an IPv4 address of this machine."""
    return any(is_own(address) for address in resolve(hostname))


def is_own(address: str) -> bool:
    """Return whether it is an address of this machine, also 127.0.0.2 or a secondary one: only those can be bound."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def listening_address(hostname: str, *, one_host: bool) -> str:
    """Return the most restrictive address to listen on that peers with this name of the machine can reach.

    That is a single address unless the name does not identify it: it may belong to a service in front of this host, or
    mean loopback here and another address elsewhere. `one_host`: all peers are on this machine.
    """
    addresses = resolve(hostname)
    own = [address for address in addresses or resolve(hostname, socket.AF_INET6) if is_own(address)]
    if own and (one_host or not (own[0].startswith("127.") or own[0] == "::1")):
        return own[0]
    return "0.0.0.0" if addresses else "::"


def source_address(address: str) -> str:
    """Return our source address for packets to `address`, IPv4 if it has one; raises OSError if there is no route."""
    found = socket.getaddrinfo(_reachable(address), _ANY_PORT, type=socket.SOCK_DGRAM)
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
