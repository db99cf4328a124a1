"""Bootstrap: the ranks of a world exchange their first facts.

A `Gathering` is the meeting place that the launcher provided: Hora's authenticated rendezvous, or a torch TCPStore
under torchrun and other launchers. It is opened once per process and used again when the runtime is initialised again.
Nothing that comes through it is unpickled.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hora.engine.store import ControlStore
from hora.errors import HorovodInternalError
from hora.net.client import ControlClient
from hora.world import Meeting, World

__all__ = ["Gathering", "control_client", "host_fingerprint", "local_address", "open_gathering"]


class Gathering(Protocol):
    """Where the ranks meet."""

    def allgather(self, key: str, value: bytes, *, rank: int, size: int, limit_s: float) -> list[bytes]:
        """Everybody's value, in rank order. HorovodInternalError names the ranks that did not come."""

    def store(self, prefix: str, *, limit_s: float, guard: Callable[[], None]) -> Store:
        """A torch store for gloo and NCCL whose keys cannot clash with other prefixes."""


class _ControlGathering:
    def __init__(self, client: ControlClient) -> None:
        self.client = client

    def allgather(self, key: str, value: bytes, *, rank: int, size: int, limit_s: float) -> list[bytes]:
        try:
            return self.client.allgather(key, value, rank=rank, size=size, timeout_s=limit_s)
        except TimeoutError as error:
            raise HorovodInternalError(f"{error} (limit: HOROVOD_GLOO_TIMEOUT_SECONDS={limit_s:g})") from error

    def store(self, prefix: str, *, limit_s: float, guard: Callable[[], None]) -> Store:
        return ControlStore(self.client, prefix=f"{prefix}/", timeout_s=limit_s, guard=guard)


class _StoreGathering:
    def __init__(self, meeting: Meeting, limit_s: float) -> None:
        self._meeting = meeting
        self._store = _tcp_store(meeting, limit_s, is_master=meeting.host_store)

    def allgather(self, key: str, value: bytes, *, rank: int, size: int, limit_s: float) -> list[bytes]:
        keys = [f"hora/{key}/{peer}" for peer in range(size)]
        self._store.set(keys[rank], value)  # type: ignore[arg-type] # torch takes bytes too
        deadline = time.monotonic() + limit_s
        try:
            self._store.wait(keys, timedelta(seconds=max(limit_s, 0.001)))
            return [bytes(self._store.get(item)) for item in keys]
        except (RuntimeError, dist.DistError) as error:
            missing = [peer for peer in range(size) if not self._store.check([keys[peer]])]
            waited = limit_s - max(deadline - time.monotonic(), 0.0)
            raise HorovodInternalError(
                f"waited {waited:.0f} s for rank(s) {missing} to come to hvd.init() "
                f"(limit: HOROVOD_GLOO_TIMEOUT_SECONDS={limit_s:g})"
            ) from error

    def store(self, prefix: str, *, limit_s: float, guard: Callable[[], None]) -> Store:
        # A connection of its own: a TCPStore lets one thread at a time use it, also while that one waits for a key.
        # Two process sets that connect at the same time would wait for one another.
        return PrefixStore(prefix, _tcp_store(self._meeting, limit_s, is_master=False))


_open: dict[Meeting, Gathering] = {}


def open_gathering(world: World, *, limit_s: float) -> Gathering:
    """The meeting place of this world, opened now or kept from an earlier initialisation."""
    meeting = world.meeting
    if meeting in _open:
        return _open[meeting]
    gathering: Gathering
    if meeting.kind == "hora":
        # An elastic worker asks for its next place over this connection, so it speaks for that worker.
        worker = world.worker if world.elastic else -1
        client = ControlClient.connect(meeting, name=f"rank {world.rank}", timeout_s=limit_s, worker=worker)
        gathering = _ControlGathering(client)
    else:
        gathering = _StoreGathering(meeting, limit_s)
    _open[meeting] = gathering
    return gathering


def control_client(world: World) -> ControlClient | None:
    """The control connection of this world, if a Hora launcher runs it and it is open."""
    gathering = _open.get(world.meeting)
    return gathering.client if isinstance(gathering, _ControlGathering) else None


def _tcp_store(meeting: Meeting, limit_s: float, *, is_master: bool) -> Store:
    try:
        return TCPStore(
            meeting.address,
            meeting.port,
            is_master=is_master,
            wait_for_workers=False,
            timeout=timedelta(seconds=limit_s),
        )
    except (RuntimeError, dist.DistError) as error:
        raise HorovodInternalError(
            f"cannot reach the meeting place at {meeting.endpoint} (MASTER_ADDR, MASTER_PORT): {error}"
        ) from error


def host_fingerprint() -> str:
    """Equal for processes that may share a host; attaching to one another's memory then proves it."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def local_address(towards: str, interface: str = "") -> str:
    """This host's IPv4 address: of `interface`, or the one from which `towards` is reached."""
    if interface:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            request = struct.pack("256s", interface[:15].encode())
            try:
                reply = fcntl.ioctl(sock.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError as error:
                raise ValueError(
                    f"network interface {interface!r} has no IPv4 address on this host; "
                    "set HOROVOD_GLOO_IFACE to one that has"
                ) from error
            return socket.inet_ntoa(reply[20:24])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((towards or "127.0.0.1", 9))  # chooses a route, sends nothing
        return str(sock.getsockname()[0])
