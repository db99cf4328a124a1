"""Data modules under Horovod's name; the Parquet one reads without Petastorm. Re-exports only."""

from hora.spark.estimator.data_module import ParquetDataModule
from hora.spark.estimator.data_module import ParquetDataModule as PetastormDataModule

__all__ = ["ParquetDataModule", "PetastormDataModule"]
