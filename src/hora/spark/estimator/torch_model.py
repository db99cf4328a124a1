"""`TorchModel`: a trained model that a DataFrame can be sent through. Users import it from `horovod.spark.torch`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLWritable

from hora.spark.estimator.params import with_params
from hora.spark.estimator.persistence import ParamsReader, ParamsWriter, pack_model, unpack_model

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row
    from pyspark.sql.types import DataType, StructField

__all__ = ["TorchModel"]

_ROWS_AT_ONCE = 1024

_PARAMS: dict[str, tuple[Any, str]] = {
    "history": (None, "a dict for each epoch"),
    "model": (None, "the trained module, on the CPU, in eval mode"),
    "feature_columns": (None, "columns for the model's forward, in order"),
    "input_shapes": (None, "a shape for each feature"),
    "label_columns": (None, "columns that were learnt"),
    "output_cols": (None, "names of the predictions; <label>__output unless given"),
    "optimizer": (None, "the optimizer after the training"),
    "run_id": (None, "name of the run in the store"),
    "_metadata": (None, "the training data's columns"),
    "loss": (None, "what was minimised"),
    "loss_constructors": (None, "what made the losses"),
}


# Horovod misspelt a setter, and programs have learnt it.
@with_params(_PARAMS, {"label_columns": "LabelColoumns", "_metadata": "Metadata"})
class TorchModel(Model, MLWritable, MLReadable[Any]):
    """A trained torch model. `transform(df)` adds a column of predictions for each label."""

    def __init__(
        self,
        history: Sequence[Mapping[str, Any]] | None = None,
        model: torch.nn.Module | None = None,
        feature_columns: Sequence[str] | None = None,
        input_shapes: Sequence[Sequence[int]] | None = None,
        label_columns: Sequence[str] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        run_id: str | None = None,
        _metadata: Mapping[str, Any] | None = None,
        loss: Any = None,
        loss_constructors: Any = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in _PARAMS and value is not None}
        super().__init__()
        self._setDefault(**{name: default for name, (default, _) in _PARAMS.items()})
        self._set(**given)

    def write(self) -> ParamsWriter:
        return ParamsWriter(self)

    @classmethod
    def read(cls) -> ParamsReader:
        return ParamsReader(cls)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        from pyspark.sql.types import StructType

        labels = list(self.getOrDefault("label_columns") or ())
        names = list(self.getOrDefault("output_cols") or [f"{label}__output" for label in labels])
        if not labels or len(names) != len(labels):
            raise ValueError(f"there are {len(labels)} label columns {labels}, but {len(names)} output columns {names}")
        features = list(self.getOrDefault("feature_columns") or ())
        missing = [name for name in features if name not in dataset.columns]
        if missing:
            raise ValueError(f"the DataFrame has no column {', '.join(missing)}; it has {', '.join(dataset.columns)}")
        model = self.getOrDefault("model")
        if model is None:
            raise ValueError("there is no model: TorchModel(model=…)")
        predict = _Predict(
            model=pack_model(copy.deepcopy(model).cpu().eval()),
            features=tuple(features),
            input_shapes=tuple(map(tuple, self.getOrDefault("input_shapes") or ())),
        )
        fields = self._fields(dataset, labels, names, predict)
        kept = [field for field in dataset.schema.fields if field.name not in names]
        rows = dataset.select(*(f"`{field.name}`" for field in kept)).rdd.mapPartitions(
            _PartitionPredictor(predict, tuple(field.dataType for field in fields))
        )
        return dataset.sparkSession.createDataFrame(rows, StructType([*kept, *fields]), verifySchema=False)

    def _fields(
        self, frame: DataFrame, labels: Sequence[str], names: Sequence[str], predict: _Predict
    ) -> list[StructField]:
        from pyspark.ml.linalg import VectorUDT
        from pyspark.sql.types import StructField

        sizes = list((self.getOrDefault("_metadata") or {}).get("output_sizes", ()))
        if len(sizes) != len(labels):
            first = frame.select(*(f"`{name}`" for name in predict.features)).head(1)
            sizes = [output.shape[1] for output in predict(first)] if first else [1] * len(labels)
        fields = []
        for label, name, size in zip(labels, names, sizes, strict=True):
            kind, of = self._label(frame, label)
            wanted = VectorUDT() if kind == "vector" or size > 1 else of
            fields.append(StructField(name, wanted, nullable=True))
        return fields

    def _label(self, frame: DataFrame, label: str) -> tuple[str, DataType]:
        """Kind and type of a label: as it was in training, else as it is here, else a float."""
        from pyspark.ml.linalg import VectorUDT
        from pyspark.sql import types

        known = (self.getOrDefault("_metadata") or {}).get("columns", {}).get(label)
        if known is not None:
            return known["kind"], types._parse_datatype_string(known["type"])
        if label not in frame.columns:
            return "scalar", types.FloatType()
        of = frame.schema[label].dataType
        if isinstance(of, VectorUDT):
            return "vector", of
        return ("array", of.elementType) if isinstance(of, types.ArrayType) else ("scalar", of)


@dataclass(frozen=True)
class _Predict:
    """Rows in, one two-dimensional array of predictions for each output."""

    model: bytes
    features: tuple[str, ...]
    input_shapes: tuple[tuple[int, ...], ...]

    def __call__(self, rows: Sequence[Row], model: torch.nn.Module | None = None) -> list[np.ndarray[Any, Any]]:
        module = unpack_model(self.model) if model is None else model
        inputs = [
            torch.tensor(np.array([_values(row[name]) for row in rows]), dtype=torch.float32) for name in self.features
        ]
        if self.input_shapes:
            inputs = [tensor.reshape(shape) for tensor, shape in zip(inputs, self.input_shapes, strict=True)]
        with torch.no_grad():
            outputs = module(*inputs)
        found = outputs if isinstance(outputs, tuple | list) else [outputs]
        return [output.reshape(len(rows), -1).numpy() for output in found]


@dataclass(frozen=True)
class _PartitionPredictor:
    """What Spark runs on a partition: the rows with their predictions."""

    predict: _Predict
    types: tuple[DataType, ...]

    def __call__(self, rows: Iterable[Row]) -> Iterator[tuple[Any, ...]]:
        model: torch.nn.Module | None = None
        waiting: list[Row] = []
        for row in rows:
            waiting.append(row)
            if len(waiting) == _ROWS_AT_ONCE:
                model = model or unpack_model(self.predict.model)
                yield from self._with_predictions(waiting, model)
                waiting = []
        if waiting:
            yield from self._with_predictions(waiting, model or unpack_model(self.predict.model))

    def _with_predictions(self, rows: Sequence[Row], model: torch.nn.Module) -> Iterator[tuple[Any, ...]]:
        outputs = self.predict(rows, model)
        for number, row in enumerate(rows):
            yield (*row, *(_spark_value(output[number], of) for output, of in zip(outputs, self.types, strict=True)))


def _values(value: Any) -> Any:
    return value.toArray() if hasattr(value, "toArray") else value


def _spark_value(values: np.ndarray[Any, Any], of: DataType) -> Any:
    from decimal import Decimal

    from pyspark.ml.linalg import Vectors, VectorUDT
    from pyspark.sql import types

    if isinstance(of, VectorUDT):
        return Vectors.dense(values.astype(float))
    value = float(values[0])
    if not np.isfinite(value) and not isinstance(of, types.FractionalType):
        return None
    if isinstance(of, types.IntegralType):
        return round(value)
    if isinstance(of, types.BooleanType):
        return bool(round(value))
    return Decimal(str(value)) if isinstance(of, types.DecimalType) else value
