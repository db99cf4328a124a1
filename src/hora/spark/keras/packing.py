"""Keras models, optimizers, losses and metrics as what travels to the ranks and back, or is saved.

Models are Keras's own archives, everything else with a configuration is that. Nothing here imports TensorFlow before a
model is at hand.
"""

from __future__ import annotations

import base64
import importlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["TFKerasUtil", "keras_of", "pack", "pack_model", "unpack", "unpack_model"]


def keras_of(model: Any) -> str:
    """Return the package that a model is of: `keras`, or `tf_keras` for Keras 2. ValueError for anything else."""
    packages = {cls.__module__.split(".")[0] for cls in type(model).__mro__}
    for package in ("tf_keras", "keras"):
        if package in packages:
            return package
    raise ValueError(f"KerasEstimator trains models of Keras, but this is a {type(model).__qualname__}")


def pack_model(model: Any) -> bytes:
    """Return the model's architecture and weights as bytes, without its optimizer."""
    with tempfile.TemporaryDirectory(prefix="hora-keras-") as folder:
        path = Path(folder, "model.keras")
        model.save(path, include_optimizer=False)
        return path.read_bytes()


def unpack_model(package: str, packed: bytes, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Return the model of these bytes, not compiled."""
    keras = importlib.import_module(package)
    with tempfile.TemporaryDirectory(prefix="hora-keras-") as folder:
        path = Path(folder, "model.keras")
        path.write_bytes(packed)
        return keras.models.load_model(path, custom_objects=dict(custom_objects or {}), compile=False)


def pack(package: str, value: Any) -> Any:
    """Return an object of Keras as its configuration, in lists and dicts too; names and functions as they are."""
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
    """A configuration that stands for an object."""


class TFKerasUtil:
    """Horovod's name for models of `tf.keras` as text."""

    type = "tf_keras"

    @staticmethod
    def keras() -> Any:
        """Return `tf.keras`."""
        import tensorflow as tf

        return tf.keras

    @staticmethod
    def serialize_model(model: Any) -> str:
        """Return a model as text."""
        return f"{keras_of(model)}:{base64.b64encode(pack_model(model)).decode()}"

    @staticmethod
    def deserialize_model(text: str, custom_objects: Mapping[str, Any] | None = None) -> Any:
        """Return the model of a text."""
        package, _, packed = text.partition(":")
        if package not in ("keras", "tf_keras"):
            raise ValueError(f"this is no model as text: it begins with {text[:20]!r}")
        return unpack_model(package, base64.b64decode(packed), custom_objects)
