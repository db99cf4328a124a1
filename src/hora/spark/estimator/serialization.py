"""Models as text and in memory: `horovod.spark.torch.util` and `horovod.spark.lightning.util`."""

from __future__ import annotations

import base64
import importlib.util
import io
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch

from hora.spark.estimator.packing import pack_model, unpack_model

__all__ = [
    "deserialize_fn",
    "is_module_available",
    "is_module_available_fn",
    "save_into_bio",
    "save_into_bio_fn",
    "serialize_fn",
]

_OTHER = b"object"


def serialize_fn() -> Callable[[Any], str]:
    """A function that makes a text of a model or of anything else that can be pickled."""

    def serialize(value: Any) -> str:
        packed = pack_model(value) if isinstance(value, torch.nn.Module) else _OTHER + cloudpickle.dumps(value)
        return base64.b64encode(packed).decode("ascii")

    return serialize


def deserialize_fn() -> Callable[[str], Any]:
    """A function that makes of such a text what it was. It unpickles: a text of a stranger's can run code."""

    def deserialize(text: str) -> Any:
        packed = base64.b64decode(text)
        return cloudpickle.loads(packed[len(_OTHER) :]) if packed.startswith(_OTHER) else unpack_model(packed)

    return deserialize


def save_into_bio(obj: Any, save_obj_fn: Callable[[Any, io.BytesIO], Any]) -> io.BytesIO:
    """Return what `save_obj_fn(obj, file)` writes (`torch.save`, say), from its beginning."""
    file = io.BytesIO()
    save_obj_fn(obj, file)
    file.seek(0)
    return file


def save_into_bio_fn() -> Callable[[Any, Callable[[Any, io.BytesIO], Any]], io.BytesIO]:
    return save_into_bio


def is_module_available(module_name: str) -> bool:
    """Return whether it could be imported here."""
    try:
        return importlib.util.find_spec(module_name) is not None
    except ModuleNotFoundError:  # its package is not there
        return False


def is_module_available_fn() -> Callable[[str], bool]:
    return is_module_available
