"""Loaders over Petastorm readers. Re-exports only."""

from horovod.spark.data_loaders.pytorch_data_loaders import PytorchAsyncDataLoader, PytorchDataLoader

__all__ = ["PytorchAsyncDataLoader", "PytorchDataLoader"]
