"""Delta tables as datasets: the rows of a snapshot, on any file system of fsspec, and tables that cannot be read so."""

from __future__ import annotations

import itertools
import json
import sys
from types import SimpleNamespace

import fsspec
import numpy as np
import pyarrow as pa
import pytest

from hora.data import delta
from hora.data.converter import make_spark_converter
from hora.data.shard import DatasetShard

deltalake = pytest.importorskip("deltalake", minversion="1.6")


@pytest.fixture
def table(tmp_path):
    """A table in version 2 with the rows 1 to 9, partitioned; row 0 was deleted, and the last three were appended."""
    path = str(tmp_path / "table")
    ids = np.arange(10)
    rows = pa.table({"id": ids, "x": [[i, -i] for i in ids.astype(float)], "day": [f"{i % 2} é" for i in ids]})
    deltalake.write_deltalake(path, rows.slice(0, 7), partition_by=["day"])
    deltalake.write_deltalake(path, rows.slice(7), mode="append")
    deltalake.DeltaTable(path).delete("id = 0")
    return path


def read(path, **given):
    shards = [DatasetShard(path, cur_shard=rank, shard_count=2, **given) for rank in range(2)]
    pools = [pool for shard in shards for pool in shard.passes(rng=None, num_passes=1)]
    return {name: np.concatenate([pool[name] for pool in pools]) for name in pools[0]}


def test_the_rows_of_a_snapshot_have_their_partitions_values(table):
    found = read(table, transform=dict)
    assert sorted(found["id"]) == list(range(1, 10))
    assert (found["x"] == np.stack([found["id"], -found["id"]], axis=1)).all()
    assert found["day"].tolist() == [f"{i % 2} é" for i in found["id"]]
    assert sorted(read(f"{table}@v0", columns=["id"])["id"]) == list(range(7))
    assert sorted(read(f"{table}@v1", columns=["id"])["id"]) == list(range(10))


def test_a_table_on_another_file_system(table):
    memory = fsspec.filesystem("memory")
    memory.put(table, "/bucket/table", recursive=True)
    assert sorted(read("memory:///bucket/table", columns=["id"])["id"]) == list(range(1, 10))


def test_a_converter_stays_at_its_version(table):
    converter = make_spark_converter(f"file://{table}")
    assert len(converter) == 9
    deltalake.DeltaTable(table).delete("id < 9")
    with converter.make_torch_dataloader(5, num_epochs=1, schema_fields=["id", "x"]) as loader:
        batches = list(loader)
    assert sorted(itertools.chain(*(batch["id"].tolist() for batch in batches))) == list(range(1, 10))
    assert batches[0]["x"].shape == (5, 2)
    converter.delete()
    assert len(make_spark_converter(table)) == 1  # the user's table is still there


def test_rows_from_before_a_column_are_missing_values(table):
    more = pa.table({"id": [10], "x": [[1.0, 2.0]], "day": ["0 é"], "new": [3]})
    deltalake.write_deltalake(table, more, mode="append", schema_mode="merge")
    with pytest.raises(TypeError, match="column 'new' has missing values"):
        read(table, columns=["id", "new"])
    with pytest.raises(ValueError, match="has no column newer"):
        read(table, columns=["newer"])


def test_tables_whose_files_do_not_have_their_rows_are_refused(table):
    log = f"{table}/_delta_log/00000000000000000003.json"
    metadata = {
        "id": "0", "format": {"provider": "parquet", "options": {}}, "partitionColumns": [], "createdTime": 0,
        "schemaString": json.dumps({"type": "struct", "fields": [
            {"name": "id", "type": "long", "nullable": True, "metadata": {
                "delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "col-1"}}]}),
        "configuration": {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "1"},
    }  # fmt: skip
    with open(log, "w") as file:
        file.write(json.dumps({"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}}) + "\n")
        file.write(json.dumps({"metaData": metadata}) + "\n")
    with pytest.raises(ValueError, match=r"delta.columnMapping.mode=name.*Read it with Spark"):
        DatasetShard(table)
    assert DatasetShard(f"{table}@v2").num_rows == 9


def test_deleted_rows_that_only_vectors_hide_are_refused():
    """A stand-in for a table of Databricks: deltalake reads such vectors, and does not write them."""
    vectors = pa.table({"filepath": ["a.parquet"], "selection_vector": [[False, True]]})
    hiding = SimpleNamespace(metadata=lambda: SimpleNamespace(configuration={}), deletion_vectors=lambda: vectors)
    with pytest.raises(ValueError, match=r"1 files of the Delta table at /t .*REORG TABLE delta.`/t` APPLY \(PURGE\)"):
        delta._check(hiding, "/t")


def test_a_clone_and_a_missing_package_are_named(table, monkeypatch):
    add = {"path": "s3://other/a.parquet", "size": 1, "modificationTime": 0, "dataChange": True}
    with open(f"{table}/_delta_log/00000000000000000003.json", "w") as file:
        file.write(json.dumps({"add": add | {"partitionValues": {"day": "1"}}}) + "\n")
    with pytest.raises(ValueError, match=r"is a clone, whose files are elsewhere \(s3://other/a.parquet\)"):
        DatasetShard(table)
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(
        ImportError, match=r"is a Delta table, which needs deltalake: pip install 'hora-train\[delta\]'"
    ):
        DatasetShard(table)
