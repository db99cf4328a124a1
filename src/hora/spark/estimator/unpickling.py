"""Reading saved models without running code that they brought: torch's own layers, optimizers and losses, tensors,
data.

What else a pickle names (a class of the user's, a function of a notebook) can run any code when it is read. `load` says
so before it reads such a file, and refuses it under HORA_STRICT=1. Classes that the user has declared harmless to torch
(`torch.serialization.add_safe_globals`) are read like torch's own. Called by `persistence`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any, NoReturn

import torch
from pyspark.sql import types as spark_types

from hora.config import accept_risk

__all__ = ["Rename", "load"]

Rename = Callable[[str, str], tuple[str, str]]  # of a module and a name in it, to where it is now

_PLAIN = {
    "builtins": {"set", "frozenset", "slice", "complex", "bytearray", "range"},
    "collections": {"OrderedDict", "defaultdict"},
    "torch": {"Size", "device"},
    "torch._utils": {"_rebuild_parameter", "_rebuild_tensor_v2"},
    "numpy": {"ndarray", "dtype"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.numeric": {"_frombuffer"},
    "numpy._core.numeric": {"_frombuffer"},
    "hora.spark.estimator.packing": {"ModelAndOptimizer"},
    "hora.spark.estimator.persistence": {"ModelAndOptimizer"},  # where it was
}
_CLASSES = {
    "torch.nn.": torch.nn.Module,
    "torch.optim.": torch.optim.Optimizer,
    "pyspark.sql.types": spark_types.DataType,
}
_FUNCTIONS = ("torch.nn.functional", "torch._C._nn")


class _Foreign(pickle.UnpicklingError):
    """The pickle names something that could be anything."""


def load(data: bytes, *, what: str, rename: Rename) -> Any:
    """The object in this pickle. `what` it is, for the warning (or, under HORA_STRICT=1, the ValueError)."""
    try:
        return _Careful(data, rename).load()
    except _Foreign as error:
        accept_risk(
            f"{what} holds {error}, and reading it can run any code: load only what you trust. A class of your own "
            "that is harmless can be declared so with torch.serialization.add_safe_globals (torch 2.4 and newer)"
        )
    return _Trusting(data, rename).load()


class _Trusting(pickle.Unpickler):
    def __init__(self, data: bytes, rename: Rename) -> None:
        super().__init__(io.BytesIO(data))
        self._rename = rename

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(*self._rename(module, name))


# The helpers by which cloudpickle rebuilds what a notebook has defined, and where among their arguments its name is.
_BY_VALUE: dict[str, Callable[..., tuple[Any, Any]]] = {
    "_make_skeleton_class": lambda kind, name, bases, members, *rest: (members.get("__module__", "__main__"), name),
    "_make_skeleton_enum": lambda bases, name, qualname, members, module, *rest: (module, name),
    "_make_function": lambda code, namespace, name, *rest: (
        namespace.get("__name__", "__main__"),
        name or code.args[11],
    ),
}


class _Careful(_Trusting):
    _naming = False  # the pickle is to be refused, and only the name of what it holds is still looked for

    def load(self) -> Any:
        try:
            found = super().load()
        except pickle.UnpicklingError:
            raise
        except Exception as error:
            if not self._naming:
                raise
            raise _Foreign("a class or function of its own") from error
        if self._naming:
            raise _Foreign("a class or function of its own")
        return found

    def find_class(self, module: str, name: str) -> Any:
        module, name = self._rename(module, name)
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _storage
        for harmless in _declared_harmless():
            value, full = harmless if isinstance(harmless, tuple) else (harmless, "")
            if f"{module}.{name}" == (full or f"{value.__module__}.{value.__qualname__}"):
                return value
        if "." not in name and (name in _PLAIN.get(module, ()) or module == "torch" or _may_be_known(module)):
            value = super().find_class(module, name)
            if name in _PLAIN.get(module, ()) or _is_known(value):
                return value
        if "cloudpickle" in module.split(".") and name in _BY_VALUE:
            # A class or function that travels whole. What it is called is among what the helper gets, which is no more
            # than collected here: nothing of the file runs.
            self._naming = True
            return lambda *args: _name_it(_BY_VALUE[name], *args)
        if self._naming:
            return _Nothing
        raise _Foreign(f"{module}.{name}")


def _declared_harmless() -> list[Any]:
    """Return what the user has given to `add_safe_globals`; torch 2.3 has no such function."""
    declared: Callable[[], list[Any]] = getattr(torch.serialization, "get_safe_globals", list)
    return declared()


def _name_it(of: Callable[..., tuple[Any, Any]], *args: Any) -> NoReturn:
    module, name = of(*args)
    raise _Foreign(f"{module}.{name}")


class _Nothing:
    """Stands where the file names something that is not looked up."""

    args: tuple[object, ...] = ()

    def __init__(self, *args: object) -> None:
        pass

    def __call__(self, *args: object) -> _Nothing:
        self.args = args  # of a code object: the twelfth is its name
        return self


def _may_be_known(module: str) -> bool:
    return module in _FUNCTIONS or any(f"{module}.".startswith(prefix) for prefix in _CLASSES)


def _is_known(value: Any) -> bool:
    """Return whether this is a layer, an optimizer, a loss or a type, where torch and Spark define them."""
    if isinstance(value, type):
        at = value.__module__
        return any(f"{at}.".startswith(prefix) and issubclass(value, base) for prefix, base in _CLASSES.items())
    if isinstance(value, FunctionType | BuiltinFunctionType):
        return value.__module__ in _FUNCTIONS
    return isinstance(value, torch.dtype | torch.layout)


def _storage(data: bytes) -> Any:
    """Load a storage as `torch.storage._load_from_bytes` does, without its trust."""
    return torch.load(io.BytesIO(data), weights_only=True)
