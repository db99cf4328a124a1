"""`load_model`: a saved Keras model whose optimizer comes back distributed, with its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hora.keras.optimizer import DistributedOptimizer

__all__ = ["load_model"]


def load_model(
    keras: Any,
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
) -> Any:
    """Load a model with the given Keras and wrap its optimizer."""
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
