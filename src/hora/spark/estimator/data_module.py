"""Sources of training batches: `ParquetDataModule`, the default, reads each rank's rows of the store's data.

Users may pass a class with the same constructor: a context manager whose `train_data()` and `val_data()` return
iterables of batches, dicts of column to array or `(features, label)`. `horovod.spark.torch.datamodule` re-exports these
classes, also under their old name.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hora.data.shard import POOL_BYTES, DatasetShard, Rows, even_batches


class DataModule(abc.ABC):
    """Source of one rank's batches: a context manager with training and validation batches.

    It is created with the keywords of `ParquetDataModule` and possibly more: a custom class takes those it needs, and
    `**kwargs`.
    """

    short_name = ""

    @abc.abstractmethod
    def __enter__(self) -> Any: ...

    @abc.abstractmethod
    def __exit__(self, *exc_info: object) -> None: ...

    @abc.abstractmethod
    def train_data(self) -> Iterable[Any]:
        """Return batches, dicts of column to array or `(features, label)`; restarted at their end."""

    @abc.abstractmethod
    def val_data(self) -> Iterable[Any]:
        """Return the batches of one pass."""


class NVTabularDataModule(DataModule):
    """Placeholder for Horovod's GPU reader; raises ImportError."""

    def __new__(cls, *args: Any, **kwargs: Any) -> NVTabularDataModule:
        raise ImportError("NVTabularDataModule needs nvtabular, which Hora does not support; leave data_module out")


class ParquetDataModule(DataModule):
    """Reads every row once per epoch, on one rank; all ranks take the same number of steps.

    With `steps_per_epoch_train` an epoch has that many full batches, and the next epoch continues where it stopped.
    """

    def __init__(
        self,
        train_dir: str,
        val_dir: str | None = None,
        num_train_epochs: int = 1,
        has_val: bool = True,
        train_batch_size: int = 32,
        val_batch_size: int = 32,
        shuffle: bool = True,
        transform_fn: Callable[[Rows], Rows] | None = None,
        inmemory_cache_all: bool = False,
        cur_shard: int = 0,
        shard_count: int = 1,
        schema_fields: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        steps_per_epoch_train: int | None = None,
        steps_per_epoch_val: int | None = None,
        verbose: int = 1,
        *,
        train_reader_worker_count: int = 2,
        val_reader_worker_count: int = 2,
        random_seed: int | None = None,
        reader_pool_bytes: int = POOL_BYTES,
        **kwargs: Any,
    ) -> None:
        self._common: dict[str, Any] = {
            "storage_options": storage_options,
            "cur_shard": cur_shard,
            "shard_count": shard_count,
            "columns": schema_fields,
            "transform": transform_fn,
            "keep": inmemory_cache_all,
            "pool_bytes": reader_pool_bytes,
        }
        self._train_dir, self._val_dir = train_dir, val_dir if has_val else None
        self._train_batch_size, self._val_batch_size = train_batch_size, val_batch_size
        self._train_steps, self._val_steps = steps_per_epoch_train, steps_per_epoch_val
        self._train_readers, self._val_readers = train_reader_worker_count, val_reader_worker_count
        self._rng = np.random.default_rng(random_seed) if shuffle else None
        self._train: DatasetShard | None = None
        self._val: DatasetShard | None = None

    def __enter__(self) -> ParquetDataModule:
        self._train = DatasetShard(self._train_dir, num_readers=self._train_readers, **self._common)
        if self._val_dir is not None:
            self._val = DatasetShard(self._val_dir, num_readers=self._val_readers, **self._common)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._train = self._val = None

    @property
    def train_steps(self) -> int:
        """Batches per epoch, on every rank."""
        assert self._train is not None, "train_steps outside the context manager"
        return self._train_steps or self._train.num_steps(self._train_batch_size)

    def train_data(self) -> Iterable[Rows]:
        """Return an endless iterable of batches."""
        assert self._train is not None, "train_data outside the context manager"
        return self._train.endless_batches(self._train_batch_size, full=bool(self._train_steps), rng=self._rng)

    def val_data(self) -> Iterable[Rows]:
        """Return the batches of one pass; none if this rank has no rows."""
        if self._val is None or not self._val.num_rows:
            return ()
        steps = self._val.num_steps(self._val_batch_size)
        sizes = (size for size in even_batches(self._val.num_rows, steps) if size)
        return itertools.islice(self._val.batches(sizes, rng=None), self._val_steps)
