"""Comparison of ranks that must train the same Keras model: when they start, and from then on."""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import hora.torch as hvd
from hora.keras.hyperparameters import compared_numbers
from hora.keras.values import as_torch, to_numpy
from hora.torch.basics import generation
from hora.torch.drift.watch import DriftSettings, DriftWatch
from hora.torch.process_sets import ProcessSet, global_process_set

log = logging.getLogger("hora")

# The broadcast callback runs after the first batch, or with steps_per_execution after that many.
_WARN_AT, _RAISE_AT = 2, 64


class StartCheck:
    """Compares the variables before a reduction: first with a warning, much later with an error.

    Once they agree, `watch_drift` compares them and the hyperparameters now and then. It starts over in every world,
    because its ranks may be of different ages.
    """

    def __init__(self, process_set: ProcessSet = global_process_set) -> None:
        self._process_set = process_set
        self._begin()

    def _begin(self) -> None:
        self._num_calls = 0
        self._differ = False
        self._generation: int | None = None
        self._watch: DriftWatch | None = None
        self._groups: list[dict[str, Any]] = []

    def __call__(self, variables: Sequence[Any]) -> Callable[..., None] | None:
        """Return the comparison that is due before this reduction, if any. It waits for the other ranks.

        It takes a name among the ranks, for comparisons at the same time.
        """
        if self._generation != generation():
            self._begin()
            self._generation = generation()
        self._num_calls += 1
        if self._num_calls == _WARN_AT or (self._num_calls == _RAISE_AT and self._differ):
            return functools.partial(self._compare, variables)
        return None

    def watch_drift(self, variables: Sequence[Any], optimizer: Any) -> Callable[..., None] | None:
        """Return what a call does, and in between the comparison of ranks that had the same variables in the beginning.

        Hyperparameters are read when they are compared: reading a variable takes longer than counting the step.
        """
        due = self(variables)
        if due is not None or self._num_calls < _WARN_AT or self._differ or not variables:
            return due
        if self._watch is None:
            self._groups = [compared_numbers(optimizer)]
            set_id = self._process_set.process_set_id or 0
            self._watch = DriftWatch(f"keras.{_names(variables)[0]}", DriftSettings(), process_set_id=set_id)
        if self._watch.is_due():
            return functools.partial(self._compare_now, self._watch, variables, optimizer)
        self._watch.applied(self._groups)
        return None

    def _compare_now(self, watch: DriftWatch, variables: Sequence[Any], optimizer: Any, name: str = "") -> None:
        self._groups = [compared_numbers(optimizer)]
        watch.applied(self._groups)
        arrays = [as_torch(to_numpy(variable)) for variable in variables]
        tensors = list(zip(_names(variables), arrays, strict=True))
        watch.take_digests(self._groups, tensors)
        watch.compare(tensors)

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


def _names(variables: Sequence[Any]) -> list[str]:
    """Return a name for every variable, which Keras 2 may give to several."""
    names = [str(getattr(variable, "path", getattr(variable, "name", "?"))) for variable in variables]
    return names if len({*names}) == len(names) else [f"{name} ({number})" for number, name in enumerate(names)]
