"""Sharding of a Parquet dataset: each row belongs to one rank, once a pass, with equal numbers of steps."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hora.data.shard import DatasetShard, Transformation
from hora.spark.estimator.data_module import ParquetDataModule


@pytest.fixture
def dataset(tmp_path):
    """A dataset of 23 rows in three files with uneven row groups."""
    numbers = iter(range(23))
    for name, rows in (("b", 4), ("a", 12), ("c", 7)):
        ids = list(itertools.islice(numbers, rows))
        table = pa.table({"id": ids, "pair": [[float(i), -float(i)] for i in ids], "text": list(map(str, ids))})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=5)
    return str(tmp_path)


def module(path, rank, size, **more):
    return ParquetDataModule(
        path, has_val=False, cur_shard=rank, shard_count=size, schema_fields=["id", "pair"], **more
    )


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [1, 4, 64])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_every_row_once_in_equally_many_steps(dataset, size, batch_size, shuffle):
    seen, steps = [], set()
    for rank in range(size):
        with module(dataset, rank, size, train_batch_size=batch_size, shuffle=shuffle) as feed:
            batches = list(itertools.islice(feed.train_data(), feed.train_steps))
            steps.add(feed.train_steps)
        assert max(len(batch["id"]) for batch in batches) <= batch_size
        seen += [int(i) for batch in batches for i in batch["id"]]
        assert all((batch["pair"] == np.stack([batch["id"], -batch["id"]], axis=1)).all() for batch in batches)
    assert len(steps) == 1
    assert set(seen) == set(range(23))
    # With batches of one row, a rank with fewer rows than others repeats one of them.
    assert len(seen) == (23 if batch_size > 1 else steps.pop() * size)


def test_shards_are_dealt_row_groups_in_turn(dataset):
    """Sorted rows: each of two shards has some of every file. The six groups have 5, 5, 2, 4, 5 and 2 rows."""
    found = [
        next(DatasetShard(dataset, columns=["id"], cur_shard=n, shard_count=2).passes(rng=None))["id"].tolist()
        for n in range(2)
    ]
    assert found == [[*range(4, 9), 14, 15, 16, 17, 18, 19], [20, *range(9, 14), *range(4), 21, 22]]


def test_fixed_steps_continue_where_the_last_epoch_stopped(dataset):
    with module(dataset, 0, 1, train_batch_size=10, steps_per_epoch_train=2, shuffle=False) as feed:
        batches = iter(feed.train_data())
        first = [len(next(batches)["id"]) for _ in range(feed.train_steps)]
        third = next(batches)
    assert first == [10, 10]
    in_files_order = [*range(4, 16), *range(4), *range(16, 23)]
    assert third["id"].tolist() == [*in_files_order[20:], *in_files_order[:7]]


def test_order_changes_between_epochs_and_depends_on_the_seed(dataset):
    def epochs(seed):
        with module(dataset, 0, 1, train_batch_size=23, random_seed=seed) as feed:
            return [batch["id"].tolist() for batch in itertools.islice(feed.train_data(), 2)]

    assert epochs(1) == epochs(1)
    assert epochs(1)[0] != epochs(1)[1]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("num_readers", [0, 2])
def test_large_rows_are_read_in_pools_of_limited_size(tmp_path, shuffle, num_readers):
    """300 rows of 4 KB in one row group, 1.2 MB, with 200 KB for the pool."""
    ids = np.arange(300)
    wide = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 1000).astype(np.float32)), 1000)
    pq.write_table(pa.table({"id": ids, "wide": wide}), tmp_path / "one.parquet")
    shard = DatasetShard(str(tmp_path), cur_shard=1, shard_count=3, pool_bytes=200_000, num_readers=num_readers)
    rng = np.random.default_rng(0) if shuffle else None
    pools = list(shard.passes(rng=rng, num_passes=1))
    assert max(sum(values.nbytes for values in pool.values()) for pool in pools) <= 200_000
    found = np.concatenate([pool["id"] for pool in pools]).tolist()
    assert sorted(found) == list(range(100, 200))
    assert (found == sorted(found)) != shuffle
    assert all((pool["wide"] == pool["id"][:, None]).all() for pool in pools)
    batches = list(itertools.islice(shard.endless_batches(7, full=True, rng=rng), 100))
    assert all(len(batch["id"]) == 7 and (batch["wide"] == batch["id"][:, None]).all() for batch in batches)
    assert sorted(np.concatenate([batch["id"] for batch in batches]).tolist()) == sorted([*range(100, 200)] * 7)


def test_a_pool_without_room_and_an_unknown_column_are_rejected(dataset):
    with pytest.raises(ValueError, match="pool_bytes must be an integer of at least 1, but it is 0"):
        DatasetShard(dataset, pool_bytes=0)
    with pytest.raises(ValueError, match=r"has no column colour, but .*'id', 'pair', 'text'"):
        DatasetShard(dataset, columns=["id", "colour"])


def test_a_transformation_receives_a_frame_and_creates_columns(dataset):
    def double(frame):
        frame["twice"] = frame["id"] * 2
        frame["pair"] = frame["pair"].map(lambda pair: pair[:1])
        return frame

    transform = Transformation(double, [("twice", np.float32, (1,), False)], ["id"])
    (rows,) = DatasetShard(dataset, columns=["id", "pair"], transform=transform, num_readers=0).passes(
        rng=None, num_passes=1
    )
    assert set(rows) == {"twice", "pair"}
    assert rows["twice"].dtype == np.float32
    assert rows["twice"].shape == rows["pair"].shape == (23, 1)


def test_columns_that_no_tensor_can_hold_are_named(dataset, tmp_path):
    with pytest.raises(TypeError, match="column 'text' holds string"):
        next(DatasetShard(dataset, num_readers=0).passes(rng=None))
    pq.write_table(pa.table({"x": [1.0, None]}), tmp_path / "hole.pq")
    with pytest.raises(TypeError, match="column 'x' has missing values"):
        next(DatasetShard(str(tmp_path / "hole.pq"), num_readers=0).passes(rng=None))
    with pytest.raises(ValueError, match="cur_shard must be at least 0 and less than shard_count=2"):
        DatasetShard(dataset, cur_shard=2, shard_count=2)


def test_sparse_vectors_are_read_as_dense_ones(tmp_path):
    vectors = [
        {"size": 4, "indices": indices, "values": values}
        for indices, values in (([1, 3], [2.0, -1.0]), ([], []), ([0], [5.0]), ([2], [7.0]))
    ]
    kind = pa.struct({"size": pa.int32(), "indices": pa.list_(pa.int32()), "values": pa.list_(pa.float64())})
    pq.write_table(pa.table({"x": pa.array(vectors, kind)}), tmp_path / "vectors.parquet")
    shards = [DatasetShard(str(tmp_path), cur_shard=number, shard_count=2) for number in range(2)]
    first, second = (next(shard.passes(rng=None))["x"].tolist() for shard in shards)
    assert first == [[0, 2, 0, -1], [0, 0, 0, 0]]
    assert second == [[5, 0, 0, 0], [0, 0, 7, 0]]

    vectors[0]["size"] = 5
    pq.write_table(pa.table({"x": pa.array(vectors, kind)}), tmp_path / "vectors.parquet")
    with pytest.raises(ValueError, match="rows of column 'x' differ in shape"):
        next(DatasetShard(str(tmp_path)).passes(rng=None))
