"""`TorchModel`: a trained model that a DataFrame can be sent through. Users import it from `horovod.spark.torch`.

Predictions are made by a pandas UDF over the feature columns: the model is loaded once for each Python worker and task, and
the same way works on classic Spark and through Spark Connect.
"""

from __future__ import annotations

import copy
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hora.spark.estimator.base import HorovodModel
from hora.spark.estimator.packing import pack_model, unpack_model

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["TorchModel"]

PredictRow = Callable[[torch.nn.Module, Any], Any]
_INTEGERS = ("tinyint", "smallint", "int", "bigint")


class TorchModel(HorovodModel):
    """A trained torch model. `transform(df)` adds a column of predictions for each label.

    A subclass may override `get_prediction_fn`; then rows are predicted one by one.
    """

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
        given = {name: value for name, value in locals().items() if name in self.table and value is not None}
        super().__init__()
        self._set(**given)
        if label_columns:
            self._setDefault(outputCols=[f"{label}__output" for label in label_columns])

    def get_prediction_fn(self) -> PredictRow:
        """A function `(model, row) -> tensor, or one for each label`, with the gradients off and the model in eval mode."""
        features = list(self.getOrDefault("feature_columns") or ())
        shapes = list(self.getOrDefault("input_shapes") or [(1, -1)] * len(features))

        def predict(model: torch.nn.Module, row: Any) -> Any:
            inputs = [
                torch.tensor([row[name]]).reshape(tuple(shape)) for name, shape in zip(features, shapes, strict=True)
            ]
            with torch.no_grad():
                return model(*inputs)

        return predict

    def _get_optimizer(self) -> torch.optim.Optimizer | None:
        return self.getOrDefault("optimizer")

    def _transform(self, dataset: DataFrame) -> DataFrame:
        labels = list(self.getOrDefault("label_columns") or ())
        names = list(self.getOrDefault("outputCols") or [f"{label}__output" for label in labels])
        if not labels or len(names) != len(labels):
            raise ValueError(f"there are {len(labels)} label columns {labels}, but {len(names)} output columns {names}")
        features = list(self.getOrDefault("feature_columns") or ())
        missing = [name for name in features if name not in dataset.columns]
        if missing:
            raise ValueError(f"the DataFrame has no column {', '.join(missing)}; it has {', '.join(dataset.columns)}")
        own = type(self).get_prediction_fn is not TorchModel.get_prediction_fn
        # A subclass's function gets whole rows, and may use any column.
        read = list(dataset.columns) if own else features
        predict = self._predict(read, own)
        outputs = _evaluated(predict, dataset, read, len(labels))
        sizes = self._sizes(predict, dataset, read, len(labels))
        predicted = [
            _as_label(outputs[f"o{number}"], *self._label(dataset, label), size).alias(name)
            for number, (label, name, size) in enumerate(zip(labels, names, sizes, strict=True))
        ]
        kept = [f"`{name}`" for name in dataset.columns if name not in names]
        return dataset.select(*kept, *predicted)

    def _predict(self, read: Sequence[str], own: bool) -> _Predict:
        model = self.getOrDefault("model")
        if model is None:
            raise ValueError("there is no model: TorchModel(model=…)")
        return _Predict(
            model=pack_model(copy.deepcopy(model).cpu().eval()),
            columns=tuple(read),
            input_shapes=tuple(map(tuple, self.getOrDefault("input_shapes") or ())),
            predict_row=self.get_prediction_fn() if own else None,
        )

    def _sizes(self, predict: _Predict, frame: DataFrame, read: Sequence[str], num_labels: int) -> list[int]:
        """How many numbers each prediction has: as in the training, else as the first row's."""
        sizes = list((self.getOrDefault("_metadata") or {}).get("output_sizes", ()))
        if len(sizes) == num_labels:
            return sizes
        first = frame.select(*(_plain(frame, name) for name in read)).head(1)
        if not first:
            return [1] * num_labels
        found = predict.load()([[first[0][name]] for name in read])
        return [output.shape[1] for output in found]

    def _label(self, frame: DataFrame, label: str) -> tuple[str, str]:
        """Kind and Spark's name of the type of a label: as it was in training, else as it is here, else a float."""
        from pyspark.ml.linalg import VectorUDT
        from pyspark.sql import types

        metadata = self.getOrDefault("_metadata") or {}
        known = metadata.get("columns", {}).get(label)
        if known is not None:
            return str(known["kind"]), str(known["type"])
        horovods = metadata.get(label, {}).get("spark_data_type")  # a class: DoubleType, DenseVector
        if isinstance(horovods, type):
            is_type = issubclass(horovods, types.DataType)
            return ("scalar", horovods().simpleString()) if is_type else ("vector", "double")
        if label not in frame.columns:
            return "scalar", "float"
        of = frame.schema[label].dataType
        if isinstance(of, VectorUDT):
            return "vector", "double"
        if isinstance(of, types.ArrayType):
            return "array", of.elementType.simpleString()
        return "scalar", of.simpleString()


@dataclass(frozen=True)
class _Predict:
    """Columns of rows in, one two-dimensional array of predictions for each output. `load` gives the function."""

    model: bytes
    columns: tuple[str, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    predict_row: PredictRow | None

    def load(self) -> Callable[[Sequence[Sequence[Any]]], list[np.ndarray[Any, Any]]]:
        module = unpack_model(self.model)
        return lambda columns: self._rows(module, columns) if self.predict_row else self._batch(module, columns)

    def _batch(self, module: torch.nn.Module, columns: Sequence[Sequence[Any]]) -> list[np.ndarray[Any, Any]]:
        inputs = [
            torch.tensor(np.array([_values(value) for value in column]), dtype=torch.float32) for column in columns
        ]
        if self.input_shapes:
            inputs = [tensor.reshape(shape) for tensor, shape in zip(inputs, self.input_shapes, strict=True)]
        with torch.no_grad():
            outputs = module(*inputs)
        num_rows = len(columns[0])
        return [output.reshape(num_rows, -1).float().numpy() for output in _as_list(outputs)]

    def _rows(self, module: torch.nn.Module, columns: Sequence[Sequence[Any]]) -> list[np.ndarray[Any, Any]]:
        from pyspark.sql import Row

        assert self.predict_row is not None
        kind = Row(*self.columns)
        found = []
        with torch.no_grad():
            for values in zip(*columns, strict=True):
                outputs = _as_list(self.predict_row(module, kind(*values)))
                found.append([np.asarray(output.detach().cpu().float()).reshape(1, -1) for output in outputs])
        return [np.concatenate(rows) for rows in zip(*found, strict=True)]


def _evaluated(predict: _Predict, frame: DataFrame, read: Sequence[str], num_labels: int) -> Column:
    """A column of structs with the predictions `o0`, `o1`, …, each an array of doubles."""
    import pandas
    from pyspark.sql import functions as sql
    from pyspark.sql.types import ArrayType, DoubleType, StructField, StructType

    fields = [StructField(f"o{number}", ArrayType(DoubleType())) for number in range(num_labels)]

    def batches(frames: Iterator[Any]) -> Iterator[Any]:
        function = predict.load()
        for columns in frames:
            series = list(columns) if isinstance(columns, tuple) else [columns]
            if not len(series[0]):
                yield pandas.DataFrame({f"o{number}": [] for number in range(num_labels)}, dtype=object)
                continue
            outputs = function([_cells(one) for one in series])
            if len(outputs) != num_labels:
                raise ValueError(f"the model has {len(outputs)} outputs, but there are {num_labels} label columns")
            yield pandas.DataFrame(
                {f"o{number}": list(output.astype(float)) for number, output in enumerate(outputs)}, copy=False
            )

    # As objects, which Spark reads to find out what kind of function it is: pandas is not imported with this module. Spark 3.4
    # knows no other tuple than typing's.
    given: Any = pandas.Series if len(read) == 1 else typing.Tuple[pandas.Series, ...]  # noqa: UP006
    batches.__annotations__ = {"frames": Iterator[given], "return": Iterator[pandas.DataFrame]}
    evaluate: Any = vars(sql)["pandas_udf"](batches, StructType(fields))
    return evaluate(*(_plain(frame, name) for name in read)) if read else sql.lit(None)


def _cells(column: Any) -> list[Any]:
    """The values of a column as pandas has it: a Series, or of structs a DataFrame."""
    import pandas
    from pyspark.sql import Row

    if isinstance(column, pandas.DataFrame):
        return [Row(**record) for record in column.to_dict("records")]
    return list(column)


def _plain(frame: DataFrame, name: str) -> Column:
    """The column as pandas takes it: vectors as arrays."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.ml.linalg import VectorUDT

    value = frame[f"`{name}`"]
    return vector_to_array(value).alias(name) if isinstance(frame.schema[name].dataType, VectorUDT) else value


def _as_label(found: Column, kind: str, of: str, size: int) -> Column:
    """A prediction in the label's own type, rounded where that has no fractions; several numbers are a vector."""
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as sql

    if kind == "vector" or size > 1:
        return array_to_vector(found)
    value = found[0]
    if of in ("double", "float"):
        return value.cast(of)
    # None for what no whole number or decimal can be. `bround` rounds halves as Python does.
    finite = sql.when(~(sql.isnan(value) | (sql.abs(value) == float("inf"))), value)
    if of == "boolean":
        return sql.bround(finite) != 0
    return (sql.bround(finite) if of in _INTEGERS else finite).cast(of)


def _as_list(outputs: Any) -> list[torch.Tensor]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def _values(value: Any) -> Any:
    return value.toArray() if hasattr(value, "toArray") else value
