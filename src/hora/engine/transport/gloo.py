"""The gloo group: CPU tensors. And the TCP sockets that it opened, found so that they can be shut down.

gloo offers no way to end a wait, but a wait ends by itself when the connection breaks. gloo does not hand
out its sockets, so they are recognised by port: a group's connections are those accepted at its own
listener and those that lead to a peer's listener, whose ports the members tell one another through the
store.

gloo's listener takes every connection and never lets go of one that says nothing; when no descriptor is left, gloo ends
the process. So a process that uses gloo may have many descriptors, and once a group is complete the kernel drops
whatever else comes to its listener.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hora.engine.transport.base import AliveCheck
from hora.engine.transport.group import SLICE, ProcessGroup, connect
from hora.errors import HorovodInternalError
from hora.net import sockets

__all__ = ["GlooGroup"]

# Only how long gloo's own threads may outlive a discarded group; ours is the limit that counts.
_BACKEND_MARGIN_S = 30.0
# Enough for a crowd of strangers while a group connects. Not all that the system allows: programs exist that look at each.
_MANY_DESCRIPTORS = 65_536
_SO_ATTACH_FILTER = 26
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # a program for the kernel's packet filter: return 0, which is nothing

log = logging.getLogger("hora")


class GlooGroup(ProcessGroup):
    """CPU tensors. Listens on `address` only."""

    backend = "gloo"

    def __init__(
        self, store: Store, member: int, num_members: int, *, address: str, check_alive: AliveCheck, limit_s: float
    ) -> None:
        super().__init__(check_alive=check_alive, limit_s=limit_s)
        backend: Any = dist.ProcessGroupGloo
        _allow_many_descriptors()
        with _listening() as own_ports:
            device = backend.create_device(hostname=address)
        options = backend._Options()
        options._devices = [device]
        options._threads = 2
        options._timeout = timedelta(seconds=limit_s + _BACKEND_MARGIN_S)

        def make() -> tuple[Any, _Connections]:
            group = backend(store, member, num_members, options)
            connections = _Connections.find(store, member, num_members, own_ports)
            connections.shut_the_door()
            return group, connections

        what = f"{num_members} members to connect over gloo at {address}"
        self._process_group, self._connections = connect(make, what=what, check_alive=check_alive, limit_s=limit_s)

    def close(self) -> None:
        self._connections.forget()
        super().close()

    def discard(self) -> None:
        holder, self._process_group = [self._process_group], None
        if holder == [None]:
            return
        self._connections.shut_down()
        # The destructor joins gloo's threads, which end when their sockets do: that must not hold us up, so the holder is
        # the only one to have the group, whichever of the two threads comes first.
        threading.Thread(target=_drop, args=(holder,), name="hora-discard", daemon=True).start()

    def _wait(self, work: Any, what: str) -> None:
        deadline = time.monotonic() + self._limit_s
        while True:
            try:
                work.wait(SLICE)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # failed: raises the reason again; or it completed just after the slice
                    return
            self._check_alive()
            if time.monotonic() > deadline:
                raise HorovodInternalError(f"waited {self._limit_s:g} s for the peers' part in {what} over gloo")


def _allow_many_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MANY_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _drop(holder: list[Any]) -> None:
    holder.clear()


# Own address and port, and the peer's; a listener has no peer.
_Ends = tuple[tuple[str, int], "tuple[str, int] | None"]

_lock = threading.Lock()  # two groups made at the same time must not take each other's listener for their own


@contextlib.contextmanager
def _listening() -> Iterator[set[int]]:
    """The ports of the listeners that were opened inside the block (filled in when it ends)."""
    ports: set[int] = set()
    with _lock:
        before = set(_sockets())
        yield ports
        for descriptor in set(_sockets()) - before:
            with _borrowed(descriptor) as sock:
                if sock is not None and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    os.set_inheritable(descriptor, False)
                    ports.add(sock.getsockname()[1])


@dataclass(frozen=True, eq=False)
class _Connections:
    """Descriptors of one group's sockets: its listener and its connections."""

    descriptors: dict[int, _Ends]

    @classmethod
    def find(cls, store: Store, member: int, num_members: int, own_ports: set[int]) -> _Connections:
        """Call when the group is connected. Child processes that `exec` will not inherit what is found."""
        store.set(f"listener/{member}", ",".join(map(str, sorted(own_ports))))
        peer_ports: set[int] = set()
        for peer in range(num_members):
            if peer != member:
                peer_ports.update(int(text) for text in store.get(f"listener/{peer}").decode().split(",") if text)
        found = {}
        for descriptor in _sockets():
            with _borrowed(descriptor) as sock:
                ends = _ends(sock)
                if ends is not None and (ends[0][1] in own_ports or (ends[1] and ends[1][1] in peer_ports)):
                    os.set_inheritable(descriptor, False)
                    found[descriptor] = ends
        connections = cls(found)
        sockets.abandon_in_children(connections)
        return connections

    def shut_the_door(self) -> None:
        """Have the kernel drop all that comes to the listener from now on: every member has connected."""
        program = ctypes.create_string_buffer(_DROP)
        for descriptor, (own, peer) in self.descriptors.items():
            with _borrowed(descriptor) as sock:
                if sock is None or peer is not None:
                    continue
                filter = struct.pack("HL", 1, ctypes.addressof(program))
                try:
                    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter)
                except OSError as error:  # a sandbox; the number of descriptors is all that protects us then
                    log.warning(
                        "gloo's listener at %s:%d stays open to strangers, because the kernel refuses a filter for it (%s): "
                        "keep others from this port, or leave HORA_TRANSPORT=gloo out",
                        *own,
                        error,
                    )

    def shut_down(self) -> None:
        """Break the connections. Not the listener: gloo ends the process when that fails."""
        for descriptor in self._still_ours():
            with _borrowed(descriptor) as sock, contextlib.suppress(OSError):
                if sock is not None and self.descriptors[descriptor][1] is not None:
                    sock.shutdown(socket.SHUT_RDWR)
        self.forget()

    def abandon(self) -> None:
        """In a forked child, where gloo itself has no threads and will not use them."""
        for descriptor in self._still_ours():
            os.close(descriptor)

    def forget(self) -> None:
        """gloo closes its sockets by itself from now on."""
        sockets.forget(self)

    def _still_ours(self) -> list[int]:
        """Without those that gloo has closed, whose numbers may be in use for something else by now."""
        ours = []
        for descriptor, ends in self.descriptors.items():
            with _borrowed(descriptor) as sock:
                if _ends(sock) == ends:
                    ours.append(descriptor)
        return ours


def _sockets() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, by us (the listing itself) or by another thread
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.append(int(name))
    return found


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket | None]:
    """A Python socket over a duplicate of the descriptor, or None when it is not a TCP socket any more."""
    try:
        sock = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        yield None
        return
    try:
        is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
        yield sock if is_tcp else None
    finally:
        sock.close()


def _ends(sock: socket.socket | None) -> _Ends | None:
    if sock is None:
        return None
    own = sock.getsockname()
    try:
        peer = sock.getpeername()
    except OSError:  # a listener, or not connected any more
        return (own[0], own[1]), None
    return (own[0], own[1]), (peer[0], peer[1])
