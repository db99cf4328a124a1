"""A group: members that can send bytes to one another, and never wait for ever.

Every wait makes the liveness check several times a second; when that raises, the limit passes or a peer's connection
breaks, the group is discarded: its sockets are shut down, which the peers notice at once, and it cannot be used again.
What the bytes mean is not known here: `DistributedTransport` calls, with flat tensors. `stream` has our own kind, for
CPU tensors; `nccl` has torch.distributed's.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch

from hora.engine.transport.base import AliveCheck
from hora.errors import HorovodInternalError

__all__ = ["SLICE", "PeerGroup", "Work", "connect"]

SLICE = timedelta(milliseconds=50)
# A backend notices a broken connection before the engine has learnt who died, but only the engine can name the rank.
_GRACE_S = 1.5

T = TypeVar("T")

# Work under way, and what it is called in messages.
Work = tuple[Any, str]


class PeerGroup(ABC):
    """Base of all groups. Members start the same exchanges in the same order."""

    backend = "none"

    def __init__(self, *, check_alive: AliveCheck, limit_s: float) -> None:
        self._check_alive = check_alive
        self._limit_s = limit_s
        self._lost = ""

    @abstractmethod
    def start_alltoall(
        self, output: torch.Tensor, input: torch.Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Work:
        """Element counts per member; everything travels directly from sender to receiver, in one step."""

    @abstractmethod
    def start_allgather(self, output: torch.Tensor, input: torch.Tensor, counts: Sequence[int]) -> Work:
        """Every member's elements, so many of each, in member order."""

    @abstractmethod
    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """The root's bytes into all members' tensors."""

    def finish(self, pending: Work) -> None:
        """Wait for what was started; several may be under way."""
        try:
            self._wait(*pending)
        except (RuntimeError, OSError) as error:
            self._fail(error, pending[1])

    @abstractmethod
    def close(self) -> None:
        """Let go in good order: no work is under way."""

    @abstractmethod
    def discard(self) -> None:
        """Let go while work may be under way, and make the peers notice."""

    @abstractmethod
    def _wait(self, work: Any, what: str) -> None:
        """Return when the work is done."""

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


def connect(make: Callable[[], T], *, what: str, check_alive: AliveCheck, limit_s: float) -> T:
    """Run `make`, which blocks until all members are there, in a thread: so the liveness check can end the wait."""
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(make())
        except BaseException as error:  # carried over to the waiting thread
            failure.append(error)

    thread = threading.Thread(target=run, name="hora-connect", daemon=True)
    thread.start()
    deadline = time.monotonic() + limit_s
    while thread.is_alive():
        thread.join(SLICE.total_seconds())
        if thread.is_alive():
            check_alive()
            if time.monotonic() > deadline:
                raise HorovodInternalError(f"waited {limit_s:g} s for {what}")
    if failure:
        check_alive()
        raise HorovodInternalError(f"failed to get {what}: {failure[0]}") from failure[0]
    return result[0]
