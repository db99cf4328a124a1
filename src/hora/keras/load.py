"""`load_model`: a saved Keras model whose optimizer comes back distributed, with its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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
        _restore_from_hdf5(model, str(filepath))
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model


def _restore_from_hdf5(model: Any, filepath: str) -> None:
    """Restore the optimizer's state from an HDF5 file: Keras 3 itself builds it for the variables of no layer."""
    optimizer = model.optimizer
    if not filepath.endswith((".h5", ".hdf5")) or not hasattr(optimizer, "apply"):
        return
    import h5py
    from keras.src.legacy.saving.legacy_h5_format import load_optimizer_weights_from_hdf5_group

    with h5py.File(filepath, "r") as file:
        saved = load_optimizer_weights_from_hdf5_group(file) if "optimizer_weights" in file else []
        values = [np.array(value) for value in saved]
    if len(values) > len(optimizer.variables):
        model.optimizer = type(optimizer).from_config(optimizer.get_config())
        model.optimizer.build(model.trainable_variables)
        for variable, value in zip(model.optimizer.variables, values, strict=True):
            variable.assign(value)
