"""Loaders of an existing Parquet directory: batches, shards, passes, and rejected input."""

from __future__ import annotations

import logging
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hora.data import converter as converters
from hora.data.converter import make_spark_converter


@pytest.fixture
def converter(tmp_path):
    for name, ids in (("a", range(7)), ("b", range(7, 11))):
        table = pa.table({"id": list(ids), "even": [i % 2 == 0 for i in ids], "name": list(map(str, ids))})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=3)
    return make_spark_converter(f"file://{tmp_path}")


def ids(loader):
    return [batch["id"].tolist() for batch in loader]


def test_all_rows_in_order_and_again_after_a_full_pass(converter):
    assert len(converter) == converter.dataset_size == 11
    assert [url.rpartition("/")[2] for url in converter.file_urls] == ["a.parquet", "b.parquet"]
    options = {"num_epochs": 1, "shuffle_row_groups": False, "schema_fields": ["id", "even"]}
    with pickle.loads(pickle.dumps(converter)).make_torch_dataloader(4, **options) as loader:
        assert ids(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
        batch = next(iter(loader))
        assert batch["even"].dtype == torch.uint8
        with pytest.raises(RuntimeError, match="in the middle of a pass"):
            iter(loader)


def test_shards_have_equal_numbers_of_batches_and_lose_no_row(converter):
    found = []
    for shard in range(2):
        with converter.make_torch_dataloader(
            5, num_epochs=1, cur_shard=shard, shard_count=2, schema_fields=["id"], seed=3
        ) as loader:
            found.append(ids(loader))
    assert list(map(len, found)) == [2, 2]
    assert sorted(i for batches in found for batch in batches for i in batch) == list(range(11))


def test_without_a_number_of_epochs_a_loader_is_endless(converter):
    with converter.make_torch_dataloader(11, schema_fields=["id"], reader_pool_type="dummy") as loader:
        batches = iter(loader)
        assert [sorted(next(batches)["id"].tolist()) for _ in range(3)] == [list(range(11))] * 3


def test_a_custom_loader_and_a_transformation(converter):
    def make(reader, batch_size, shuffling_queue_capacity):
        return [batch_size, shuffling_queue_capacity, sum(len(rows["id"]) for rows in reader)]

    with converter.make_torch_dataloader(
        8, 1, 2, 5, make, schema_fields=["id"], transform_spec=lambda frame: frame[frame["id"] > 3]
    ) as loader:
        assert loader == [8, 5, 7]


def test_errors_and_warnings(converter, tmp_path, monkeypatch, caplog):
    with pytest.raises(ValueError, match="dtype must be"):
        make_spark_converter(converter.cache_dir_url, dtype="float16")
    with pytest.raises(RuntimeError, match="compression_codec must be one of"):
        make_spark_converter(converter.cache_dir_url, compression_codec="zip")
    with pytest.raises(TypeError, match="'name' holds string"), converter.make_torch_dataloader(num_epochs=1) as loader:
        ids(loader)
    with pytest.raises(ValueError, match="go together"), converter.make_torch_dataloader(cur_shard=1):
        pass
    monkeypatch.setenv("HOROVOD_RANK", "1")
    with caplog.at_level(logging.WARNING), converter.make_torch_dataloader(cur_shard=0, shard_count=1):
        assert "cur_shard is 0, but HOROVOD_RANK=1" in caplog.text
    monkeypatch.setattr(converters, "_AVAILABLE_LIMIT_S", 0.0)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(RuntimeError, match=r"1 of 2 files, .*a\.parquet first"), converter.make_torch_dataloader():
        pass
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "16.4")
    with pytest.raises(ValueError, match="must be in DBFS"):
        make_spark_converter(converter.cache_dir_url)
