"""A LightningDataModule for a rank's rows: `ParquetLightningData`, under Horovod's name `PetastormDataModule`.

`hora.data.shard` reads and shards: every row once per epoch, on one rank, and the same number of steps on all ranks. As
in Horovod, a Lightning transformation works on single rows; the torch estimator's works on DataFrames.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from hora.data.shard import POOL_BYTES, DatasetShard, Rows, Transformation


class RowTransformation(Transformation):
    """A user's function on row dicts. `edit_fields` are `(name, dtype, shape or None, nullable)`."""

    def _changed(self, rows: Rows) -> Mapping[str, Any]:
        names, function = list(rows), self._function or (lambda row: row)
        changed = [function(dict(zip(names, values, strict=True))) for values in zip(*rows.values(), strict=True)]
        return {name: [row[name] for row in changed] for name in changed[0] if name not in self._removed}

    def _array(self, name: str, values: Any) -> np.ndarray[Any, Any]:
        array = super()._array(name, values)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"column {name!r} holds {array.dtype}, which a tensor cannot hold; change or remove it")
        return array


@functools.cache
def parquet_data_module(package: ModuleType) -> type[Any]:
    """Return the data module class for this package."""
    base = package.LightningDataModule
    return type("PetastormDataModule", (_ParquetData, base), {"__module__": __name__, "__doc__": _ParquetData.__doc__})


class _Batches:
    """Loader of an epoch's batches: `steps` of them; the next iteration continues where this one stopped."""

    def __init__(self, source: Callable[[], Iterator[Rows]], steps: int, *, fresh: bool) -> None:
        self._source, self._steps, self._fresh = source, steps, fresh
        self._running: Iterator[Rows] | None = None

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        if self._running is None or self._fresh:
            self._running = self._source()
        for rows in itertools.islice(self._running, self._steps):
            yield {name: torch.from_numpy(np.array(values)) for name, values in rows.items()}


class _ParquetData:
    """A rank's rows of the store's data. The keywords are Horovod's, and attributes; others are ignored."""

    shuffle: bool
    has_val: bool

    def __init__(
        self,
        train_dir: str,
        val_dir: str | None,
        num_train_epochs: int = 1,
        has_val: bool = True,
        train_batch_size: int = 32,
        val_batch_size: int = 32,
        shuffle: bool = True,
        num_reader_epochs: int | None = None,
        reader_pool_type: str = "thread",
        reader_worker_count: int = 2,
        transformation: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
        transformation_edit_fields: Sequence[Any] | None = None,
        transformation_removed_fields: Sequence[str] | None = None,
        inmemory_cache_all: bool = False,
        cur_shard: int = 0,
        shard_count: int = 1,
        schema_fields: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        steps_per_epoch_train: int | None = None,
        steps_per_epoch_val: int | None = None,
        verbose: bool = True,
        debug_data_loader: bool = False,
        train_async_data_loader_queue_size: int | float | None = None,
        val_async_data_loader_queue_size: int | float | None = None,
        seed: int | None = None,
        reader_pool_bytes: int = POOL_BYTES,
        **kwargs: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__", "kwargs")}
        super().__init__()
        self.__dict__.update(given)
        self.train_reader: DatasetShard | None = None
        self.val_reader: DatasetShard | None = None
        self.train_dl: _Batches | None = None
        self.val_dl: _Batches | None = None

    def setup(self, stage: str | None = None) -> None:
        if stage not in (None, "fit") or self.train_reader is not None:
            return
        self.train_reader, self.train_dl = self._open("train", shuffle=self.shuffle)
        if self.has_val:
            self.val_reader, self.val_dl = self._open("val", shuffle=False)

    def teardown(self, stage: str | None = None) -> None:
        self.train_reader = self.val_reader = self.train_dl = self.val_dl = None

    def train_dataloader(self) -> Any:
        self.setup("fit")
        return self.train_dl

    def val_dataloader(self) -> Any:
        self.setup("fit")
        return self.val_dl if self.has_val else []  # Lightning 2 rejects None

    def _open(self, part: str, *, shuffle: bool) -> tuple[DatasetShard, _Batches]:
        """Return the rows, and a loader of `steps` full batches or of every row once in equally many steps per rank."""
        given = vars(self)
        wanted = (given["transformation"], given["transformation_edit_fields"], given["transformation_removed_fields"])
        shard = DatasetShard(
            given[f"{part}_dir"],
            storage_options=given["storage_options"],
            num_readers=0 if given["reader_pool_type"] == "dummy" else given["reader_worker_count"],
            cur_shard=given["cur_shard"],
            shard_count=given["shard_count"],
            columns=given["schema_fields"],
            transform=RowTransformation(*wanted) if any(wanted) else None,
            keep=given["inmemory_cache_all"],
            pool_bytes=given["reader_pool_bytes"],
        )
        rng = np.random.default_rng(given["seed"]) if shuffle else None
        batch_size, steps = given[f"{part}_batch_size"], given[f"steps_per_epoch_{part}"]
        source = functools.partial(shard.endless_batches, batch_size, full=bool(steps), rng=rng)
        return shard, _Batches(source, steps or shard.num_steps(batch_size), fresh=part == "val")
