"""Serialization of Keras models, optimizers, losses and metrics, for the ranks and for saved files.

Models use Keras's archive format; other objects use their configuration. TensorFlow is imported only once there is a
model.
"""

from __future__ import annotations

import base64
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hora.keras.values import keras_version
from hora.spark.estimator.store import temporary_folder


def keras_of(model: Any) -> str:
    """Return the package of a model: `keras`, or `tf_keras` for Keras 2. Raises ValueError for anything else."""
    version = keras_version(model)
    if version is None:
        raise ValueError(f"KerasEstimator trains models of Keras, but this is a {type(model).__qualname__}")
    return "tf_keras" if version == 2 else "keras"


def pack_model(model: Any) -> bytes:
    """Serialize the model's architecture and weights. Keras 2 adds the optimizer, which `unpack_model` ignores."""
    with temporary_folder("hora-keras-") as folder:
        path = Path(folder, "model.keras")
        model.save(path, **({} if keras_of(model) == "tf_keras" else {"include_optimizer": False}))
        return path.read_bytes()


def unpack_model(package: str, packed: bytes, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Return the model, not compiled."""
    keras = importlib.import_module(package)
    with temporary_folder("hora-keras-") as folder:
        path = Path(folder, "model.keras")
        path.write_bytes(packed)
        return keras.models.load_model(path, custom_objects=dict(custom_objects or {}), compile=False)


def as_inputs(model: Any, columns: Sequence[Any]) -> list[Any]:
    """Return arrays of rows in the shapes and dtypes of the model's inputs."""
    return [
        column.reshape((-1, *[extent or -1 for extent in one.shape[1:]])).astype(
            str(getattr(one.dtype, "name", one.dtype))
        )
        for column, one in zip(columns, model.inputs, strict=True)
    ]


def pack(package: str, value: Any) -> Any:
    """Convert Keras objects to their configuration, also inside lists and dicts; names and functions stay."""
    if isinstance(value, (list, tuple)):
        return [pack(package, one) for one in value]
    if isinstance(value, Mapping):
        return {name: pack(package, one) for name, one in value.items()}
    if hasattr(value, "get_config"):
        return _Packed(importlib.import_module(package).saving.serialize_keras_object(value))
    return value


def unpack(package: str, value: Any, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Undo `pack`."""
    if isinstance(value, list):
        return [unpack(package, one, custom_objects) for one in value]
    if isinstance(value, _Packed):
        saving = importlib.import_module(package).saving
        return saving.deserialize_keras_object(dict(value), custom_objects=dict(custom_objects or {}))
    if isinstance(value, Mapping):
        return {name: unpack(package, one, custom_objects) for name, one in value.items()}
    return value


class _Packed(dict[str, Any]):
    """A configuration in place of an object."""


class TFKerasUtil:
    """Horovod's interface for `tf.keras` models as text."""

    type = "tf_keras"

    @staticmethod
    def keras() -> Any:
        """Return `tf.keras`."""
        import tensorflow as tf

        return tf.keras

    @staticmethod
    def serialize_model(model: Any) -> str:
        """Serialize a model as text."""
        return f"{keras_of(model)}:{base64.b64encode(pack_model(model)).decode()}"

    @staticmethod
    def deserialize_model(text: str, custom_objects: Mapping[str, Any] | None = None) -> Any:
        """Deserialize a model from text."""
        package, _, packed = text.partition(":")
        if package not in ("keras", "tf_keras"):
            raise ValueError(f"this is not a serialized model: it begins with {text[:20]!r}")
        return unpack_model(package, base64.b64decode(packed), custom_objects)
