"""Saving and loading estimators and models the way pyspark.ml does: metadata in a folder that Spark writes.

They are written and read as a DataFrame of one row, which every Spark can do, classic or through Connect.

A model and its optimizer also travel to the ranks and back as these bytes (`ModelAndOptimizer`), TorchScript modules
included. Parameters that JSON cannot hold are pickled; `unpickling` reads such files. Stores and backends are not
kept: they belong to the place where a training runs, not to the model.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from typing import Any

import cloudpickle
import torch
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from hora.config import trusts_files
from hora.launch.providers.spark.cluster import connect_session
from hora.spark.estimator import unpickling
from hora.spark.estimator.packing import ModelAndOptimizer, is_script, pack_model, unpack_model

__all__ = ["ParamsReadable", "ParamsReader", "ParamsWritable", "ParamsWriter", "serialize_param"]

_NOT_KEPT = ("store", "backend")
_OLD_PACKAGE = "hora.estimator."  # where these classes were when the first files were written
_PACKAGE = "hora.spark.estimator."


class ParamsWriter(MLWriter):
    """Writes an object with parameters."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:  # noqa: N802 - pyspark's name
        values = {param.name: value for param, value in self._instance.extractParamMap().items()}
        kept = {name: value for name, value in values.items() if name not in _NOT_KEPT and value is not None}
        # All at once: an optimizer knows its model's parameters by identity.
        whole = base64.b64encode(cloudpickle.dumps(_packed(kept))).decode()
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
    """Reads what `ParamsWriter` has written, as an object of `kind`."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self._kind = kind
        self._trusted = False

    def trusted(self, value: bool = True) -> ParamsReader:
        """Read files that can run code, too: those that hold classes or functions of your own, or TorchScript."""
        self._trusted = value
        return self

    def load(self, path: str) -> Any:
        metadata = json.loads(_session(self).read.text(_place(path)).head()[0])
        found, wanted = str(metadata["class"]), _name(self._kind)
        if _name_now(found) != wanted:
            raise ValueError(f"{path} holds a {found}, not a {wanted}")
        instance = self._kind()
        instance._resetUid(metadata["uid"])
        packed = base64.b64decode(metadata["paramMap"]["params"])
        instance._set(**_loaded(packed, path, trusted=self._trusted))
        return instance


class ParamsWritable(MLWritable):
    """Mixin for what can be saved: `save(path)`, `write()`."""

    def write(self) -> ParamsWriter:
        return ParamsWriter(self)


class ParamsReadable(MLReadable[Any]):
    """Mixin for what can be loaded: `load(path)`, `read()`."""

    @classmethod
    def load(cls, path: str, *, trusted: bool = False) -> Any:
        """Read what `save` wrote. `trusted`: also if it can run code, which a class or function of your own can."""
        return cls.read().trusted(trusted).load(path)

    @classmethod
    def read(cls) -> ParamsReader:
        return ParamsReader(cls)


def _session(of: Any) -> Any:
    """The session of a reader or writer: as given, else that of a Connect client, for which Spark 3.5 does not look."""
    return connect_session(of._sparkSession) or of.sparkSession


def _place(path: str) -> str:
    return f"{path.rstrip('/')}/metadata"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def _loaded(data: bytes, path: str, *, trusted: bool = False) -> dict[str, Any]:
    """The parameters in a saved file. ValueError for one that can run code and is not trusted."""

    def load(pickled: bytes) -> Any:
        return unpickling.load(pickled, what=path, rename=_found_now, trusted=trusted)

    values: dict[str, Any] = load(data)
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no parameters")
    model = values.get("model")
    packed = model.model if isinstance(model, ModelAndOptimizer) else model
    if not isinstance(packed, bytes | None):
        raise ValueError(f"{path} holds a model that is not made of bytes")
    if packed is not None and is_script(packed) and not (trusted or trusts_files()):
        unpickling.refuse(path, "a model of TorchScript")
    if isinstance(model, ModelAndOptimizer):
        values["model"], values["optimizer"] = model.unpack(load=load)
    elif packed is not None:
        values["model"] = unpack_model(packed, load=load)
    if "output_cols" in values:  # its name in the first files
        values["outputCols"] = values.pop("output_cols")
    return values


def _found_now(module: str, name: str) -> tuple[str, str]:
    """Return the present place of a class of an old file."""
    if (module, name) == (f"{_OLD_PACKAGE}parcel", "Parcel"):
        return ModelAndOptimizer.__module__, ModelAndOptimizer.__name__
    return _name_now(module), name


def _name_now(name: str) -> str:
    return _PACKAGE + name.removeprefix(_OLD_PACKAGE) if name.startswith(_OLD_PACKAGE) else name


def _packed(values: Mapping[str, Any]) -> dict[str, Any]:
    packed = dict(values)
    if "model" in packed and isinstance(packed.get("optimizer"), torch.optim.Optimizer):
        packed["model"] = ModelAndOptimizer.of(packed["model"], packed.pop("optimizer"))
    elif "model" in packed:
        packed["model"] = pack_model(packed["model"])
    return packed


def serialize_param(name: str, value: Any) -> str | None:
    """A parameter as text; None for what is not kept."""
    if name in _NOT_KEPT or value is None:
        return None
    packed = pack_model(value) if isinstance(value, torch.nn.Module) else cloudpickle.dumps(value)
    return base64.b64encode(packed).decode()
