"""Comparison of ranks that must start with the same Keras model."""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import hora.torch as hvd
from hora.keras.values import to_numpy
from hora.torch.basics import generation
from hora.torch.drift.watch import DriftSettings
from hora.torch.process_sets import ProcessSet, global_process_set

log = logging.getLogger("hora")

# The broadcast callback runs after the first batch, or with steps_per_execution after that many.
_WARN_AT, _RAISE_AT = 2, 64


class StartCheck:
    """Compares the variables before a reduction: first with a warning, much later with an error.

    It starts over in every world, because its ranks may be of different ages.
    """

    def __init__(self, process_set: ProcessSet = global_process_set, on_drift: str = "warn") -> None:
        self._process_set = process_set
        self._is_off = DriftSettings(on_drift=on_drift).on_drift == "ignore"
        self._begin()

    def _begin(self) -> None:
        self._num_calls = 0
        self._differ = False
        self._generation: int | None = None

    def __call__(self, variables: Sequence[Any]) -> Callable[..., None] | None:
        """Return the comparison that is due before this reduction, if any. It waits for the other ranks.

        It takes a name among the ranks, for comparisons at the same time.
        """
        if self._generation != generation():
            self._begin()
            self._generation = generation()
        self._num_calls += 1
        if self._is_off:
            return None
        if self._num_calls == _WARN_AT or (self._num_calls == _RAISE_AT and self._differ):
            return functools.partial(self._compare, variables)
        return None

    @property
    def agreed(self) -> bool:
        """Return whether the ranks have begun with the same variables, and this call compares nothing."""
        return self._num_calls > _WARN_AT and not self._differ

    def _compare(self, variables: Sequence[Any], name: str = "keras.start_check") -> None:
        mine = [(tuple(variable.shape), zlib.crc32(to_numpy(variable).tobytes())) for variable in variables]
        found = hvd.allgather_object(mine, name=name, process_set=self._process_set)
        ranks = self._process_set.ranks or range(len(found))
        others = [rank for rank, theirs in zip(ranks, found, strict=True) if theirs != found[0]]
        self._differ = bool(others)
        if not others:
            return
        text = (
            f"the weights on rank {', '.join(map(str, others))} are not those of rank {ranks[0]}: gradients are "
            "reduced, but the ranks did not start with the same model; add "
            "hvd.callbacks.BroadcastGlobalVariablesCallback(0) to the callbacks of fit, or call "
            "hvd.broadcast_variables(model.variables, root_rank=0)"
        )
        if self._num_calls >= _RAISE_AT:
            raise ValueError(f"{text} (after {self._num_calls} steps, on rank {hvd.rank()})")
        if hvd.rank() == ranks[0]:
            log.warning("%s", text)
