"""Steps of several backward passes, which have begun: part of each elastic state that has their variables."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

_created = itertools.count()
_all: weakref.WeakSet[BegunStep] = weakref.WeakSet()


class BegunStep:
    """The backward passes since the last step: their number, and the sums of their gradients on this rank.

    `sums` have the ids of their variables as keys. `read` and `assign` access TensorFlow's variables.
    """

    def __init__(self) -> None:
        self._created = next(_created)
        self._owner: Callable[[], Any] = lambda: None

    def remember(self) -> None:
        """Make it part of the states that have variables whose gradients it adds."""
        _all.add(self)

    def belong_to(self, optimizer: Any) -> None:
        """Make it, if it is remembered, part of the states that have variables of this optimizer."""
        self._owner = weakref.ref(optimizer)

    def begun(self, read: Callable[[list[Any]], list[Any]]) -> tuple[int, dict[int, Any]]:
        """Return the number of passes since the last step, and copies of their sums."""
        raise NotImplementedError

    def resume(self, num_begun: int, sums: Mapping[int, Any], assign: Callable[[list[Any], list[Any]], None]) -> None:
        """Continue a step after this many passes. Sums that are not given are zero."""
        raise NotImplementedError

    def summed(self) -> Collection[int]:
        """Return the ids of the variables whose gradients were added."""
        raise NotImplementedError


def begun_steps_of(variables: Collection[Any], variables_of: Callable[[Any], list[Any]]) -> list[BegunStep]:
    """Return what accumulates gradients for these variables, in the order of creation.

    `variables_of` returns the variables of an optimizer.
    """
    ids = {id(variable) for variable in variables}

    def is_theirs(step: BegunStep) -> bool:
        owned = [] if step._owner() is None else variables_of(step._owner())
        return not ids.isdisjoint(step.summed()) or any(id(variable) in ids for variable in owned)

    return sorted(filter(is_theirs, list(_all)), key=lambda step: step._created)
