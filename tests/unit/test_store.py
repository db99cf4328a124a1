"""Stores: paths under a prefix for every kind of file system, and the files of a run."""

from __future__ import annotations

import pickle
import uuid

import pyarrow.parquet
import pytest

from hora.spark.estimator.store import DBFSLocalStore, FilesystemStore, HDFSStore, LocalStore, Store


def test_layout(tmp_path):
    store = Store.create(str(tmp_path))
    root = f"file://{tmp_path}"
    assert type(store) is FilesystemStore is LocalStore
    assert store.prefix_path == root
    assert store.get_train_data_path() == f"{root}/intermediate_train_data"
    assert store.get_val_data_path(3) == f"{root}/intermediate_val_data.3"
    assert store.get_test_data_path(0) == f"{root}/intermediate_test_data.0"
    assert store.get_checkpoint_path("r") == f"{root}/runs/r/checkpoint"
    assert store.get_logs_path("r") == f"{root}/runs/r/logs"
    assert store.get_localized_path(store.get_run_path("r")) == f"{tmp_path}/runs/r"
    assert pickle.loads(pickle.dumps(store)).get_runs_path() == f"{root}/runs"


def test_runs_need_not_be_saved(tmp_path):
    store = FilesystemStore(tmp_path, save_runs=False)
    assert not store.saving_runs()
    assert store.get_checkpoint_path("r") is None
    assert store.get_logs_path("r") is None


def test_files(tmp_path):
    store = FilesystemStore(tmp_path)
    assert not store.exists(f"{tmp_path}/a/b.txt")
    store.write_text(f"{tmp_path}/a/b.txt", "hello")
    assert store.read(f"file://{tmp_path}/a/b.txt") == b"hello"
    assert not store.is_parquet_dataset(store.get_train_data_path(0))


def test_a_local_directory_is_copied_over_the_runs_earlier_files(tmp_path):
    store = FilesystemStore(tmp_path / "store")
    remote = pickle.loads(pickle.dumps(store.to_remote("r", 0)))
    for text in ("one", "two"):
        with remote.get_local_output_dir() as folder:
            with open(f"{folder}/a.ckpt", "w") as file:
                file.write(text)
            store.write_text(f"{folder}/logs/deep/b", text)
            remote.sync(folder)
    assert store.get_checkpoints("r") == [f"{store.get_run_path('r')}/a.ckpt"]
    assert store.read(store.get_checkpoints("r")[0]) == b"two"
    assert sorted(path.name for path in (tmp_path / "store").rglob("*") if path.is_file()) == ["a.ckpt", "b"]
    assert store.get_checkpoints("another") == []


def test_a_file_system_supported_only_by_fsspec():
    root = f"memory://{uuid.uuid4().hex}/store"
    store = Store.create(root, checkpoint_filename="best.ckpt")
    assert store.get_checkpoint_path("r") == f"{root}/runs/r/best.ckpt"
    assert store.get_data_metadata_path() == f"{root}/data_metadata"
    store.write_text(store.get_checkpoint_path("r"), "weights")
    assert store.read(store.get_checkpoints("r")[0]) == b"weights"
    with pyarrow.parquet.ParquetWriter(
        store.fs.open(store.get_localized_path(f"{store.get_train_data_path(0)}/part.parquet"), "wb"),
        (table := pyarrow.table({"x": [1.0, 2.0]})).schema,
    ) as writer:
        writer.write_table(table)
    assert store.is_parquet_dataset(store.get_train_data_path(0))
    assert store.get_parquet_dataset(store.get_train_data_path(0)).read()["x"].to_pylist() == [1.0, 2.0]
    with store.to_remote("r", 0).get_local_output_dir() as folder:
        with open(f"{folder}/log", "w") as file:
            file.write("a line")
        store.sync_fn("r")(folder)
    assert store.read(f"{store.get_run_path('r')}/log") == b"a line"


@pytest.mark.parametrize("path", ["hdfs://nn:8020/p", "hdfs:///p", "/p"])
def test_hdfs_paths(path):
    store = HDFSStore(path)
    expected = "hdfs://nn:8020/p" if "nn" in path else "hdfs:///p"
    assert store.get_runs_path() == f"{expected}/runs"
    assert store.get_localized_path(store.get_runs_path()) == "/p/runs"


@pytest.mark.parametrize("path", ["s3://bucket/p", "hdfs://nn:8020", "relative"])
def test_invalid_hdfs_paths(path):
    with pytest.raises(ValueError, match="a path in HDFS is"):
        HDFSStore(path)


@pytest.mark.parametrize("path", ["/dbfs/p", "dbfs:/p", "file:/dbfs/p", "file:///dbfs/p"])
def test_dbfs_paths(path):
    store = DBFSLocalStore(path)
    assert store.get_checkpoint_path("r") == "file:///dbfs/p/runs/r/checkpoint.tf"
    assert store.get_localized_path(store.get_runs_path()) == "/dbfs/p/runs"


@pytest.mark.parametrize("path", ["dbfs://p", "/tmp/p", "file:///tmp/p"])
def test_invalid_dbfs_paths(path):
    with pytest.raises(ValueError, match="a path in DBFS is"):
        DBFSLocalStore(path)


def test_the_prefix_determines_the_store(monkeypatch):
    monkeypatch.delenv("DATABRICKS_RUNTIME_VERSION", raising=False)
    assert type(Store.create("hdfs:///p")) is HDFSStore
    assert type(Store.create("/dbfs/p")) is FilesystemStore
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "16.4")
    assert type(Store.create("dbfs:/p")) is DBFSLocalStore
    assert type(Store.create("/tmp/p")) is FilesystemStore
