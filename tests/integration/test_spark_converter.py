"""A DataFrame that ranks on the cluster read as a data loader."""

from __future__ import annotations

import pytest
from pyspark.ml.linalg import Vectors

from hora.data.converter import SparkDatasetConverter, make_spark_converter, register_delete_dir_handler
from sparkdl import HorovodRunner

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("by_value")]


def test_ranks_read_the_data_that_the_driver_wrote_once(spark, tmp_path, caplog):
    frame = spark.createDataFrame([(i, i / 2, Vectors.dense([i, -i])) for i in range(11)], ["id", "half", "pair"])
    with pytest.raises(ValueError, match="set the Spark configuration petastorm"):
        make_spark_converter(frame)
    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, str(tmp_path))
    with pytest.raises(ValueError, match="must be a URL with its scheme"):
        make_spark_converter(frame)
    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, f"file://{tmp_path}")
    try:
        converter = make_spark_converter(frame.repartition(2))
        assert make_spark_converter(frame.repartition(2)) is converter
        assert make_spark_converter(frame.repartition(2), dtype=None) is not converter
        assert "df.repartition(n)" in caplog.text
    finally:
        spark.conf.unset(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF)

    def main():
        import horovod.torch as hvd

        hvd.init()
        with converter.make_torch_dataloader(4, num_epochs=1, cur_shard=hvd.rank(), shard_count=hvd.size()) as loader:
            batches = list(loader)
        seen = (
            [int(i) for batch in batches for i in batch["id"]],
            len(batches),
            str(batches[0]["half"].dtype),
            tuple(batches[0]["pair"].shape[1:]),
        )
        return hvd.allgather_object(seen)

    found = HorovodRunner(np=2).run(main)
    assert sorted(i for ids, *_ in found for i in ids) == list(range(11))
    assert [seen[1:] for seen in found] == [(2, "torch.float32", (2,))] * 2

    removed = []
    register_delete_dir_handler(removed.append)
    converter.delete()
    register_delete_dir_handler(None)
    assert removed == [converter.cache_dir_url]
    converter.delete()
    assert len(list(tmp_path.iterdir())) == 1
