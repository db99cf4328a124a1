"""Loaders over Petastorm readers. Re-exports only."""

from hora.data.reader_loaders import AsyncReaderLoader as PytorchAsyncDataLoader
from hora.data.reader_loaders import BatchedReader as PetastormBatchedDataLoader
from hora.data.reader_loaders import EndlessAsyncReaderLoader as PytorchInfiniteAsyncDataLoader
from hora.data.reader_loaders import EndlessReaderLoader as PytorchInfiniteDataLoader
from hora.data.reader_loaders import InMemoryAsyncReaderLoader as PytorchInmemAsyncDataLoader
from hora.data.reader_loaders import InMemoryReaderLoader as PytorchInmemDataLoader
from hora.data.reader_loaders import ReaderLoader as PytorchDataLoader

__all__ = [
    "PetastormBatchedDataLoader",
    "PytorchAsyncDataLoader",
    "PytorchDataLoader",
    "PytorchInfiniteAsyncDataLoader",
    "PytorchInfiniteDataLoader",
    "PytorchInmemAsyncDataLoader",
    "PytorchInmemDataLoader",
]
