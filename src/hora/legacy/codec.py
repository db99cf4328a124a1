"""`horovod.runner.common.util.codec`: objects as text. Loading runs code: load only what you trust."""

from __future__ import annotations

import base64
from typing import Any

import cloudpickle

__all__ = ["dumps_base64", "loads_base64"]


def dumps_base64(obj: Any, to_ascii: bool = True) -> Any:
    """The object, cloudpickled, as base64: a text, or bytes with `to_ascii=False`."""
    encoded = base64.b64encode(cloudpickle.dumps(obj))
    return encoded.decode("ascii") if to_ascii else encoded


def loads_base64(encoded: str | bytes) -> Any:
    """Decode what `dumps_base64` encoded. It unpickles, which can run any code."""
    return cloudpickle.loads(base64.b64decode(encoded))
