"""Sockets as servers and clients use them: how they listen and connect, and who is at the other end of a local one.

Abstract local names live in a network namespace and vanish with their process: nothing is left in a file system. Any
process can connect to one, or take its name first, so both ends make sure of the other's user.
"""

from __future__ import annotations

import os
import socket
import struct
import weakref
from typing import NamedTuple, Protocol

__all__ = [
    "Owner",
    "Process",
    "Where",
    "abandon_in_children",
    "forget",
    "holder",
    "listen",
    "open_socket",
    "process_at",
    "tune",
]

Where = str | tuple[str, int]  # the abstract name of a local socket, or a host's address and port

_BACKLOG = 1024
_CREDENTIALS = struct.Struct("3i")
_TIME = struct.Struct("ll")


class Process(NamedTuple):
    """A process at the other end of a local socket."""

    pid: int
    uid: int

    def __str__(self) -> str:
        return f"process {self.pid} of user {self.uid}"

    @property
    def trusted(self) -> bool:
        """Return whether it runs for our own user, or for root, who can do anything to us anyway."""
        return self.uid in (os.geteuid(), 0)


def process_at(sock: socket.socket) -> Process:
    """The process at the other end, as the kernel knows it."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Process(pid, uid)


def holder(name: str) -> Process | None:
    """The process that listens at this abstract name; None if none does, or does not answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect("\0" + name)
            return process_at(sock)
        except OSError:
            return None


def listen(where: Where) -> socket.socket:
    """A listening socket. Port 0: one of the system's choice."""
    if not isinstance(where, str):
        family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        return socket.create_server(where, family=family, backlog=_BACKLOG)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind("\0" + where)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def open_socket(where: Where, *, limit_s: float) -> socket.socket:
    """A connected, blocking socket; TimeoutError, or ConnectionError if a local name is another user's."""
    if isinstance(where, str):
        return _open_local(where, max(limit_s, 0.001))
    sock = socket.create_connection(where, timeout=max(limit_s, 0.001))
    sock.settimeout(None)
    return sock


def _open_local(name: str, limit_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Not `settimeout`: a local socket that does not block fails at once where others wait in the queue.
        _set_send_limit(sock, limit_s)
        try:
            sock.connect("\0" + name)
        except BlockingIOError:
            raise TimeoutError(f"{name} took no connection within {limit_s:g} s") from None
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
    """Small messages leave at once; a peer whose host has vanished is noticed within the silence limit.

    The kernel answers keep-alive probes, so a process that is merely stopped or busy is not taken for dead.
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
    """Something that holds sockets."""

    def abandon(self) -> None:
        """In a forked child, which has none of the parent's threads: close the sockets, and do nothing else."""


# A forked child (a DataLoader worker) inherits the sockets: while it keeps them open, the death of its parent would not
# be seen by the peers, and a name that the parent took stays taken.
_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def abandon_in_children(owner: Owner) -> None:
    """Have children that are forked from now on close what the owner holds."""
    _owners.add(owner)


def forget(owner: Owner) -> None:
    """The owner holds no sockets any more."""
    _owners.discard(owner)


def _after_fork_in_child() -> None:
    for owner in list(_owners):
        owner.abandon()
    _owners.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
