"""Ranks that train the same variables compare now and then whether these stay equal.

`hora.torch.drift.watch` compares. It runs before a reduction of gradients, when all ranks have met anyway, so most
steps only count. Variables of a session's graph have no values outside the session: they are not compared.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
import torch

from hora.tensorflow.bridge import DTYPES, to_torch
from hora.torch.drift.difference import Remedies
from hora.torch.drift.watch import DriftSettings, DriftWatch
from hora.torch.process_sets import ProcessSet

_REMEDIES = Remedies(
    parameters="hvd.broadcast_variables(model.variables, root_rank=0)",
    settings="hvd.broadcast_variables(optimizer.variables, root_rank=0)",
)
_by_first_variable: dict[tuple[int, int], Comparisons] = {}


class Comparisons:
    """The comparisons of an optimizer, or of all tapes for the same variables. `numbers`: the hyperparameters now.

    Hyperparameters are read when they are compared: reading a variable takes longer than counting the step.
    """

    def __init__(
        self, settings: DriftSettings, process_set: ProcessSet, numbers: Callable[[], Mapping[str, Any]] | None = None
    ) -> None:
        self._settings = settings
        self._process_set = process_set
        self._numbers = numbers
        self._groups: list[Mapping[str, Any]] = []
        self._watches: dict[str, DriftWatch] = {}

    def due(self, variables: Sequence[Any], name: str) -> Callable[..., None] | None:
        """Count a reduction; return the comparison that is due before it, if any, which waits for the other ranks.

        `name`: of the operation among the ranks; its executions compare with one another only.
        """
        name = name.partition("#")[0]  # without the iteration of a loop
        watch = self._watches.get(name)
        if watch is None or not watch.is_current:
            self._groups = self._read()
            set_id = self._process_set.process_set_id or 0
            watch = self._watches[name] = DriftWatch(f"tensorflow.{name}", self._settings, process_set_id=set_id)
        if watch.is_due():
            return functools.partial(self._compare, watch, variables)
        watch.applied(self._groups)
        return None

    def _read(self) -> list[Mapping[str, Any]]:
        return [] if self._numbers is None else [self._numbers()]

    def _compare(self, watch: DriftWatch, variables: Sequence[Any], name: str = "") -> None:
        self._groups = self._read()
        watch.applied(self._groups)
        tensors = _named(variables)
        watch.compute_digests(self._groups, tensors)
        watch.compare(tensors)


def due_for_tape(
    settings: DriftSettings, process_set: ProcessSet, variables: Sequence[Any], name: str
) -> Callable[..., None] | None:
    """Count a reduction of all tapes for these variables, of which they share the first; see `Comparisons.due`."""
    key = id(variables[0]), process_set.process_set_id or 0
    found = _by_first_variable.get(key)
    if found is None:
        found = _by_first_variable[key] = Comparisons(settings, process_set)
        weakref.finalize(variables[0], _by_first_variable.pop, key, None)
    return found.due(variables, name)


def settings_for(on_drift: str) -> DriftSettings:
    """Return the user's settings; raises ValueError for an unknown choice."""
    return DriftSettings(on_drift=on_drift, remedies=_REMEDIES)


def plain_numbers(optimizer: Any) -> dict[str, float]:
    """Return the hyperparameters of an optimizer of `tf.compat.v1` that are plain numbers, not tensors."""
    return {name.strip("_"): value for name, value in vars(optimizer).items() if type(value) in (int, float)}


def compared(sources: Sequence[Any], local: Mapping[int, Any]) -> list[Any]:
    """Return the variables that all ranks train alike."""
    return [
        source
        for source in sources
        if id(source) not in local and hasattr(source, "assign") and getattr(source, "trainable", True)
    ]


def _named(variables: Sequence[Any]) -> list[tuple[str, torch.Tensor]]:
    """Return the values, with names that are the same on all ranks: those of layers may have other numbers."""
    found, total = [], len(variables)
    for number, variable in enumerate(variables, start=1):
        if tf.as_dtype(variable.dtype) in DTYPES:
            name = str(getattr(variable, "path", getattr(variable, "name", "?")))
            name = re.sub(r"_\d+(?=/|:|$)", "", name).removesuffix(":0")
            found.append((f"{name} (variable {number} of {total})", to_torch(tf.convert_to_tensor(variable))))
    return found
