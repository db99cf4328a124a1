"""`TorchModel`: a trained model that predicts on DataFrames. Users import it from `horovod.spark.torch`.

A pandas UDF over the feature columns makes the predictions; a subclass's own function gets the DataFrame's rows in a
plain UDF. The model is loaded once per Python worker and task. Works on classic Spark and through Spark Connect.
"""

from __future__ import annotations

import copy
import functools
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hora.spark.estimator.base import HorovodModel
from hora.spark.estimator.dataset import kind_of
from hora.spark.estimator.packing import as_list, pack_model, unpack_model

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

PredictRow = Callable[[torch.nn.Module, Any], Any]
Outputs = list["np.ndarray[Any, Any]"]
Predict = Callable[[Sequence[Sequence[Any]]], Outputs]  # columns of rows -> values of each output
_INTEGERS = ("tinyint", "smallint", "int", "bigint")


class TorchModel(HorovodModel, own={}, unlisted=("outputCols",)):
    """A trained torch model. `transform(df)` adds a column of predictions for each label.

    If a subclass overrides `get_prediction_fn`, rows are predicted one by one.
    """

    def getOutputCols(self) -> list[str]:  # noqa: N802 - pyspark's name
        """Return the names of the predictions."""
        labels = self.getOrDefault("label_columns") or ()
        return list(self.getOrDefault("outputCols") or [f"{label}__output" for label in labels])

    def get_prediction_fn(self) -> PredictRow:
        """Return a function `(model, row) -> tensor, or one per label`, run without gradients in eval mode."""
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
        names = self.getOutputCols()
        if not labels or len(names) != len(labels):
            raise ValueError(f"there are {len(labels)} label columns {labels}, but {len(names)} output columns {names}")
        features = list(self.getOrDefault("feature_columns") or ())
        missing = [name for name in features if name not in dataset.columns]
        if missing:
            raise ValueError(f"the DataFrame has no column {', '.join(missing)}; it has {', '.join(dataset.columns)}")
        if type(self).get_prediction_fn is TorchModel.get_prediction_fn:
            load = self._loader()
            sizes = self._sizes(lambda row: load()([[row[name]] for name in features]), dataset, len(labels))
            outputs = _evaluated(load, dataset, features, sizes)
        else:  # a subclass's function gets whole rows and may use any column
            by_rows = functools.partial(_predict_row, self._packed(), self.get_prediction_fn())
            sizes = self._sizes(by_rows, dataset, len(labels))
            outputs = _evaluated_by_rows(by_rows, dataset, sizes)
        predicted = [
            _as_label(outputs[f"o{number}"], *self._label(dataset, label), size).alias(name)
            for number, (label, name, size) in enumerate(zip(labels, names, sizes, strict=True))
        ]
        kept = [f"`{name}`" for name in dataset.columns if name not in names]
        return dataset.select(*kept, *predicted)

    def _loader(self) -> Callable[[], Predict]:
        """Return a picklable function that loads the model and returns its predictions of a batch."""
        return functools.partial(_load, self._packed(), self.getOrDefault("input_shapes") or (), self._batch_size())

    def _batch_size(self) -> int:
        size = self.getOrDefault("batch_size")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"batch_size must be an integer of at least 1, but it is {size!r}")
        return size

    def _packed(self) -> bytes:
        model = self.getOrDefault("model")
        if model is None:
            raise ValueError("there is no model: TorchModel(model=…)")
        return pack_model(copy.deepcopy(model).cpu().eval())

    def _sizes(self, predict: Callable[[Any], Outputs], frame: DataFrame, num_labels: int) -> list[int]:
        """Return the number of values per prediction: from the training, else from the first row."""
        sizes = list((self.getOrDefault("_metadata") or {}).get("output_sizes", ()))
        if len(sizes) == num_labels:
            return sizes
        first = frame.head(1)
        if not first:
            return [1] * num_labels
        outputs = predict(first[0])
        _check_outputs(outputs, num_labels)
        return [output.size for output in outputs]

    def _label(self, frame: DataFrame, label: str) -> tuple[str, str]:
        """Return a label's kind and Spark type name: from the training, else from this DataFrame, else a float."""
        from pyspark.sql.types import DataType

        metadata = self.getOrDefault("_metadata") or {}
        known = metadata.get("columns", {}).get(label)
        if known is not None:
            return str(known["kind"]), str(known["type"])
        horovods = metadata.get(label, {}).get("spark_data_type")  # a class: DoubleType, DenseVector
        if isinstance(horovods, type):
            is_type = issubclass(horovods, DataType)
            return ("scalar", horovods().simpleString()) if is_type else ("vector", "double")
        if label not in frame.columns:
            return "scalar", "float"
        kind, of = kind_of(frame.schema[label].dataType)
        return kind, of.simpleString()


def in_batches(predict: Predict, batch_size: int) -> Predict:
    """Return the same function, which sees at most so many rows at once: Spark hands over ten thousand."""

    def predict_all(columns: Sequence[Sequence[Any]]) -> Outputs:
        parts = [
            predict([column[begin : begin + batch_size] for column in columns])
            for begin in range(0, len(columns[0]), batch_size)
        ]
        return [np.concatenate(outputs) for outputs in zip(*parts, strict=True)]

    return predict_all


def _load(model: bytes, input_shapes: Sequence[Sequence[int]], batch_size: int = 256) -> Predict:
    module = unpack_model(model)

    def predict(columns: Sequence[Sequence[Any]]) -> Outputs:
        inputs = [torch.tensor(as_array(column), dtype=torch.float32) for column in columns]
        if input_shapes:
            inputs = [tensor.reshape(tuple(shape)) for tensor, shape in zip(inputs, input_shapes, strict=True)]
        with torch.no_grad():
            outputs = module(*inputs)
        return [output.reshape(len(columns[0]), -1).float().numpy() for output in as_list(outputs)]

    return in_batches(predict, batch_size)


_unpacked = functools.lru_cache(maxsize=1)(unpack_model)  # for all rows of a Python worker


def _predict_row(model: bytes, function: PredictRow, row: Any) -> Outputs:
    """Return an array per output of the user's function for a row."""
    with torch.no_grad():
        outputs = as_list(function(_unpacked(model), row))
    return [np.asarray(output.detach().cpu().float()).reshape(-1) for output in outputs]


def _evaluated_by_rows(predict: Callable[[Any], Outputs], frame: DataFrame, sizes: Sequence[int]) -> Column:
    """Return the same column for a function of whole rows, with the DataFrame's vectors and structs."""
    import pyspark
    from pyspark.sql import functions as sql

    def values(row: Any) -> tuple[Any, ...]:
        outputs = predict(row)
        _check_outputs(outputs, len(sizes))
        lists = [output.astype(float).tolist() for output in outputs]
        return tuple(found if size > 1 else next(iter(found), None) for found, size in zip(lists, sizes, strict=True))

    # Arrow converts through pandas, which has no vectors. Spark 3.4 only has this path.
    plain = {"useArrow": False} if tuple(map(int, pyspark.__version__.split(".")[:2])) >= (3, 5) else {}
    function: Any = vars(sql)["udf"](values, _outputs_type(sizes), **plain)
    return function(sql.struct(*(frame[f"`{name}`"] for name in frame.columns)))


def _evaluated(load: Callable[[], Predict], frame: DataFrame, read: Sequence[str], sizes: Sequence[int]) -> Column:
    """Return a column of structs with the predictions `o0`, `o1`, …, each a double, or an array of several."""
    import pandas
    from pyspark.sql import functions as sql

    def batches(frames: Iterator[Any]) -> Iterator[Any]:
        function = load()
        for given in frames:
            series = as_list(given)
            if not len(series[0]):
                yield pandas.DataFrame({f"o{number}": [] for number in range(len(sizes))}, dtype=object)
                continue
            outputs = function([one.to_numpy() for one in series])
            _check_outputs(outputs, len(sizes))
            # Spark copies arrays row by row in Python, and columns of numbers at once.
            columns = {
                f"o{number}": list(output.astype(float)) if size > 1 else output[:, 0].astype(float)
                for number, (output, size) in enumerate(zip(outputs, sizes, strict=True))
            }
            yield pandas.DataFrame(columns, copy=False)

    # Annotations as objects, from which Spark derives the kind of function: pandas is not imported with this module.
    # Spark 3.4 only accepts typing's tuple.
    series: Any = pandas.Series if len(read) == 1 else typing.Tuple[pandas.Series, ...]  # noqa: UP006
    batches.__annotations__ = {"frames": Iterator[series], "return": Iterator[pandas.DataFrame]}
    evaluate: Any = vars(sql)["pandas_udf"](batches, _outputs_type(sizes))
    return evaluate(*(_plain(frame, name) for name in read)) if read else sql.lit(None)


def _outputs_type(sizes: Sequence[int]) -> StructType:
    from pyspark.sql.types import ArrayType, DoubleType, StructField, StructType

    types = [ArrayType(DoubleType()) if size > 1 else DoubleType() for size in sizes]
    return StructType([StructField(f"o{number}", one) for number, one in enumerate(types)])


def _check_outputs(outputs: Sequence[Any], num_labels: int) -> None:
    if len(outputs) != num_labels:
        raise ValueError(f"the model has {len(outputs)} outputs, but there are {num_labels} label columns")


def _plain(frame: DataFrame, name: str) -> Column:
    """Return the column for pandas: vectors as arrays."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.ml.linalg import VectorUDT

    value = frame[f"`{name}`"]
    return vector_to_array(value).alias(name) if isinstance(frame.schema[name].dataType, VectorUDT) else value


def _as_label(value: Column, kind: str, of: str, size: int) -> Column:
    """Return a prediction in the label's type, rounded for integers; several values become a vector."""
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as sql

    if kind == "vector" or size > 1:
        return array_to_vector(value if size > 1 else sql.array(value))
    if of in ("double", "float"):
        return value.cast(of)
    # None for values that no integer or decimal can hold. `bround` rounds halves as Python does.
    finite = sql.when(~(sql.isnan(value) | (sql.abs(value) == float("inf"))), value)
    if of == "boolean":
        return sql.bround(finite) != 0
    return (sql.bround(finite) if of in _INTEGERS else finite).cast(of)


def as_array(cells: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Return the cells of a feature column as rows of an array: numbers, lists, arrays or Spark's vectors."""
    if isinstance(cells, np.ndarray) and cells.dtype != object:
        return cells
    first = cells[0]
    if isinstance(first, np.ndarray) and len(set(map(len, cells))) == 1:  # at once: the cells are views of one buffer
        return np.concatenate(cells).reshape(len(cells), *first.shape)
    return np.array([cell.toArray() if hasattr(cell, "toArray") else cell for cell in cells])
