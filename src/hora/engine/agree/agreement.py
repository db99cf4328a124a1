"""Agreement: every member of a process set learns the same announcements in the same rounds.

A round is a set of announcements that all members feed to their planners (`plan`) before they close it, so that all of
them derive the same batches. How a round comes about depends on where the members are:

    one member            `LocalAgreement`, here: what it announces is agreed
    all on one host       `agree.shared_memory`: the first member cuts rounds, all read them in shared memory
    on several hosts      `agree.tree`: announcements go up a tree of the members, rounds come down it

What is announced, as bytes, is in `agree.announcement`.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from hora.engine.plan import Batch, Planner
from hora.engine.request import Signature

__all__ = ["Agreement", "LocalAgreement", "UnannouncedRequests"]

# By request, with its running number: the signature at the places of the members that wait for it.
UnannouncedRequests = dict[tuple[Signature, int], list[Signature | None]]


class Agreement(Protocol):
    """One per process set. `announce` comes from any thread under the queue's lock, the rest from the driver."""

    @property
    def holds_back(self) -> bool:
        """Return whether announcements could not be sent for lack of room; `flush` tries again."""

    def announce(self, signature: Signature, instance: int) -> None:
        """Tell the other members about a request of this rank."""

    def poll(self, planner: Planner) -> list[Batch] | None:
        """Feed what is new to the planner; the batches of the next round, or None when there is no new round."""

    def wait(self) -> None:
        """Sleep until something may have changed, or for a short while."""

    def wake(self) -> None:
        """Wake this rank's own driver."""

    def flush(self) -> None:
        """Send what could not be sent before. Under the same lock as `announce`."""

    def unannounced_requests(self) -> UnannouncedRequests:
        """Return the requests that members wait for without having announced them, by signature, with those members."""

    def close(self) -> None:
        """Let go of what it holds."""


class LocalAgreement:
    """A set of one member: whatever it announces is agreed."""

    holds_back = False

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

    def wait(self) -> None:
        """Nothing to wait for: an announcement is ready at once."""

    def wake(self) -> None:
        """The driver never sleeps."""

    def flush(self) -> None:
        """Nothing is kept back."""

    def unannounced_requests(self) -> UnannouncedRequests:
        return {}

    def close(self) -> None:
        """Nothing is held."""
