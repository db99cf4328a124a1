"""Horovod's description of columns, and its utility functions that other estimators and tests import.

Hora describes a column with `dataset.Column`. Users import this module as `horovod.spark.common.util`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hora.launch.environment import variables
from hora.launch.providers.spark.cluster import assigned_gpus
from hora.spark.estimator.dataset import dataset_at, open_dataset, prepared
from hora.spark.estimator.params import check_validation_value

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row
    from pyspark.sql.types import DataType, StructType

    from hora.spark.estimator.store import Store

ARRAY, CUSTOM_SPARSE, NOCHANGE = "array", "custom_sparse_format", "nochange"


@contextlib.contextmanager
def prepare_data(
    num_processes: int,
    store: Store,
    df: DataFrame,
    label_columns: Sequence[str],
    feature_columns: Sequence[str],
    validation: float | str | None = None,
    sample_weight_col: str | None = None,
    compress_sparse: bool = False,
    partitions_per_process: int = 10,
    verbose: int = 0,
) -> Iterator[int]:
    """Write the columns to the store and yield their index there. See `get_dataset_properties`."""
    check_validation(validation, df)
    names = [*feature_columns, *label_columns, *([sample_weight_col] if sample_weight_col else [])]
    partitions = max(1, partitions_per_process) * num_processes
    how: dict[str, Any] = {"validation": validation, "num_proc": num_processes, "sparse": compress_sparse, "seed": None}
    with prepared(df, list(dict.fromkeys(names)), store, num_partitions=partitions, **how) as dataset:
        assert dataset.index is not None
        yield dataset.index


def get_dataset_properties(dataset_idx: int) -> tuple[int, int, Mapping[str, Any], int]:
    """Return training rows, validation rows, columns, and bytes per row (0: not measured)."""
    dataset = dataset_at(dataset_idx)
    return dataset.train_rows, dataset.val_rows, dataset.columns, 0


def clear_training_cache() -> None:
    """Do nothing: a dataset is forgotten with the last training that uses it."""


def get_simple_meta_from_parquet(
    store: Store,
    label_columns: Sequence[str],
    feature_columns: Sequence[str],
    sample_weight_col: str | None = None,
    dataset_idx: int | None = None,
) -> tuple[int, int, Mapping[str, Any], int]:
    """Return the same for data that is in the store already."""
    from pyspark.sql import SparkSession

    validated = store.is_parquet_dataset(store.get_val_data_path(dataset_idx))
    session = SparkSession.builder.getOrCreate()
    dataset = open_dataset(session, store, dataset_idx, with_validation=validated)
    wanted = {*label_columns, *feature_columns, *([sample_weight_col] if sample_weight_col else [])}
    columns = {name: column for name, column in dataset.columns.items() if name in wanted}
    return dataset.train_rows, dataset.val_rows, columns, 0


def column_metadata(df: DataFrame) -> dict[str, dict[str, Any]]:
    """Return Horovod's description of each column of a DataFrame."""
    from pyspark.ml.linalg import DenseVector, SparseVector, VectorUDT
    from pyspark.sql.types import ArrayType

    first = df.head(1)
    found = {}
    for field in df.schema.fields:
        value = first[0][field.name] if first else None
        is_vector, is_array = isinstance(field.dataType, VectorUDT), isinstance(field.dataType, ArrayType)
        sparse = isinstance(value, SparseVector)
        size = len(value) if value is not None and (is_vector or is_array) else None
        found[field.name] = {
            "spark_data_type": (SparseVector if sparse else DenseVector) if is_vector else type(field.dataType),
            "is_sparse_vector_only": sparse,
            "shape": size if is_vector or is_array else 1,
            "intermediate_format": ARRAY if is_vector else NOCHANGE,
            "max_size": size if is_vector or is_array else 1,
        }
    return found


def has_vector_column(df: DataFrame) -> bool:
    from pyspark.ml.linalg import VectorUDT

    return any(isinstance(field.dataType, VectorUDT) for field in df.schema.fields)


def to_petastorm_fn(
    schema_cols: Sequence[str], metadata: Mapping[str, Mapping[str, Any]] | None
) -> Callable[[Any], Row]:
    """Return a function that converts the vectors of a row to arrays: all of them, or those named in `metadata`."""
    from pyspark.ml.linalg import Vector
    from pyspark.sql import Row

    def cell(name: str, value: Any) -> Any:
        is_array = isinstance(value, Vector) if metadata is None else metadata[name]["intermediate_format"] == ARRAY
        return value.toArray().tolist() if is_array else value

    def convert(row: Any) -> Row:
        values = row.asDict() if hasattr(row, "asDict") else dict(row)
        return Row(**{name: cell(name, values[name]) for name in schema_cols})

    return convert


def dense_rows_fn(metadata: Mapping[str, Mapping[str, Any]]) -> Callable[[str, Any], Any]:
    """Return a function from a column's name and rows (a tensor) to the rows that a model gets.

    Rows of Horovod's sparse format (number of values, indices, values, padding) become dense.
    """

    def dense_rows(name: str, rows: Any) -> Any:
        import torch

        if name not in metadata or metadata[name]["intermediate_format"] != CUSTOM_SPARSE:
            return rows
        dense = torch.zeros(len(rows), int(metadata[name]["shape"]))
        for number, row in enumerate(rows):
            count = int(row[0])
            dense[number][row[1 : count + 1].long()] = row[count + 1 : 2 * count + 1].float()
        return dense

    return dense_rows


def check_validation(validation: float | str | None, df: DataFrame | None = None) -> None:
    """Raise ValueError unless it is a share of the rows or one of their columns."""
    check_validation_value(validation)
    if isinstance(validation, str) and df is not None and validation not in df.columns:
        raise ValueError(f"there is no validation column {validation!r}; the DataFrame has {', '.join(df.columns)}")


def check_shape_compatibility(
    metadata: Mapping[str, Mapping[str, Any]],
    feature_columns: Sequence[str],
    label_columns: Sequence[str],
    input_shapes: Sequence[Sequence[int]] | None = None,
    output_shapes: Sequence[Sequence[int]] | None = None,
    label_shapes: Sequence[Sequence[int]] | None = None,
) -> None:
    """Raise ValueError if the shapes do not fit the columns."""
    import math

    wanted = (("feature", feature_columns, input_shapes), ("label", label_columns, label_shapes or output_shapes))
    for kind, names, shapes in wanted:
        if shapes is None:
            continue
        if len(shapes) != len(names):
            raise ValueError(f"there are {len(shapes)} {kind} shapes, but {len(names)} columns: {', '.join(names)}")
        for name, shape in zip(names, shapes, strict=True):
            size = metadata[name]["shape"]
            elements = abs(math.prod(int(extent) for extent in shape))
            if size is not None and size != elements:
                raise ValueError(f"the {kind} shape {list(shape)} of {name!r} does not fit its {size} elements a row")


def get_output_cols(schema: StructType, output_cols: Sequence[str]) -> list[str]:
    """Return the names of a DataFrame's columns followed by these."""
    return [*(field.name for field in schema.fields), *output_cols]


def spark_scalar_to_python_type(dtype: DataType | type[DataType]) -> type[Any]:
    """Return the Python type of a Spark scalar type; raises ValueError for other types."""
    from pyspark.sql import types

    kind = dtype if isinstance(dtype, type) else type(dtype)
    for base, python in (
        (types.BooleanType, bool),
        (types.IntegralType, int),
        (types.FractionalType, float),
        (types.StringType, str),
        (types.BinaryType, bytes),
    ):
        if issubclass(kind, base):
            return python
    raise ValueError(f"{kind.__name__} is not a scalar type with a Python equivalent")


def data_type_to_numpy(dtype: DataType | type[DataType] | type[Any]) -> Any:
    """Return the numpy type of a column's values."""
    import numpy as np
    from pyspark.sql import types

    kind = dtype if isinstance(dtype, type) else type(dtype)
    exact: dict[type[Any], Any] = {
        types.ByteType: np.int8,
        types.ShortType: np.int16,
        types.IntegerType: np.int32,
        types.LongType: np.int64,
        types.FloatType: np.float32,
        types.BooleanType: np.bool_,
        types.StringType: np.str_,
        types.BinaryType: np.bytes_,
    }
    return exact.get(kind, np.float64)


def gpu_or_local_rank(local_rank: int) -> int:
    """Return the GPU assigned by Spark, else the local rank (also with HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX=1)."""
    gpus = assigned_gpus()
    own = variables().get("HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX", "0") == "1"
    return int(gpus[0]) if gpus and gpus[0].isdigit() and not own else local_rank
