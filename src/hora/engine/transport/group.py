"""A group of members that can send bytes to one another and never wait forever.

Every wait runs the liveness check several times a second. If that raises, the limit passes or a peer's connection
breaks, the group is discarded: its sockets are shut down, which the peers notice at once, and it cannot be used again.
A group does not interpret the bytes: `DistributedTransport` calls it with flat tensors. `stream` implements it for CPU
tensors, `nccl` with torch.distributed.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch

from hora.engine.shm import counters
from hora.engine.transport.base import AliveCheck, Membership
from hora.errors import HorovodInternalError

SLICE = timedelta(milliseconds=50)
# A backend notices a broken connection before the engine knows which rank died, but only the engine can name it.
_GRACE_S = 1.5

T = TypeVar("T")

# Work in flight, and its name in messages.
Work = tuple[Any, str]


class PeerGroup(ABC):
    """Base class of groups. Members start the same exchanges in the same order."""

    backend = "none"

    def __init__(self, membership: Membership) -> None:
        self.member, self.num_members, self._check_alive = membership
        self._lost = ""

    @abstractmethod
    def start_alltoall(
        self, output: torch.Tensor, input: torch.Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Work:
        """Start an alltoall with element counts per member; data goes directly from sender to receiver, in one step."""

    @abstractmethod
    def start_allgather(self, output: torch.Tensor, input: torch.Tensor, counts: Sequence[int]) -> Work:
        """Start gathering every member's elements, `counts[m]` of member m, in member order."""

    @abstractmethod
    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """Start copying the root's bytes to all members' tensors."""

    def finish(self, pending: Work) -> None:
        """Wait for started work; several exchanges may be in flight."""
        try:
            self._wait(*pending)
        except (RuntimeError, OSError) as error:
            self._fail(error, pending[1])

    @abstractmethod
    def close(self) -> None:
        """Close in order: no work is in flight."""

    def discard(self) -> None:
        """Close while work may be in flight, and make the peers notice: the kernel tells them of closed connections."""
        self.close()

    @abstractmethod
    def _wait(self, work: Any, what: str) -> None:
        """Wait until the work is done."""

    def _fail(self, error: Exception, what: str) -> NoReturn:
        if isinstance(error, HorovodInternalError):
            self._lost = str(error)
            self.discard()
            raise error
        # torch raises nothing more specific than RuntimeError for a broken connection
        self._lost = f"{what} over {self.backend} failed, a peer is lost or the network is broken: {error}"
        self.discard()
        self._raise_if_dead()
        raise HorovodInternalError(self._lost) from error

    def _raise_if_dead(self) -> None:
        """Give the engine a moment to find out which peer is lost: its error names the rank, ours cannot."""
        deadline = time.monotonic() + _GRACE_S
        pause = threading.Event()
        while time.monotonic() < deadline:
            self._check_alive()
            pause.wait(0.02)


def limited(check_alive: AliveCheck, what: str) -> AliveCheck:
    """Return the check for one wait, which also raises after the limit."""
    limit_s = counters.COLLECTIVE_LIMIT_S
    deadline = time.monotonic() + limit_s

    def look_around() -> None:
        check_alive()
        if time.monotonic() > deadline:
            raise HorovodInternalError(f"waited {limit_s:g} s for {what}")

    return look_around


def connect(make: Callable[[], T], what: str, check_alive: AliveCheck) -> T:
    """Run `make`, which blocks until all members are ready, on a thread; the liveness check can end the wait."""
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:  # re-raised on the waiting thread
            made.set_exception(error)

    threading.Thread(target=run, name="hora-connect", daemon=True).start()
    look_around = limited(check_alive, what)
    while not wait([made], SLICE.total_seconds()).done:
        look_around()
    failure = made.exception()
    if failure is not None:
        check_alive()
        raise HorovodInternalError(f"failed to get {what}: {failure}") from failure
    return made.result()
