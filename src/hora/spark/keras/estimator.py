"""`KerasEstimator`: fit a Keras model on a Spark DataFrame, on several processes.

The path from data to a model is that of all estimators (`hora.spark.estimator.base`); `training` trains. Users import
it from `horovod.spark.keras`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hora.spark.estimator.base import HorovodEstimator
from hora.spark.estimator.packing import TrainingResult
from hora.spark.keras.model import KerasModel
from hora.spark.keras.packing import keras_of, pack, pack_model, unpack_model
from hora.spark.keras.training import train

_OWN: dict[str, tuple[Any, str]] = {
    "custom_objects": (None, "the model's own classes and functions by name"),
    "checkpoint_callback": (None, "a BestModelCheckpoint that writes to the run's folder"),
    "backend_env": (None, "variables for the ranks' environment"),
    "tensorflow_dataset_prefetch_buffer_size": (0, "ignored: the readers prefetch rows"),
}
_NOT_KERAS = (
    "input_shapes",
    "loss_constructors",
    "train_minibatch_fn",
    "backward_passes_per_step",
    "compress_sparse_cols",
)


class KerasEstimator(HorovodEstimator, own=_OWN, unlisted=_NOT_KERAS):
    """Fits a Keras model on a DataFrame. The keywords are the parameters of `table`, but those of torch models."""

    run_prefix: ClassVar[str] = "keras"
    validates_on_all_ranks = True
    model_class = KerasModel
    train = staticmethod(train)

    def _check_values(self, values: Mapping[str, Any]) -> None:
        super()._check_values(values)
        keras_of(values["model"])
        if values["optimizer"] is None or not values["loss"]:
            raise ValueError("KerasEstimator needs an optimizer and a loss: KerasEstimator(optimizer=…, loss='mse')")
        unknown = [name for name in _NOT_KERAS if values[name] not in (None, False, 1)]
        if unknown:
            raise ValueError(f"{', '.join(unknown)} has no meaning for Keras")

    def _pack(self, values: dict[str, Any], features: Sequence[str]) -> dict[str, Any]:
        package = keras_of(values["model"])
        packed = {name: pack(package, values[name]) for name in ("optimizer", "loss", "metrics")}
        return {"model": pack_model(values["model"]), "package": package, "values": packed}

    def _create_model(self, run_results: Sequence[Any], run_id: str, metadata: dict[str, Any]) -> Any:
        result: TrainingResult = run_results[0]
        known = self.getOrDefault("custom_objects")
        model = unpack_model(keras_of(self.getOrDefault("model")), result.model, known)
        return self.get_model_class()(
            history=result.history,
            model=model,
            feature_columns=list(metadata["features"]),
            label_columns=list(self.getOrDefault("label_cols")),
            custom_objects=known,
            run_id=run_id,
            _metadata=metadata | {"output_sizes": list(result.output_sizes)},
        )
