"""Saving and loading estimators and models the way pyspark.ml does: metadata in a folder that Spark writes.

Parameters that JSON cannot hold are pickled, so load only what you trust. Stores and backends are not kept: they belong to
the place where a training runs, not to the model.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import cloudpickle
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from hora.spark.estimator.model_bytes import ModelAndOptimizer, pack_model, unpack_model

__all__ = ["ParamsReader", "ParamsWriter"]

_NOT_KEPT = ("store", "backend")


class ParamsWriter(MLWriter):
    """Writes an object with parameters."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:  # noqa: N802 - pyspark's name
        values = {param.name: value for param, value in self._instance.extractParamMap().items()}
        kept = {name: value for name, value in values.items() if name not in _NOT_KEPT and value is not None}
        # In one piece: an optimizer knows its model's parameters by identity.
        whole = base64.b64encode(cloudpickle.dumps(_packed(kept))).decode()
        DefaultParamsWriter.saveMetadata(self._instance, path, self.sparkSession, paramMap={"params": whole})


class ParamsReader(MLReader[Any]):
    """Reads what `ParamsWriter` has written, as an object of `kind`."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> Any:
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession, _class_name(self._kind))
        instance = self._kind()
        instance._resetUid(metadata["uid"])
        instance._set(**_unpacked(cloudpickle.loads(base64.b64decode(metadata["paramMap"]["params"]))))
        return instance


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def _packed(values: Mapping[str, Any]) -> dict[str, Any]:
    packed = dict(values)
    if "model" in packed and "optimizer" in packed:
        packed["model"] = ModelAndOptimizer.of(packed["model"], packed.pop("optimizer"))
    elif "model" in packed:
        packed["model"] = pack_model(packed["model"])
    return packed


def _unpacked(packed: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(packed)
    model = values.get("model")
    if isinstance(model, ModelAndOptimizer):
        values["model"], values["optimizer"] = model.unpack()
    elif model is not None:
        values["model"] = unpack_model(model)
    return values
