"""Stores: hold an estimator's prepared data, checkpoints and logs, on any file system that fsspec supports.

<prefix>/intermediate_{train,val,test}_data.<index>      Parquet, written by Spark, read by the ranks
<prefix>/runs/<run id>/checkpoint, logs/                  output of a training

Users import the classes from `horovod.spark.common.store`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
import re
import tempfile
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from hora.config import on_databricks
from hora.launch.environment import variables

LocalDirectory = contextlib.AbstractContextManager[str]


class Store:
    """Paths under a prefix, and the file operations that an estimator needs.

    A subclass may have other prefixes (`matches`), forms of a full path, and file systems than fsspec's URLs.
    """

    CHECKPOINT: ClassVar[str] = "checkpoint"
    LOGS: ClassVar[str] = "logs"

    def __init__(
        self,
        prefix_path: str,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        checkpoint_filename: str | None = None,
    ) -> None:
        self.prefix_path = self.get_full_path(str(prefix_path))
        self._checkpoint_filename = checkpoint_filename or self.CHECKPOINT
        self.storage_options = dict(storage_options or {})
        self._train_path = self._full_or_default(train_path, "intermediate_train_data")
        self._val_path = self._full_or_default(val_path, "intermediate_val_data")
        self._test_path = self._full_or_default(test_path, "intermediate_test_data")
        self._runs_path = self._full_or_default(runs_path, "runs")
        self._save_runs = bool(save_runs)

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> Store:
        """Return the store for this prefix: HDFS, Databricks' file system, or any other that fsspec supports."""
        path = str(prefix_path)
        if HDFSStore.matches(path):
            return HDFSStore(path, *args, **kwargs)
        if on_databricks() and DBFSLocalStore.matches(path):
            return DBFSLocalStore(path, *args, **kwargs)
        return FilesystemStore(path, *args, **kwargs)

    # ---- where things are ----------------------------------------------------------------------------------

    def get_train_data_path(self, idx: int | None = None) -> str:
        return _indexed(self._train_path, idx)

    def get_val_data_path(self, idx: int | None = None) -> str:
        return _indexed(self._val_path, idx)

    def get_test_data_path(self, idx: int | None = None) -> str:
        return _indexed(self._test_path, idx)

    def saving_runs(self) -> bool:
        return self._save_runs

    def get_runs_path(self) -> str:
        return self._runs_path

    def get_run_path(self, run_id: str) -> str:
        return posixpath.join(self._runs_path, run_id)

    def get_checkpoint_path(self, run_id: str) -> str | None:
        return posixpath.join(self.get_run_path(run_id), self.get_checkpoint_filename()) if self._save_runs else None

    def get_logs_path(self, run_id: str) -> str | None:
        return posixpath.join(self.get_run_path(run_id), self.get_logs_subdir()) if self._save_runs else None

    def get_checkpoint_filename(self) -> str:
        return self._checkpoint_filename

    def get_data_metadata_path(self) -> str:
        """Return the path for programs that describe their data. Hora keeps its own description with the data."""
        return posixpath.join(self.prefix_path, "data_metadata")

    def get_logs_subdir(self) -> str:
        return self.LOGS

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """Return the files of a run whose names end in `suffix`."""
        folder = self.get_run_path(run_id)
        if not self.exists(folder):
            return []
        found = self.fs.find(self.get_localized_path(folder))
        return [self.get_full_path(str(self.fs.unstrip_protocol(name))) for name in found if name.endswith(suffix)]

    def get_full_path(self, path: str) -> str:
        """Return a URL that Spark and every rank understand."""
        if "://" in path:
            return path.rstrip("/")
        if path.startswith("file:/"):
            path = path.removeprefix("file:")
        return "file://" + os.path.abspath(path)

    def get_localized_path(self, path: str) -> str:
        """Return the same location as a path of `fs`."""
        import fsspec

        return str(fsspec.core.url_to_fs(self.get_full_path(path), **self.storage_options)[1])

    # ---- files ---------------------------------------------------------------------------------------------

    @property
    def fs(self) -> Any:
        import fsspec

        return fsspec.core.url_to_fs(self.prefix_path, **self.storage_options)[0]

    def exists(self, path: str) -> bool:
        return bool(self.fs.exists(self.get_localized_path(path)))

    def read(self, path: str) -> bytes:
        with self.fs.open(self.get_localized_path(path), "rb") as file:
            return bytes(file.read())

    def write_text(self, path: str, text: str) -> None:
        place = self.get_localized_path(path)
        self.fs.makedirs(posixpath.dirname(place), exist_ok=True)
        with self.fs.open(place, "wb") as file:
            file.write(text.encode())

    def is_parquet_dataset(self, path: str) -> bool:
        from pyarrow import ArrowInvalid

        try:
            return bool(self.get_parquet_dataset(path).files)
        except (OSError, ArrowInvalid):
            return False

    def get_parquet_dataset(self, path: str) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetDataset(self.get_localized_path(path), filesystem=self.fs)

    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], LocalDirectory]:
        """Return a function that creates a temporary local directory as a context manager."""
        return functools.partial(temporary_folder, f"{posixpath.basename(run_id)}-")

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """Return a function that copies a local directory into the run's directory, file by file."""
        return functools.partial(_copy, self, self.get_run_path(run_id))

    def to_remote(self, run_id: str, dataset_idx: int | None) -> types.SimpleNamespace:
        """Return the paths of this store for one run and dataset, for a rank. Picklable."""
        return types.SimpleNamespace(
            train_data_path=self.get_train_data_path(dataset_idx),
            val_data_path=self.get_val_data_path(dataset_idx),
            test_data_path=self.get_test_data_path(dataset_idx),
            saving_runs=self.saving_runs(),
            runs_path=self.get_runs_path(),
            run_path=self.get_run_path(run_id),
            checkpoint_path=self.get_checkpoint_path(run_id),
            logs_path=self.get_logs_path(run_id),
            checkpoint_filename=self.get_checkpoint_filename(),
            logs_subdir=self.get_logs_subdir(),
            get_local_output_dir=self.get_local_output_dir_fn(run_id),
            sync=self.sync_fn(run_id),
        )

    def _full_or_default(self, path: str | None, name: str) -> str:
        return self.get_full_path(str(path)) if path else posixpath.join(self.prefix_path, name)


class FilesystemStore(Store):
    """Any URL that fsspec understands (`s3://`, `gs://`, `abfs://`, `file://`); a plain path is local."""


LocalStore = FilesystemStore


class HDFSStore(Store):
    """HDFS: `hdfs://namenode:8020/path`, `hdfs:///path` or `/path` (of the default namenode).

    Args:
        args: Positional arguments of the function, a tuple.
        kwargs: Keyword arguments of the function, a dict; of a state: the values that it keeps, by name.
    """

    _URL = re.compile(r"(?:hdfs://(?P<host>[^/:]*)(?::(?P<port>\d+))?)?(?P<path>/.*)")

    def __init__(
        self,
        prefix_path: str,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str = "libhdfs",
        extra_conf: Mapping[str, str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if driver != "libhdfs":
            raise ValueError(f"driver must be 'libhdfs', the only one that Arrow supports, but it is {driver!r}")
        found = self._parse(str(prefix_path))
        self._host = host or found["host"] or "default"
        self._port = int(port or found["port"] or 0)
        self._options = {"user": user, "kerb_ticket": kerb_ticket, "extra_conf": dict(extra_conf or {})}
        super().__init__(prefix_path, *args, **kwargs)

    @classmethod
    def matches(cls, path: str) -> bool:
        return path.startswith("hdfs://")

    def get_full_path(self, path: str) -> str:
        host = "" if self._host == "default" else self._host
        port = f":{self._port}" if host and self._port else ""
        return f"hdfs://{host}{port}{self._parse(path)['path']}".rstrip("/")

    def get_localized_path(self, path: str) -> str:
        return str(self._parse(path)["path"])

    @property
    def fs(self) -> Any:
        import fsspec

        return fsspec.filesystem("hdfs", host=self._host, port=self._port, **self._options, **self.storage_options)

    @classmethod
    def _parse(cls, path: str) -> re.Match[str]:
        found = cls._URL.fullmatch(path)
        if found is None:
            raise ValueError(f"a path in HDFS is hdfs://host:port/path, hdfs:///path or /path, but it is {path!r}")
        return found


class DBFSLocalStore(FilesystemStore):
    """Databricks' file system through its mount: `/dbfs/…`, `dbfs:/…`, `file:/dbfs/…` or `file:///dbfs/…`."""

    CHECKPOINT = "checkpoint.tf"
    _PATH = re.compile(r"(?:dbfs:|(?:file:(?://)?)?/dbfs)(?P<path>/(?!/).*)")

    @classmethod
    def matches(cls, path: str) -> bool:
        return cls._PATH.fullmatch(path) is not None

    def get_full_path(self, path: str) -> str:
        found = self._PATH.fullmatch(path)
        if found is None:
            raise ValueError(
                f"a path in DBFS is /dbfs/path, dbfs:/path, file:/dbfs/path or file:///dbfs/path, but it is {path!r}"
            )
        return f"file:///dbfs{found['path']}".rstrip("/")

    def get_localized_path(self, path: str) -> str:
        return self.get_full_path(path).removeprefix("file://")


def temporary_folder(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """Make a folder for temporary files; in a rank one that its agent removes, whatever ends the rank."""
    scratch = variables().get("HORA_SCRATCH")
    if scratch:
        os.makedirs(scratch, mode=0o700, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix=prefix, dir=scratch)


def _copy(store: Store, target: str, local_dir: str) -> None:
    """Copy a local directory to this path of the store, file by file."""
    files, target = store.fs, store.get_localized_path(target)
    for folder, _, names in os.walk(local_dir):
        below = os.path.relpath(folder, local_dir)
        place = target if below == "." else posixpath.join(target, *below.split(os.sep))
        files.makedirs(place, exist_ok=True)
        for name in names:
            # If rank 0 dies while copying, the last complete file stays.
            part = posixpath.join(place, f".{name}.part")
            files.put_file(os.path.join(folder, name), part)
            files.mv(part, posixpath.join(place, name))


def _indexed(path: str, idx: int | None) -> str:
    return path if idx is None else f"{path}.{idx}"
