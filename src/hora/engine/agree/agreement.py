"""Agreement: every member of a process set learns the same announcements in the same rounds.

A round is a set of announcements that all members feed to their planners (`plan`) before they close it, so that all of
them derive the same batches. How a round comes about depends on where the members are:

    one member            `LocalAgreement`, here: what it announces is agreed
    all on one host       `agree.shared_memory`: the first member cuts rounds, all read them in shared memory
    on several hosts      `agree.tree`: announcements go up a tree of the members, rounds come down it

What is announced, as bytes, is in `agree.announcement`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

from hora.engine.plan import Batch, Planner
from hora.engine.request import Signature

__all__ = ["Agreement", "LocalAgreement", "UnannouncedRequests"]

# By request, with its running number: the signature at the places of the members that wait for it.
UnannouncedRequests = dict[tuple[Signature, int], list[Signature | None]]


class Agreement(ABC):
    """One per process set. `announce` comes from any thread under the queue's lock, the rest from the driver."""

    rounds = 0  # that this member has taken

    @property
    def holds_back(self) -> bool:
        """Return whether announcements could not be sent for lack of room; `flush` tries again."""
        return False

    @abstractmethod
    def announce(self, signature: Signature, instance: int) -> None:
        """Tell the other members about a request of this rank."""

    @abstractmethod
    def poll(self, planner: Planner) -> list[Batch] | None:
        """Feed what is new to the planner; the batches of the next round, or None when there is no new round."""

    def wait(self) -> None:  # noqa: B027
        """Sleep until something may have changed, or for a short while."""

    def wake(self) -> None:  # noqa: B027
        """Wake this rank's own driver, where a round or an announcement of its own does not."""

    def flush(self) -> None:  # noqa: B027
        """Send what could not be sent before. Under the same lock as `announce`."""

    def unannounced_requests(self) -> UnannouncedRequests:
        """Return the requests that members wait for without having announced them, by signature, with those members."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Let go of what it holds."""


class LocalAgreement(Agreement):
    """A set of one member: whatever it announces is agreed."""

    def __init__(self) -> None:
        self._news: deque[tuple[Signature, int]] = deque()

    def announce(self, signature: Signature, instance: int) -> None:
        self._news.append((signature, instance))

    def poll(self, planner: Planner) -> list[Batch] | None:
        if not self._news:
            return None
        while self._news:
            planner.feed(0, *self._news.popleft())
        return planner.close_round()
