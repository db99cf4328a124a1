"""Data modules under Horovod's name; the Parquet one reads without Petastorm. Re-exports only."""

from hora.spark.estimator.data_module import NVTabularDataModule, ParquetDataModule
from hora.spark.estimator.data_module import ParquetDataModule as PetastormDataModule

__all__ = ["NVTabularDataModule", "ParquetDataModule", "PetastormDataModule"]
