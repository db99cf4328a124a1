"""Saving and loading of estimators and models as in pyspark.ml: metadata in a folder that Spark writes.

The metadata is a DataFrame of one row, which Spark can write and read both directly and through Connect.

A model and its optimizer are stored as `ModelAndOptimizer` bytes, as on the way to the ranks, including TorchScript
modules. Parameters that JSON cannot hold are pickled; `unpickling` reads such files. Stores and backends are not saved:
they belong to the cluster that trains, not to the model.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any, NoReturn

import cloudpickle
import torch
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import types as spark_types

from hora.config import trusts_files
from hora.launch.providers.spark.cluster import connect_session
from hora.safe_load import ForeignError, Vocabulary, load_pickle, load_torch
from hora.spark.estimator.packing import ModelAndOptimizer, is_script, pack_model, unpack_model

_CLASSES: dict[str, type] = {
    "torch.nn.": torch.nn.Module,
    "torch.optim.": torch.optim.Optimizer,
    "pyspark.sql.types.": spark_types.DataType,
}
_NOT_DATA = ("torch.nn.parallel.",)  # their instances open connections
_FUNCTIONS = {"torch.nn.functional": torch.nn.functional, "torch._C._nn": torch._C._nn}
# Whether the reader trusts a file: wholly, or these classes and functions in it.
Trust = bool | Sequence[Callable[..., Any]]
_NOT_KEPT = ("store", "backend")


def load(data: bytes, *, what: str, trusted: Trust = False) -> Any:
    """Unpickle an object. Raises ValueError, naming it `what`, if it is not trusted but would have to be."""
    vocabulary = Vocabulary(instance_class=_instance_class, value=_function, trusted=_named(trusted))
    try:
        return load_pickle(data, vocabulary).plain()
    except ForeignError as error:
        if not (trusted is True or trusts_files()):
            refuse(what, str(error))
    return pickle.loads(data)


def load_checkpoint(data: bytes, *, what: str, without: Sequence[str] = ()) -> dict[str, Any]:
    """Read a checkpoint of `torch.save`, without these keys. Raises ValueError, naming it `what`, if it is invalid."""
    try:
        content: dict[str, Any] = load_torch(data).without(*without).plain()
    except ForeignError as error:
        refuse(what, str(error))
    except ValueError as error:
        raise ValueError(f"{what} cannot be read: {error}") from error
    return content


def refuse(what: str, held: str) -> NoReturn:
    """Raise ValueError for a file that can run code."""
    raise ValueError(
        f"{what} holds {held}, and reading it can run any code of its author. If you trust the file, load it with "
        "trusted=True or set HORA_TRUST_FILES=1 (without HORA_STRICT=1). If only classes of your own are in it, name "
        "them: trusted=[YourClass]"
    )


def _named(trusted: Trust) -> Callable[[str, str], Any]:
    """Return a lookup of the classes and functions that the caller trusts."""
    if isinstance(trusted, bool):
        return lambda module, name: None
    if not all(isinstance(one, type | FunctionType) for one in trusted):
        raise ValueError(f"trusted must be True, or a list of classes of your own, but it is {trusted!r}")
    known = {(one.__module__, one.__qualname__): one for one in trusted}
    return lambda module, name: known.get((module, name))


def _instance_class(module: str, name: str) -> type | None:
    """Return a layer, optimizer or type of torch or Spark, from the module that defines it."""
    if (module, name) == (ModelAndOptimizer.__module__, ModelAndOptimizer.__qualname__):
        return ModelAndOptimizer
    if module.startswith(_NOT_DATA):
        return None
    for prefix, base in _CLASSES.items():
        if f"{module}.".startswith(prefix):
            # Of a module that is already imported: reading a file imports nothing.
            found = getattr(sys.modules.get(module), name, None) if "." not in name else None
            if isinstance(found, type) and issubclass(found, base) and f"{found.__module__}.".startswith(prefix):
                return found
    return None


def _function(module: str, name: str) -> Any:
    """Return a loss function of torch."""
    found = getattr(_FUNCTIONS.get(module), name, None)
    known = isinstance(found, FunctionType | BuiltinFunctionType) and found.__module__ in _FUNCTIONS
    return found if known else None


class ParamsWriter(MLWriter):
    """Writes an object with parameters."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:  # noqa: N802 - pyspark's name
        values = {param.name: value for param, value in self._instance.extractParamMap().items()}
        kept = {name: value for name, value in values.items() if name not in _NOT_KEPT and value is not None}
        # Packed together: an optimizer refers to its model's parameters by identity.
        if "model" in kept and isinstance(kept.get("optimizer"), torch.optim.Optimizer):
            kept["model"] = ModelAndOptimizer.of(kept["model"], kept.pop("optimizer"))
        elif "model" in kept:
            kept["model"] = pack_model(kept["model"])
        whole = base64.b64encode(cloudpickle.dumps(kept)).decode()
        session = _session(self)
        metadata = {
            "class": _name(type(self._instance)),
            "timestamp": int(time.time() * 1000),
            "sparkVersion": session.version,
            "uid": self._instance.uid,
            "paramMap": {"params": whole},
            "defaultParamMap": {},
        }
        rows = session.createDataFrame([(json.dumps(metadata),)], "value string")
        rows.coalesce(1).write.mode("overwrite" if self.shouldOverwrite else "error").text(_place(path))

    def _handleOverwrite(self, path: str) -> None:  # noqa: N802 - pyspark's name
        """Remove an earlier model: all of it through Spark's JVM; for a Connect client, the files to be rewritten."""
        if connect_session(self._sparkSession) is None:
            super()._handleOverwrite(path)


class ParamsReader(MLReader[Any]):
    """Reads the files of `ParamsWriter` as an object of `kind`."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self._kind = kind
        self._trusted: Trust = False

    def trusted(self, value: Trust = True) -> ParamsReader:
        """Also read files that can run code: those with your own classes or functions, or TorchScript.

        A list of classes and functions trusts only these.
        """
        self._trusted = value
        return self

    def load(self, path: str) -> Any:
        metadata = json.loads(_session(self).read.text(_place(path)).head()[0])
        found, wanted = str(metadata["class"]), _name(self._kind)
        if found != wanted:
            raise ValueError(f"{path} holds a {found}, not a {wanted}")
        instance = self._kind()
        instance._resetUid(metadata["uid"])
        packed = base64.b64decode(metadata["paramMap"]["params"])
        instance._set(**_loaded(packed, path, trusted=self._trusted))
        return instance


class ParamsWritable(MLWritable):
    """Mixin for objects that can be saved: `save(path)`, `write()`."""

    def write(self) -> ParamsWriter:
        return ParamsWriter(self)


class ParamsReadable(MLReadable[Any]):
    """Mixin for objects that can be loaded: `load(path)`, `read()`."""

    @classmethod
    def load(cls, path: str, *, trusted: Trust = False) -> Any:
        """Read what `save` wrote. `trusted`: even if it can run code, as your own classes and functions can.

        A list of your classes and functions trusts only these.
        """
        return cls.read().trusted(trusted).load(path)

    @classmethod
    def read(cls) -> ParamsReader:
        return ParamsReader(cls)


def _session(of: Any) -> Any:
    """Return the given session of a reader or writer, else that of a Connect client, which Spark 3.5 does not find."""
    return connect_session(of._sparkSession) or of.sparkSession


def _place(path: str) -> str:
    return f"{path.rstrip('/')}/metadata"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def _loaded(data: bytes, path: str, *, trusted: Trust) -> dict[str, Any]:
    """Return the parameters in a saved file. Raises ValueError if it can run code and is not trusted."""

    def read(pickled: bytes) -> Any:
        return load(pickled, what=path, trusted=trusted)

    values: dict[str, Any] = read(data)
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no parameters")
    model = values.get("model")
    packed = model.model if isinstance(model, ModelAndOptimizer) else model
    if not isinstance(packed, bytes | None):
        raise ValueError(f"{path} holds a model that is not bytes")
    if packed is not None and is_script(packed) and not (trusted is True or trusts_files()):
        refuse(path, "a model of TorchScript")
    if isinstance(model, ModelAndOptimizer):
        values["model"], values["optimizer"] = model.unpack(load=read)
    elif packed is not None:
        values["model"] = unpack_model(packed, load=read)
    return values


def serialize_param(name: str, value: Any) -> str | None:
    """Serialize a parameter as text; None for parameters that are not saved."""
    if name in _NOT_KEPT or value is None:
        return None
    packed = pack_model(value) if isinstance(value, torch.nn.Module) else cloudpickle.dumps(value)
    return base64.b64encode(packed).decode()
