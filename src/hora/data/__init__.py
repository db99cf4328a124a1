"""Datasets for ranks: rows of Parquet files, shared out (`shard`), and `make_spark_converter`."""
