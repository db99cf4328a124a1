"""A look whether the ranks of a Keras training have begun from the same weights."""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import hora.torch as hvd
from hora.keras.values import to_numpy
from hora.torch.basics import generation

__all__ = ["StartCheck"]

log = logging.getLogger("hora")

# The broadcast callback runs after the first batch, and with steps_per_execution after so many.
_WARN_AT, _RAISE_AT = 2, 64


class StartCheck:
    """Compares the variables before a reduction: once with a warning, much later with an error.

    In every world anew, because its ranks may be of different ages.
    """

    def __init__(self) -> None:
        self._num_calls = 0
        self._differ = False
        self._generation: int | None = None

    def __call__(self, variables: Sequence[Any]) -> Callable[[], None] | None:
        """Return the comparison that is due before this reduction, if one is. It waits for the other ranks."""
        if self._generation != generation():
            self._generation, self._num_calls, self._differ = generation(), 0, False
        self._num_calls += 1
        if self._num_calls == _WARN_AT or (self._num_calls == _RAISE_AT and self._differ):
            return functools.partial(self._compare, variables)
        return None

    def _compare(self, variables: Sequence[Any]) -> None:
        mine = [(tuple(variable.shape), zlib.crc32(to_numpy(variable).tobytes())) for variable in variables]
        found = hvd.allgather_object(mine, name="keras.start_check")
        others = [rank for rank, theirs in enumerate(found) if theirs != found[0]]
        self._differ = bool(others)
        if not others:
            return
        text = (
            f"the weights on rank {', '.join(map(str, others))} are not those of rank 0: gradients are reduced, but "
            "the ranks did not begin from the same model; add hvd.callbacks.BroadcastGlobalVariablesCallback(0) to "
            "the callbacks of fit, or call hvd.broadcast_variables(model.variables, root_rank=0)"
        )
        if self._num_calls >= _RAISE_AT:
            raise ValueError(f"{text} (after {self._num_calls} steps, on rank {hvd.rank()})")
        if hvd.rank() == 0:
            log.warning("%s", text)
