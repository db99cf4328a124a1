"""The meeting: where the ranks of a world exchange the first words, before they are connected to one another.

It takes place at the `MeetingPoint` that the launcher provided (`hora.world`): Hora's authenticated rendezvous, or a torch
TCPStore under torchrun and other launchers. `open_meeting` connects once per process; a runtime that is initialised again
uses the same connection. Nothing that comes through it is unpickled. Called by `peers` and `process`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hora.engine.store import ControlStore
from hora.errors import HorovodInternalError
from hora.net.client import ControlClient
from hora.net.secret_file import read_held_secret
from hora.net.wire import derived_secret
from hora.world import MeetingPoint, World

__all__ = ["Meeting", "control_client", "open_meeting"]


class Meeting(Protocol):
    """What the ranks of a world can do while they meet."""

    def allgather(self, key: str, value: bytes, *, rank: int, size: int, limit_s: float) -> list[bytes]:
        """Every rank's value, in rank order. HorovodInternalError names the ranks that did not come."""

    def secret_for(self, purpose: str) -> bytes | None:
        """A secret that only the ranks of this job can derive; None where no launcher gave them one in common."""

    def store(self, prefix: str, *, limit_s: float, guard: Callable[[], None]) -> Store:
        """A torch store for gloo and NCCL whose keys cannot clash with other prefixes."""


class _RendezvousMeeting:
    """At the rendezvous of a Hora launcher."""

    def __init__(self, client: ControlClient, point: MeetingPoint) -> None:
        self.client = client
        self._point = point

    def secret_for(self, purpose: str) -> bytes | None:
        return derived_secret(read_held_secret(self._point.secret_file), f"{self._point.job}: {purpose}")

    def allgather(self, key: str, value: bytes, *, rank: int, size: int, limit_s: float) -> list[bytes]:
        try:
            return self.client.allgather(key, value, rank=rank, size=size, timeout_s=limit_s)
        except TimeoutError as error:
            raise HorovodInternalError(f"{error} (limit: HOROVOD_GLOO_TIMEOUT_SECONDS={limit_s:g})") from error

    def store(self, prefix: str, *, limit_s: float, guard: Callable[[], None]) -> Store:
        return ControlStore(self.client, prefix=f"{prefix}/", timeout_s=limit_s, guard=guard)


class _StoreMeeting:
    """At a torch TCPStore."""

    def __init__(self, point: MeetingPoint, limit_s: float) -> None:
        self._point = point
        self._store = _tcp_store(point, limit_s, is_master=point.host_store)

    def secret_for(self, purpose: str) -> bytes | None:
        return None

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
        return PrefixStore(prefix, _tcp_store(self._point, limit_s, is_master=False))


_open: dict[MeetingPoint, Meeting] = {}


def open_meeting(world: World, *, limit_s: float) -> Meeting:
    """The meeting of this world: a new one, or the one of an earlier initialisation."""
    point = world.meeting
    if point in _open:
        return _open[point]
    meeting: Meeting
    if point.kind == "hora":
        # An elastic worker asks for its next place over this connection, so it speaks for that worker.
        worker = world.worker if world.elastic else -1
        client = ControlClient.connect(point, name=f"rank {world.rank}", timeout_s=limit_s, worker=worker)
        meeting = _RendezvousMeeting(client, point)
    else:
        meeting = _StoreMeeting(point, limit_s)
    _open[point] = meeting
    return meeting


def control_client(world: World) -> ControlClient | None:
    """The control connection of this world, if a Hora launcher runs it and it is open."""
    meeting = _open.get(world.meeting)
    return meeting.client if isinstance(meeting, _RendezvousMeeting) else None


def _tcp_store(point: MeetingPoint, limit_s: float, *, is_master: bool) -> Store:
    try:
        return TCPStore(
            point.address,
            point.port,
            is_master=is_master,
            wait_for_workers=False,
            timeout=timedelta(seconds=limit_s),
        )
    except (RuntimeError, dist.DistError) as error:
        raise HorovodInternalError(
            f"cannot reach the meeting place at {point.endpoint} (MASTER_ADDR, MASTER_PORT): {error}"
        ) from error
