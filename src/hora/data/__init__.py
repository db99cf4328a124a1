"""Datasets for ranks: shards of Parquet files (`shard`), and `make_spark_converter`."""
