"""Snapshots of Delta tables, read without Java: the log by the package `deltalake`, the Parquet files as all others.

`path@v5` is version 5 of a table, as in Spark. The log is copied through fsspec, so that a table needs no other
settings than its files.
"""

from __future__ import annotations

import functools
import operator
import posixpath
import re
import tempfile
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

_LOG = "_delta_log"
_VERSION = re.compile(r"(.+)@v(\d+)")


def location(path: str) -> tuple[str, int | None]:
    """Return the path without its version, and the version."""
    found = _VERSION.fullmatch(path)
    return (found[1], int(found[2])) if found else (path, None)


def is_table(filesystem: Any, path: str) -> bool:
    """Return whether there is a Delta table at this path of an fsspec file system."""
    return bool(filesystem.isdir(posixpath.join(path, _LOG)))


def snapshot(filesystem: Any, path: str, version: int | None) -> tuple[Any, int]:
    """Return a version of a table, the newest unless given, as a dataset of pyarrow; and the number of that version.

    Raises:
        ImportError: without `deltalake`.
        ValueError: for a table whose Parquet files are not what its rows are.
    """
    try:
        from deltalake import DeltaTable
    except ImportError as error:
        raise ImportError(f"{path} is a Delta table, which needs deltalake: pip install 'hora-train[delta]'") from error
    with tempfile.TemporaryDirectory(prefix="hora-") as folder:
        filesystem.get(posixpath.join(path, _LOG), posixpath.join(folder, _LOG), recursive=True)
        table = DeltaTable(folder, version=version)
        _check(table, path)
        return _dataset(table, filesystem, path), table.version()


def _check(table: Any, path: str) -> None:
    import pyarrow

    mode = table.metadata().configuration.get("delta.columnMapping.mode", "none")
    if mode != "none":
        raise ValueError(
            f"the Delta table at {path} has delta.columnMapping.mode={mode}: its files have other column names. Read "
            "it with Spark, and give the DataFrame to make_spark_converter or to an estimator"
        )
    deleted = pyarrow.table(table.deletion_vectors()).num_rows
    if deleted:
        raise ValueError(
            f"{deleted} files of the Delta table at {path} still hold deleted rows, which deletion vectors hide. "
            f"Remove them with REORG TABLE delta.`{path}` APPLY (PURGE), or read the table with Spark"
        )


def _dataset(table: Any, filesystem: Any, path: str) -> Any:
    import pyarrow
    from pyarrow import dataset, fs

    schema = pyarrow.schema(table.schema().to_arrow())
    files = pyarrow.table(table.get_add_actions(flatten=True)).sort_by("path")
    keys: Sequence[str] = table.metadata().partition_columns
    values = [files.column(f"partition.{key}").cast(schema.field(key).type).to_pylist() for key in keys]
    partitions = [
        functools.reduce(operator.and_, [dataset.field(key) == value for key, value in zip(keys, row, strict=True)])
        for row in zip(*values, strict=True)
    ]
    names = [unquote(name) for name in files.column("path").to_pylist()]
    if away := next((name for name in names if "://" in name), None):
        raise ValueError(f"the Delta table at {path} is a clone, whose files are elsewhere ({away}); read the original")
    return dataset.FileSystemDataset.from_paths(
        [posixpath.join(path, name) for name in names],
        schema=schema,
        format=dataset.ParquetFileFormat(),
        filesystem=fs.PyFileSystem(fs.FSSpecHandler(filesystem)),
        partitions=partitions or None,
    )
