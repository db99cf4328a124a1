"""`make_spark_converter`: writes a DataFrame once as Parquet, which every rank opens as a loader of torch batches.

    converter = make_spark_converter(df)                    # on the driver
    with converter.make_torch_dataloader(batch_size=64, cur_shard=hvd.rank(), shard_count=hvd.size()) as loader: …

Names and defaults are those of `petastorm.spark`, which notebooks combine with HorovodRunner. The reader is Hora's own
(`shard`): no row is lost, and all shards have the same number of batches.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import itertools
import logging
import os
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hora.config import on_databricks
from hora.data import delta
from hora.data.shard import POOL_BYTES, DatasetShard, Rows, Transformation, filesystem_of, open_dataset
from hora.platforms.detect import place_variables

if TYPE_CHECKING:
    import torch
    from pyspark.sql import DataFrame

_CODECS = ("uncompressed", "bzip2", "gzip", "lz4", "snappy", "deflate")
_SMALL_FILE_BYTES = 50 * 1024**2
_AVAILABLE_LIMIT_S = 30.0
_POLL_S = 0.2
_WIDER = {"bool": "uint8", "uint16": "int32", "uint32": "int64"}

_log = logging.getLogger("hora.data")


@dataclass(frozen=True)
class SparkDatasetConverter:
    """A dataset in the cache directory. Picklable: ranks open it, only the driver deletes it."""

    cache_dir_url: str
    file_urls: tuple[str, ...]
    dataset_size: int

    PARENT_CACHE_DIR_URL_CONF = "petastorm.spark.converter.parentCacheDirUrl"

    def __len__(self) -> int:
        return self.dataset_size

    def delete(self) -> None:
        """Remove the files now instead of at the end of this process."""
        with _lock:
            _written[:] = [entry for entry in _written if entry[2] != self]
        _delete(self.cache_dir_url)

    @contextlib.contextmanager
    def make_torch_dataloader(
        self,
        batch_size: int = 32,
        num_epochs: int | None = None,
        workers_count: int | None = None,
        shuffling_queue_capacity: int = 0,
        data_loader_fn: Callable[..., Any] | None = None,
        *,
        cur_shard: int | None = None,
        shard_count: int | None = None,
        schema_fields: Sequence[str] | None = None,
        shuffle_row_groups: bool = True,
        seed: int | None = None,
        transform_spec: Any = None,
        reader_pool_type: str = "thread",
        reader_pool_bytes: int = POOL_BYTES,
    ) -> Iterator[Any]:
        """Yield a loader of dicts from column to tensor.

        Args:
            batch_size: Rows of a batch.
            num_epochs: Passes over this rank's rows; None: endlessly.
            workers_count: Threads that read ahead; by default 4.
            shuffling_queue_capacity: More than 0: rows come in random order, whatever `shuffle_row_groups` says.
            data_loader_fn: What makes the loader from a dataset; by default torch's `DataLoader`.
            cur_shard: Which share of the rows; by default this rank's.
            shard_count: How many shares there are; by default the number of ranks.
            schema_fields: The columns to read; None: all.
            shuffle_row_groups: Whether row groups come in random order.
            seed: Of that order; the same on every rank.
            transform_spec: A function on pandas DataFrames, or an object whose `func` is one.
            reader_pool_type: "dummy": read in the calling thread.
            reader_pool_bytes: Memory for rows that are shuffled.
        """
        if (cur_shard is None) != (shard_count is None):
            raise ValueError(f"cur_shard and shard_count go together, but they are {cur_shard} and {shard_count}")
        _await_files(self.file_urls)
        _warn_of_another_place(cur_shard, shard_count)
        filesystem, path = filesystem_of(self.cache_dir_url)
        shard = DatasetShard(
            path,
            filesystem=filesystem,
            cur_shard=cur_shard or 0,
            shard_count=1 if shard_count is None else shard_count,
            columns=schema_fields,
            transform=None if transform_spec is None else Transformation.of(transform_spec),
            num_readers=0 if reader_pool_type == "dummy" else 4 if workers_count is None else workers_count,
            pool_bytes=reader_pool_bytes,
        )
        shuffles = shuffle_row_groups or shuffling_queue_capacity > 0
        rng = np.random.default_rng(seed) if shuffles else None
        reader = _Reader(shard, rng, num_epochs, sharded=shard_count is not None)
        make = data_loader_fn or _Loader
        yield make(reader=reader, batch_size=batch_size, shuffling_queue_capacity=shuffling_queue_capacity)


@dataclass(frozen=True)
class _Reader:
    """Rows of a shard as dicts of arrays: iterate over it for pools of rows, or request batches."""

    shard: DatasetShard
    rng: np.random.Generator | None
    num_epochs: int | None
    sharded: bool

    def __iter__(self) -> Iterator[Rows]:
        return self.shard.passes(rng=self.rng, num_passes=self.num_epochs)

    def batches(self, batch_size: int) -> Iterator[Rows]:
        if self.sharded:
            # Equally many on all ranks, or collectives would wait forever.
            epoch = self.shard.even_sizes(batch_size)
        else:
            steps = self.shard.num_steps(batch_size)
            epoch = [min(batch_size, self.shard.num_rows - step * batch_size) for step in range(steps)]
        epochs = itertools.repeat(epoch) if self.num_epochs is None else itertools.repeat(epoch, self.num_epochs)
        return self.shard.batches(itertools.chain.from_iterable(epochs), rng=self.rng)


class _Loader:
    """Batches as tensors. It can be iterated again after a full pass."""

    def __init__(self, *, reader: _Reader, batch_size: int, shuffling_queue_capacity: int = 0) -> None:
        self._reader, self._batch_size = reader, batch_size
        self._in_pass = False

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        if self._in_pass:
            raise RuntimeError("this loader is in the middle of a pass; finish it, or open another loader")
        self._in_pass = True
        return self._batches()

    def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
        import torch

        for rows in self._reader.batches(self._batch_size):
            wide = {name: values.astype(_WIDER.get(values.dtype.name, values.dtype)) for name, values in rows.items()}
            yield {name: torch.from_numpy(values) for name, values in wide.items()}
        self._in_pass = False


def make_spark_converter(
    df: DataFrame | str,
    parquet_row_group_size_bytes: int = 32 * 1024**2,
    compression_codec: str | None = None,
    dtype: str | None = "float32",
) -> SparkDatasetConverter:
    """Write a DataFrame to the cache directory unless it is there, or open the Parquet directory or Delta table at this
    URL. A table stays at the version that it has now, or at that of `table@v5`.

    Args:
        df: The DataFrame, or the URL.
        parquet_row_group_size_bytes: Size of a row group: what a rank reads at once.
        compression_codec: A codec of Parquet, such as "snappy"; None: uncompressed.
        dtype: The type for all floating-point columns; None leaves them unchanged.
    """
    if dtype not in ("float32", "float64", None):
        raise ValueError(f"dtype must be float32, float64 or None, but it is {dtype!r}")
    codec = (compression_codec or "uncompressed").lower()
    if codec not in _CODECS:
        raise RuntimeError(f"compression_codec must be one of {', '.join(_CODECS)}, but it is {compression_codec!r}")
    if isinstance(df, str):
        if on_databricks() and not df.startswith(("dbfs:/", "file:/dbfs/", "file:///dbfs/")):
            raise ValueError(f"on Databricks a dataset must be in DBFS (dbfs:/… or file:///dbfs/…), but it is {df!r}")
        return _opened(df)
    session: Any = df.sparkSession
    parent = _parent(session)
    # The owner of the data: the application, or the session of a Connect client.
    connect = type(session).__module__.startswith("pyspark.sql.connect")
    application = str(session.session_id if connect else session.sparkContext.applicationId)
    key = (int(parquet_row_group_size_bytes), codec, dtype, parent, application)
    with _lock:
        for known, frame, converter in _written:
            if known == key and frame.sameSemantics(df):
                return converter
        now = datetime.datetime.now().strftime("%Y%m%d%H%M%S")
        url = f"{parent}/{now}-appid-{application}-{uuid.uuid4()}"
        writer = _plain(df, dtype).write.option("parquet.block.size", key[0]).option("compression", codec)
        writer.parquet(url)
        converter = _opened(url)
        if not _written:
            atexit.unregister(_delete_all)
            atexit.register(_delete_all)
        _written.append((key, df, converter))
    _warn_of_small_files(converter)
    return converter


def register_delete_dir_handler(handler: Callable[[str], None] | None) -> None:
    """Use `handler(url)` to remove datasets; None restores the default."""
    global _handler
    _handler = handler


_lock = threading.Lock()
_written: list[tuple[object, DataFrame, SparkDatasetConverter]] = []
_handler: Callable[[str], None] | None = None


def _delete(url: str) -> None:
    if _handler is not None:
        _handler(url)
        return
    filesystem, path = filesystem_of(url)
    with contextlib.suppress(FileNotFoundError):
        filesystem.rm(path, recursive=True)


def _delete_all() -> None:
    for _, _, converter in list(_written):
        try:
            _delete(converter.cache_dir_url)
        except Exception as error:  # raised by a file system; remove the others anyway
            _log.warning("%s was not removed: %s", converter.cache_dir_url, error)


def _parent(spark: Any) -> str:
    name = SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF
    parent = spark.conf.get(name, None)
    if not parent:
        raise ValueError(
            f"set the Spark configuration {name} to a directory that all nodes see, such as file:///dbfs/tmp"
        )
    if ":/" not in parent:
        raise ValueError(f"{name} must be a URL with its scheme, such as file:///tmp/cache, but it is {parent!r}")
    return str(parent).rstrip("/")


def _plain(frame: DataFrame, dtype: str | None) -> DataFrame:
    """Convert vectors to arrays and floating-point columns to the given type."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql import types

    wanted = {"float32": "float", "float64": "double", None: None}[dtype]
    floats = (types.FloatType, types.DoubleType)
    columns = []
    for field in frame.schema.fields:
        column, kind = frame[f"`{field.name}`"], field.dataType
        if isinstance(kind, VectorUDT):
            column = vector_to_array(column, dtype or "float64")
        elif wanted and isinstance(kind, floats):
            column = column.cast(wanted)
        elif wanted and isinstance(kind, types.ArrayType) and isinstance(kind.elementType, floats):
            column = column.cast(f"array<{wanted}>")
        columns.append(column.alias(field.name))
    return frame.select(*columns)


def _opened(url: str) -> SparkDatasetConverter:
    url = url.rstrip("/")
    filesystem, path = filesystem_of(url)
    dataset, opened = open_dataset(filesystem, path)
    folder, place = delta.location(path)[0], delta.location(url)[0]
    files = sorted(f"{place}/{os.path.relpath(name, folder)}" for name in dataset.files)
    return SparkDatasetConverter(url + opened.removeprefix(path), tuple(files), dataset.count_rows())


def _await_files(urls: Sequence[str]) -> None:
    """Raise RuntimeError if not all files become visible here in time."""
    deadline = time.monotonic() + _AVAILABLE_LIMIT_S
    while missing := [url for url in urls if not _exists(url)]:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{len(missing)} of {len(urls)} files, {missing[0]} first, are not visible here after "
                f"{_AVAILABLE_LIMIT_S:g} s; use a cache directory that all nodes see, and do not delete it yet"
            )
        threading.Event().wait(_POLL_S)


def _exists(url: str) -> bool:
    filesystem, path = filesystem_of(url)
    return bool(filesystem.exists(path))


def _warn_of_another_place(cur_shard: int | None, shard_count: int | None) -> None:
    rank, size = place_variables()
    for found, given, name in ((rank, cur_shard, "cur_shard"), (size, shard_count, "shard_count")):
        if found is not None and found[1] != str(given):
            _log.warning("%s is %s, but %s=%s: should they be equal?", name, given, *found)


def _warn_of_small_files(converter: SparkDatasetConverter) -> None:
    places = [filesystem_of(url) for url in converter.file_urls]
    sizes = [filesystem.size(path) for filesystem, path in places]
    if len(sizes) > 1 and statistics.median(sizes) < _SMALL_FILE_BYTES:
        _log.warning(
            "the median size of the %d files in %s is %.1f MB; with fewer and larger files (df.repartition(n)) "
            "reading is faster",
            len(sizes),
            converter.cache_dir_url,
            statistics.median(sizes) / 1024**2,
        )
