"""Reads saved models and checkpoints: torch's own layers, optimizers and losses, tensors, data.

Anything else in a file (a class of the user's, a function of a notebook, TorchScript) can run any code when it is read.
Such a file is an error unless the caller trusts it: `trusted=True`, or HORA_TRUST_FILES=1. Classes that the user has
declared harmless to torch (`torch.serialization.add_safe_globals`) are read like torch's own.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any, NoReturn

import torch
from pyspark.sql import types as spark_types

from hora.config import trusts_files
from hora.safe_load import ForeignError, Name, Vocabulary, load_pickle, load_torch
from hora.spark.estimator.packing import ModelAndOptimizer

__all__ = ["Rename", "load", "load_checkpoint", "refuse"]

Rename = Callable[[str, str], Name]

_CLASSES: dict[str, type] = {
    "torch.nn.": torch.nn.Module,
    "torch.optim.": torch.optim.Optimizer,
    "pyspark.sql.types.": spark_types.DataType,
}
_NOT_DATA = ("torch.nn.parallel.",)  # their instances open connections
_FUNCTIONS = {"torch.nn.functional": torch.nn.functional, "torch._C._nn": torch._C._nn}
_PICKLED_NAMES = ("hora.spark.estimator.packing", "hora.spark.estimator.persistence")  # where it is, and where it was


def load(data: bytes, *, what: str, rename: Rename, trusted: bool = False) -> Any:
    """The object in this pickle. ValueError, which names it as `what`, if it needs trust that it does not have."""
    try:
        return load_pickle(data, _vocabulary(rename)).plain()
    except ForeignError as error:
        if not (trusted or trusts_files()):
            refuse(what, str(error))
    return _Trusting(data, rename).load()


def load_checkpoint(data: bytes, *, what: str, without: Sequence[str] = ()) -> dict[str, Any]:
    """A checkpoint that `torch.save` wrote, without these keys. ValueError, which names it as `what`, if it is none."""
    try:
        content: dict[str, Any] = load_torch(data).without(*without).plain()
    except ForeignError as error:
        refuse(what, str(error))
    except ValueError as error:
        raise ValueError(f"{what} cannot be read: {error}") from error
    return content


def refuse(what: str, held: str) -> NoReturn:
    """ValueError for a file that can run code."""
    raise ValueError(
        f"{what} holds {held}, and reading it can run any code of its author. If you trust the file, load it with "
        "trusted=True or set HORA_TRUST_FILES=1 (without HORA_STRICT=1). A class of your own that is harmless can be "
        "declared so with torch.serialization.add_safe_globals (torch 2.4 and newer)"
    )


class _Trusting(pickle.Unpickler):
    def __init__(self, data: bytes, rename: Rename) -> None:
        super().__init__(io.BytesIO(data))
        self._rename = rename

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(*self._rename(module, name))


def _vocabulary(rename: Rename) -> Vocabulary:
    return Vocabulary(instance_class=_instance_class, value=_function, rename=rename)


def _instance_class(module: str, name: str) -> type | None:
    """A layer, an optimizer or a type, where torch and Spark define them."""
    if module in _PICKLED_NAMES and name == ModelAndOptimizer.__name__:
        return ModelAndOptimizer
    if module.startswith(_NOT_DATA):
        return None
    for prefix, base in _CLASSES.items():
        if f"{module}.".startswith(prefix):
            found = _attribute(module, name)
            if isinstance(found, type) and issubclass(found, base) and f"{found.__module__}.".startswith(prefix):
                return found
    return None


def _function(module: str, name: str) -> Any:
    """A loss, as torch defines it."""
    found = getattr(_FUNCTIONS.get(module), name, None)
    known = isinstance(found, FunctionType | BuiltinFunctionType) and found.__module__ in _FUNCTIONS
    return found if known else None


def _attribute(module: str, name: str) -> Any:
    """A name of a module that is imported already: a file imports nothing."""
    return getattr(sys.modules.get(module), name, None) if "." not in name else None
