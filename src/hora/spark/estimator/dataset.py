"""Conversion of a DataFrame to a dataset: Parquet in the store, and a description of its columns for the ranks.

All values of a column have the same number of elements, and none is missing; this is checked once, here, on the driver.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hora.spark.estimator.claims import Claim
from hora.spark.estimator.store import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

_DESCRIPTION = "_hora_dataset.json"  # Spark and Arrow skip names that start with an underscore
_ROWS_OF_A_FILE = 1000  # with fewer rows, another file costs a task that takes longer than its rows
_UNKNOWN_TO_SPARK = ("No FileSystem for scheme", "FileSystem not found", "UnsupportedFileSystemException")
_ROWS = "__hora_rows"
_SPARSE = ["size", "indices", "values"]  # of a vector stored without its zeros


@dataclass(frozen=True)
class Column:
    """A column as it was."""

    name: str
    kind: str  # scalar, array, vector or object
    type: str  # Spark's type name; that of the elements for an array
    size: int  # the number of elements per row


@dataclass(frozen=True)
class Dataset:
    """Data at the store's train and validation paths of `index`."""

    index: int | None
    train_rows: int
    val_rows: int
    columns: Mapping[str, Column]


def describe(frame: DataFrame, names: Sequence[str], *, any_type: bool = False) -> dict[str, Column]:
    """Describe the columns of a DataFrame, with unknown sizes (0). Raises ValueError if tensors cannot hold a column.

    With `any_type`, a transformation handles such a column while reading, and it becomes an "object".
    """
    from pyspark.sql import types

    found = {}
    for name in names:
        if name not in frame.columns:
            raise ValueError(f"there is no column {name!r}; the DataFrame has {', '.join(frame.columns)}")
        whole = frame.schema[name].dataType
        kind, of = kind_of(whole)
        if not isinstance(of, types.NumericType | types.BooleanType):
            if not any_type:
                raise ValueError(
                    f"column {name!r} has type {whole.simpleString()}; "
                    "only numbers, booleans, arrays of them and vectors are supported"
                )
            kind, of = "object", whole
        size = 0 if kind in ("vector", "array") else 1
        found[name] = Column(name=name, kind=kind, type=of.simpleString(), size=size)
    return found


def kind_of(of: DataType) -> tuple[str, DataType]:
    """Return the kind of a column of this type (scalar, array or vector), and the type of its elements."""
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql import types

    if isinstance(of, VectorUDT) or _is_sparse(of):
        return "vector", types.DoubleType()
    return ("array", of.elementType) if isinstance(of, types.ArrayType) else ("scalar", of)


def materialise(
    frame: DataFrame,
    columns: Mapping[str, Column],
    store: Store,
    index: int | None,
    *,
    validation: float | str | None,
    num_partitions: int,
    num_proc: int = 1,
    seed: int | None,
    sparse: bool = False,
) -> Dataset:
    """Write the columns to the store. Raises ValueError for rows of different shapes, missing values or an empty part.

    Writes at most `num_partitions` files for the `num_proc` ranks, fewer if there are few rows. `sparse` stores vectors
    without their zeros.
    """
    from pyspark.sql import functions as sql

    split = "__hora_split"
    stored = {name: _stored(frame, column, sparse=sparse) for name, column in columns.items()}
    if isinstance(validation, str):
        stored[split] = sql.coalesce(sql.col(f"`{validation}`").cast("double") > 0, sql.lit(False))
    elif validation:
        stored[split] = sql.rand(seed) < float(validation)
    chosen = frame.select(*(value.alias(name) for name, value in stored.items()))
    chosen.persist()
    try:
        # Measure the data in memory: reading the files again would take two more jobs.
        columns, num_rows = _measured(chosen, columns, "the DataFrame")
        num_files = min(num_partitions, max(num_proc, num_rows // _ROWS_OF_A_FILE))
        parts = [(chosen.where(~sql.col(split)) if validation else chosen, store.get_train_data_path(index))]
        if validation:
            parts.append((chosen.where(split), store.get_val_data_path(index)))
        for part, path in parts:
            _write(part.select(*(f"`{name}`" for name in columns)).repartition(num_files), store, path)
    finally:
        chosen.unpersist()
    return open_dataset(frame.sparkSession, store, index, columns=columns, with_validation=bool(validation))


def open_dataset(
    spark: Any,
    store: Store,
    index: int | None,
    *,
    columns: Mapping[str, Column] | None = None,
    with_validation: bool,
    any_type: bool = False,
) -> Dataset:
    """Return the dataset in the store; without `columns` it is measured once, and the result stored next to it."""
    path = store.get_train_data_path(index)
    if not store.is_parquet_dataset(path):
        raise ValueError(f"there is no Parquet dataset at {path}; write one there, or use fit(df)")
    description = f"{path}/{_DESCRIPTION}"
    if columns is None and store.exists(description):
        found = json.loads(store.read(description))
        if not with_validation or found["val_rows"]:
            columns = {name: Column(**column) for name, column in found["columns"].items()}
            val_rows = found["val_rows"] if with_validation else 0
            return Dataset(index=index, train_rows=found["train_rows"], val_rows=val_rows, columns=columns)
    if columns is None:
        frame = spark.read.parquet(path)
        columns, _ = _measured(frame, describe(frame, frame.columns, any_type=any_type), path)
    dataset = Dataset(
        index=index,
        columns=columns,
        train_rows=_count(store, path),
        val_rows=_count(store, store.get_val_data_path(index)) if with_validation else 0,
    )
    store.write_text(description, json.dumps(asdict(dataset)))
    return dataset


def _is_sparse(kind: Any) -> bool:
    from pyspark.sql.types import StructType

    return isinstance(kind, StructType) and kind.names == _SPARSE


def _stored(frame: DataFrame, column: Column, *, sparse: bool) -> Any:
    """Return the column for Parquet readers: vectors as arrays (or `sparse`), decimals as doubles."""
    from pyspark.ml.functions import vector_to_array

    value = frame[f"`{column.name}`"]
    if column.kind == "vector":
        return _without_zeros(vector_to_array(value)) if sparse else vector_to_array(value)
    if column.type.startswith("decimal"):
        return value.cast("double" if column.kind == "scalar" else "array<double>")
    return value


def _without_zeros(array: Any) -> Any:
    """Return an array as its size, the indices of its non-zero elements, and these elements."""
    from pyspark.sql import functions as sql

    numbered = sql.transform(array, lambda value, index: sql.when(value != 0, index))
    indices = sql.filter(numbered, lambda index: index.isNotNull())
    values = sql.filter(array, lambda value: value != 0)
    found = sql.struct(sql.size(array).alias("size"), indices.alias("indices"), values.alias("values"))
    return sql.when(array.isNotNull(), found)


def _write(rows: DataFrame, store: Store, path: str) -> None:
    """Replace the Parquet at `path`: by Spark, or by its tasks if only the store supports the file system."""
    try:
        rows.write.mode("overwrite").parquet(path)
    except Exception as error:
        if not any(words in str(error) for words in _UNKNOWN_TO_SPARK):
            raise
    else:
        return
    place = store.get_localized_path(path)
    if store.fs.exists(place):
        store.fs.rm(place, recursive=True)

    def write_part(batches: Iterable[Any]) -> Iterator[Any]:
        """Write a task's rows to a Parquet file. A task that Spark retries writes the same file."""
        import pyarrow
        from pyarrow import parquet
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None, "a Spark task without its context"
        files, num_rows = store.fs, 0
        files.makedirs(place, exist_ok=True)
        with contextlib.ExitStack() as stack:
            writer = None
            for batch in batches:
                if writer is None:
                    file = files.open(f"{place}/part-{context.partitionId():05d}.parquet", "wb")
                    writer = stack.enter_context(parquet.ParquetWriter(stack.enter_context(file), batch.schema))
                writer.write_batch(batch)
                num_rows += batch.num_rows
        yield pyarrow.RecordBatch.from_pydict({"rows": [num_rows]})

    rows.mapInArrow(write_part, "rows long").collect()


def _count(store: Store, path: str) -> int:
    if not store.is_parquet_dataset(path):
        raise ValueError(f"there is no Parquet dataset at {path}")
    num_rows = sum(fragment.metadata.num_rows for fragment in store.get_parquet_dataset(path).fragments)
    if not num_rows:
        raise ValueError(f"there are no rows at {path}")
    return num_rows


def _measured(frame: DataFrame, columns: Mapping[str, Column], where: str) -> tuple[dict[str, Column], int]:
    """Return the columns with their sizes, and the number of rows."""
    from pyspark.sql import functions as sql

    wanted = [sql.count(sql.lit(1)).alias(_ROWS)]
    for name, column in columns.items():
        size = sql.size(f"`{name}`") if column.kind in ("vector", "array") else sql.lit(1)
        if _is_sparse(frame.schema[name].dataType) and column.kind == "vector":
            size = sql.col(f"`{name}`.size")
        wanted += [sql.min(size).alias(f"min {name}"), sql.max(size).alias(f"max {name}")]
        wanted.append(sql.count(sql.when(sql.col(f"`{name}`").isNull(), 1)).alias(f"null {name}"))
    measured = frame.agg(*wanted).collect()[0]
    for name in columns:
        if measured[f"null {name}"]:
            raise ValueError(
                f"column {name!r} has {measured[f'null {name}']} missing values in {where}; fill or drop them"
            )
        if measured[f"min {name}"] != measured[f"max {name}"]:
            raise ValueError(
                f"the rows of column {name!r} differ in shape: they have between {measured[f'min {name}']} and "
                f"{measured[f'max {name}']} elements; all must have the same number"
            )
    sized = {name: replace(column, size=int(measured[f"max {name}"] or 0)) for name, column in columns.items()}
    return sized, int(measured[_ROWS])


@dataclass
class _Entry:
    key: object
    claim: Claim
    users: int = 0
    making: threading.Lock = field(default_factory=threading.Lock)
    dataset: Dataset | None = None


_lock = threading.Lock()
_in_use: dict[int, _Entry] = {}  # by index: what trainings of this driver use


@contextlib.contextmanager
def prepared(
    frame: DataFrame, names: Sequence[str], store: Store, *, num_partitions: int, any_type: bool = False, **how: Any
) -> Iterator[Dataset]:
    """Write these columns at a free index (see `materialise`), unless another training uses them already."""
    columns = describe(frame, names, any_type=any_type)
    key = (store.prefix_path, id(frame), tuple(names), num_partitions, how)
    with _lock:
        index = next((index for index, entry in _in_use.items() if entry.key == key), None)
        if index is None:
            index, claim = _claimed(store)
            _in_use[index] = _Entry(key, claim)
        entry = _in_use[index]
        entry.users += 1
    try:
        with entry.making:
            if entry.dataset is None:
                entry.dataset = materialise(frame, columns, store, index, num_partitions=num_partitions, **how)
        yield entry.dataset
    finally:
        with _lock:
            entry.users -= 1
            if not entry.users:
                del _in_use[index]
                entry.claim.close()


def _claimed(store: Store) -> tuple[int, Claim]:
    """Return the first index that neither this nor another application uses, and a claim on it."""
    for index in itertools.count():
        claim = None if index in _in_use else Claim.acquire(store, index)
        if claim is not None:
            return index, claim
    raise AssertionError("there is always another index")


def dataset_at(index: int) -> Dataset:
    """Return the dataset that is in use at this index."""
    found = _in_use[index].dataset
    assert found is not None, "an index that nobody has yet"
    return found
