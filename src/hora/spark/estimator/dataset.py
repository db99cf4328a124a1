"""Conversion of a DataFrame to a dataset: Parquet in the store, and a description of its columns for the ranks.

All values of a column have the same number of elements, and none is missing; this is checked once, here, on the driver.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hora.data import delta
from hora.spark.estimator import writer
from hora.spark.estimator.claims import Claim
from hora.spark.estimator.store import Store
from hora.spark.estimator.writer import Extent

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

_DESCRIPTION = "_hora_dataset.json"  # Spark and Arrow skip names that start with an underscore
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

    Writes at most `num_partitions` files, whose rows are mixed for `num_proc` ranks. `sparse` stores vectors without
    their zeros.
    """
    from pyspark.sql import functions as sql

    split = "__hora_split"
    stored = {name: _stored(frame, column, sparse=sparse) for name, column in columns.items()}
    if isinstance(validation, str):
        stored[split] = sql.coalesce(sql.col(f"`{validation}`").cast("double") > 0, sql.lit(False))
    elif validation:
        stored[split] = sql.rand(seed) < float(validation)
    chosen = frame.select(*(value.alias(name) for name, value in stored.items())).coalesce(num_partitions)
    kinds = {name: column.kind for name, column in columns.items()}
    paths = [store.get_train_data_path(index), *([store.get_val_data_path(index)] if validation else [])]
    written = writer.write(chosen, kinds, store, paths, num_ranks=num_proc, split=split if validation else None)
    columns = _checked(written.extents, columns, "the DataFrame")
    for path, num_rows in zip(paths, written.num_rows, strict=True):
        if not num_rows:
            raise ValueError(f"there are no rows at {path}")
    dataset = Dataset(index, written.num_rows[0], written.num_rows[1] if validation else 0, columns)
    _describe(dataset, store)
    return dataset


def open_dataset(
    spark: Any,
    store: Store,
    index: int | None,
    *,
    with_validation: bool,
    any_type: bool = False,
) -> Dataset:
    """Return the dataset in the store. It is measured once, and the result stored next to it."""
    path = store.get_train_data_path(index)
    if delta.is_table(store.fs, store.get_localized_path(path)):
        raise ValueError(f"{path} is a Delta table: read it with Spark, and use fit(df)")
    if not store.is_parquet_dataset(path):
        raise ValueError(f"there is no Parquet dataset at {path}; write one there, or use fit(df)")
    description = f"{path}/{_DESCRIPTION}"
    if store.exists(description):
        found = json.loads(store.read(description))
        if not with_validation or found["val_rows"]:
            columns = {name: Column(**column) for name, column in found["columns"].items()}
            val_rows = found["val_rows"] if with_validation else 0
            return Dataset(index=index, train_rows=found["train_rows"], val_rows=val_rows, columns=columns)
    frame = spark.read.parquet(path)
    columns = describe(frame, frame.columns, any_type=any_type)
    found = writer.measure(frame, {name: column.kind for name, column in columns.items()})
    dataset = Dataset(
        index=index,
        columns=_checked(found.extents, columns, path),
        train_rows=_count(store, path),
        val_rows=_count(store, store.get_val_data_path(index)) if with_validation else 0,
    )
    _describe(dataset, store)
    return dataset


def _describe(dataset: Dataset, store: Store) -> None:
    store.write_text(f"{store.get_train_data_path(dataset.index)}/{_DESCRIPTION}", json.dumps(asdict(dataset)))


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


def _count(store: Store, path: str) -> int:
    if not store.is_parquet_dataset(path):
        raise ValueError(f"there is no Parquet dataset at {path}")
    num_rows = sum(fragment.metadata.num_rows for fragment in store.get_parquet_dataset(path).fragments)
    if not num_rows:
        raise ValueError(f"there are no rows at {path}")
    return num_rows


def _checked(extents: Mapping[str, Extent], columns: Mapping[str, Column], where: str) -> dict[str, Column]:
    """Return the columns with their sizes. Raises ValueError for missing values, or rows of different lengths."""
    for name, found in extents.items():
        if found.missing:
            raise ValueError(f"column {name!r} has {found.missing} missing values in {where}; fill or drop them")
        if found.least != found.most:
            raise ValueError(
                f"the rows of column {name!r} differ in shape: they have between {found.least} and {found.most} "
                "elements; all must have the same number"
            )
    return {name: replace(column, size=extents[name].most or 0) for name, column in columns.items()}


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
