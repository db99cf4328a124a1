"""The data module under Horovod's name; it reads without Petastorm. Re-exports only."""

from hora.spark.lightning.data_module import parquet_data_module
from hora.spark.lightning.package import default_package

PetastormDataModule = parquet_data_module(default_package())
PETASTORM_HDFS_DRIVER = "libhdfs"

__all__ = ["PETASTORM_HDFS_DRIVER", "PetastormDataModule"]
