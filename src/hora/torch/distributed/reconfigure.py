"""`Reconfigurable`: a group whose members change while the program goes on, by torch's interface for it (from 2.14 on).

The group is created unconnected. Each process gives its handle to the others, by any way, and calls `reconfigure` with
the handles of the new members: it leaves its world, meets them at the store of the first one, and the same Python
object is the group's end in the new world. A list of handles is the order of the ranks; of a set, the oldest process
is rank 0, so that ranks that have been there before newcomers keep their order.
"""

from __future__ import annotations

import socket
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hora import engine
from hora.config import EngineConfig
from hora.engine.rendezvous import MeetingPlace, age, close_store, open_meeting, world_of_store
from hora.errors import HorovodInternalError
from hora.torch.distributed.endpoint import Endpoint
from hora.torch.distributed.live import remember
from hora.torch.distributed.work import DONE, Work
from hora.world import World


class Failed(Work):
    """A reconfiguration that failed; it has no parts."""

    def __init__(self, error: Exception) -> None:
        super().__init__([])
        self._error = error

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        raise self._error

    def exception(self) -> Exception | None:
        return self._error


class Reconfigurable(Endpoint):
    """The methods of a group for `init_process_group(..., enable_reconfigure=True)`."""

    _meeting: MeetingPlace | None = None

    def start_unconnected(self, rank: int, size: int) -> None:
        """Wait for the first `reconfigure`, with the place that the program has named."""
        self._rank, self._size = rank, size
        self._meeting, self._uuids = MeetingPlace(EngineConfig.from_env()), set[int]()
        weakref.finalize(self, self._meeting.close)
        self.lacks_members = "call reconfigure first: the group was created with enable_reconfigure=True"

    @property
    def supports_reconfigure(self) -> bool:
        return self._meeting is not None

    def get_reconfigure_handle(self) -> str:
        return self._checked_meeting().handle

    def reconfigure(self, opts: Any) -> Work:
        """Leave the present members and become one of those of these handles (collective among them)."""
        meeting = self._checked_meeting()
        if opts.uuid in self._uuids:
            raise RuntimeError(
                f"reconfigure: the uuid {opts.uuid} was already used by this group: give each attempt its own"
            )
        handles = (
            list(opts.handles)
            if isinstance(opts.handles, list)
            else sorted(opts.handles, key=lambda one: (age(one), one))
        )
        if handles.count(meeting.handle) != 1:
            raise ValueError(f"reconfigure: this process must be one of the {len(handles)} handles, once")
        self._uuids.add(opts.uuid)
        limit_s = opts.timeout.total_seconds() if opts.timeout else self._limit_s
        try:
            self._leave()
            self._meet(f"reconfigure/{opts.uuid}", handles, handles.index(meeting.handle), limit_s)
        except (HorovodInternalError, OSError, TimeoutError) as error:
            reason = f"the reconfiguration {opts.uuid} of {len(handles)} member(s) failed: {error}"
            self.lacks_members = f"{reason}. Try again with another uuid"
            return Failed(HorovodInternalError(reason))
        return DONE

    def _checked_meeting(self) -> MeetingPlace:
        if self._meeting is None:
            raise RuntimeError("this group has fixed members: call init_process_group with enable_reconfigure=True")
        return self._meeting

    def _leave(self) -> None:
        self.lacks_members = "the group is being reconfigured"
        if engine.is_initialized():
            point = engine.current_runtime().world.rendezvous
            engine.shutdown(behind=True)
            close_store(point)

    def _meet(self, name: str, handles: list[str], rank: int, limit_s: float) -> None:
        deadline, size = time.monotonic() + limit_s, len(handles)
        world = alone()
        if size > 1:
            store, leave = open_meeting(handles[0], name, limit_s=limit_s)
            left_s = max(deadline - time.monotonic(), 0.001)
            world = world_of_store(store, rank, size, config=EngineConfig.from_env(), limit_s=left_s)
        engine.init(world=world)
        runtime = engine.current_runtime()
        left_s = max(deadline - time.monotonic(), 0.001)
        self.enter(rank, size, runtime, runtime.sets.add_group(range(size), self._name, limit_s=left_s))
        self.lacks_members = ""
        remember(self, self._name)
        records: dict[Any, dict[int, int]] = dist.distributed_c10d._world.pg_group_ranks
        records[self] = {member: member for member in range(size)}
        if size > 1:
            self.wait_for_all("reconfigure")
            leave()

    def shutdown(self) -> None:
        super().shutdown()
        self.lacks_members = self.lacks_members or "the group was shut down; reconfigure makes it usable again"


def alone() -> World:
    """Return a world of this process."""
    return World(launcher="torch", hostname=socket.gethostname())
