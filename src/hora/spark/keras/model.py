"""`KerasModel`: a trained Keras model that predicts on DataFrames. Users import it from `horovod.spark.keras`.

It extends the torch model and replaces only the prediction itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hora.spark.estimator.packing import as_list
from hora.spark.estimator.torch_model import Predict, TorchModel, as_array, in_batches
from hora.spark.keras.packing import as_inputs, keras_of, pack_model, unpack_model

_OWN: dict[str, tuple[Any, str]] = {
    "custom_objects": (None, "the model's own classes and functions by name"),
    "_floatx": (None, "Keras's default float type; that of the model's layers unless given"),
}


_NOT_KERAS = ("input_shapes", "optimizer", "loss", "loss_constructors", "outputCols")


class KerasModel(TorchModel, own=_OWN, unlisted=_NOT_KERAS):
    """A trained Keras model. `transform(df)` adds a column of predictions for each label."""

    def keras(self) -> Any:
        """Return the Keras model."""
        return self.getOrDefault("model")

    def _loader(self) -> Callable[[], Predict]:
        model = self.getOrDefault("model")
        if model is None:
            raise ValueError("there is no model: KerasModel(model=…)")
        known = dict(self.getOrDefault("custom_objects") or {})
        return functools.partial(_load, keras_of(model), pack_model(model), known, self._batch_size())


def _load(package: str, packed: bytes, custom_objects: Mapping[str, Any], batch_size: int) -> Predict:
    model = unpack_model(package, packed, custom_objects)

    def predict(columns: Sequence[Sequence[Any]]) -> list[Any]:
        inputs = as_inputs(model, [as_array(column) for column in columns])
        outputs = model.predict_on_batch(inputs[0] if len(inputs) == 1 else inputs)
        return [np.asarray(output, dtype=np.float32).reshape(len(columns[0]), -1) for output in as_list(outputs)]

    return in_batches(predict, batch_size)
