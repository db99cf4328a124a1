"""`horovod.spark.data_loaders`: loaders over a Petastorm reader, for programs that bring one. Petastorm itself is not
imported.

A reader gives rows, or batches of rows, as named tuples; it knows when it has given all (`last_row_consumed`) and
starts over on `reset`. Hora's own reading is `shard`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from hora.data.loader import AsyncDataLoaderMixin, BaseDataLoader

__all__ = [
    "AsyncReaderLoader",
    "BatchedReader",
    "EndlessAsyncReaderLoader",
    "EndlessReaderLoader",
    "InMemoryAsyncReaderLoader",
    "InMemoryReaderLoader",
    "ReaderLoader",
]

Batch = dict[str, torch.Tensor]


class BatchedReader:
    """One pass over what the reader gives: dicts of tensors with `batch_size` rows, the last one with what is left.

    `shuffling_queue_capacity`: rows that wait for their turn, which comes in a random order; 0: as they come.
    """

    def __init__(self, reader: Any, batch_size: int = 1, shuffling_queue_capacity: int = 0) -> None:
        self._reader, self._batch_size, self._capacity = _checked(reader), batch_size, shuffling_queue_capacity

    def __iter__(self) -> Iterator[Batch]:
        rows = self._rows()
        while some := list(itertools.islice(rows, self._batch_size)):
            yield _batch(some)

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        if self._reader.last_row_consumed:
            self._reader.reset()
        rows = _all_rows(self._reader)
        return rows if self._capacity <= 0 else _shuffled(rows, self._capacity)


class ReaderLoader(BaseDataLoader):
    """Batches of the reader's rows, epoch by epoch; `limit_step_per_epoch` of them, or with -1 all."""

    def __init__(
        self,
        reader: Any,
        batch_size: int,
        shuffling_queue_capacity: int,
        name: str = "",
        limit_step_per_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.reader, self.batch_size, self.name, self.verbose = _checked(reader), batch_size, name, verbose
        self.shuffling_queue_capacity, self.limit_step_per_epoch = shuffling_queue_capacity, limit_step_per_epoch

    def __len__(self) -> int:
        return max(self.limit_step_per_epoch, 0)

    def _iterate(self) -> Iterator[Any]:
        limit = None if self.limit_step_per_epoch == -1 else self.limit_step_per_epoch
        return itertools.islice(iter(self._pass()), limit)

    def _pass(self) -> Iterable[Batch]:
        return BatchedReader(self.reader, self.batch_size, self.shuffling_queue_capacity)


class AsyncReaderLoader(AsyncDataLoaderMixin, ReaderLoader):
    """The same, read ahead."""


class EndlessReaderLoader(ReaderLoader):
    """Over a reader that never ends: an epoch goes on where the last one stopped."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.limit_step_per_epoch == -1:
            raise ValueError("an epoch of an endless reader needs an end: give limit_step_per_epoch")
        self._batches = iter(self._pass())

    def _iterate(self) -> Iterator[Any]:
        return itertools.islice(self._batches, self.limit_step_per_epoch)


class EndlessAsyncReaderLoader(AsyncDataLoaderMixin, EndlessReaderLoader):
    """The same, read ahead."""


class InMemoryReaderLoader(BaseDataLoader):
    """Reads everything once and keeps it; `num_epochs` passes of `limit_step_per_epoch` batches each."""

    def __init__(
        self,
        reader: Any,
        batch_size: int,
        num_epochs: int,
        name: str = "",
        shuffle: bool = False,
        limit_step_per_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if limit_step_per_epoch == -1:
            raise ValueError("a loader that keeps its rows needs the number of steps: give limit_step_per_epoch")
        self.batch_size, self.num_epochs, self.name, self.verbose = batch_size, num_epochs, name, verbose
        self.shuffle, self.limit_step_per_epoch = shuffle, limit_step_per_epoch
        self._rows = list(_all_rows(_checked(reader)))
        self._passes = 0

    def __len__(self) -> int:
        return self.limit_step_per_epoch

    def _iterate(self) -> Iterator[Any]:
        if self._passes >= self.num_epochs:
            return
        self._passes += 1
        rows = random.sample(self._rows, len(self._rows)) if self.shuffle else self._rows
        endless = itertools.cycle(rows)
        for _ in range(self.limit_step_per_epoch if rows else 0):
            yield _batch(list(itertools.islice(endless, min(self.batch_size, len(rows)))))


class InMemoryAsyncReaderLoader(AsyncDataLoaderMixin, InMemoryReaderLoader):
    """The same, read ahead."""


def _checked(reader: Any) -> Any:
    if not all(hasattr(reader, name) for name in ("__iter__", "reset", "last_row_consumed")):
        raise ValueError(
            f"these loaders take a reader of Petastorm, but were given a {type(reader).__name__}; without Petastorm "
            "use hora.data.converter.make_spark_converter or the estimators"
        )
    return reader


def _all_rows(reader: Any) -> Iterator[Mapping[str, Any]]:
    for found in reader:
        columns = found._asdict()
        if not getattr(reader, "is_batched_reader", False):
            yield columns
            continue
        for index in range(len(next(iter(columns.values()), ()))):
            yield {name: values[index] for name, values in columns.items()}


def _shuffled(rows: Iterator[Mapping[str, Any]], capacity: int) -> Iterator[Mapping[str, Any]]:
    waiting: list[Mapping[str, Any]] = []
    for row in rows:
        waiting.append(row)
        if len(waiting) > capacity:
            chosen = random.randrange(len(waiting))
            waiting[chosen], waiting[-1] = waiting[-1], waiting[chosen]
            yield waiting.pop()
    random.shuffle(waiting)
    yield from waiting


def _batch(rows: list[Mapping[str, Any]]) -> Batch:
    return {name: torch.as_tensor(np.asarray([row[name] for row in rows])) for name in rows[0]}
