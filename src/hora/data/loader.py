"""`BaseDataLoader` and `AsyncDataLoaderMixin`: base classes for loaders, optionally with a prefetching thread.

Users import them from `horovod.data`. Hora's own reader (`shard`) does not use them.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import random
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

_POLL_S = 0.2
_CLOSE_LIMIT_S = 30.0


class BaseDataLoader:
    """Base class: a subclass defines its length (`__len__`) and yields the batches of one epoch (`_iterate`)."""

    def __len__(self) -> int:
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:
        """Hook for subclasses: process each batch before it is returned."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin:
    """Prefetches: `class Mine(AsyncDataLoaderMixin, MyLoader)`. A daemon thread fills a queue, epoch after epoch.

    `async_loader_queue_size=0` disables the thread. An exception of `_iterate` is raised at the consumer. If an epoch
    is left early, the next one starts at its beginning.
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self.started = False
        self.finished_event = threading.Event()
        self.queue: queue.Queue[tuple[int, str, Any]] = queue.Queue(max(async_loader_queue_size, 0))
        self.thread: threading.Thread | None = None
        self._num_begun = 0  # epochs of which the consumer has requested a batch
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End the thread and drop prefetched batches."""
        self.finished_event.set()
        if self.thread is not None:
            with contextlib.suppress(queue.Empty):
                while True:
                    self.queue.get_nowait()
            self.thread.join(_CLOSE_LIMIT_S)

    def __iter__(self) -> Iterator[Any]:
        if not self.async_loader_queue_size:
            yield from super().__iter__()  # type: ignore[misc]
            return
        if not self.started:
            self.started = True
            self.thread = threading.Thread(target=self._fill, name="async-data-loader", daemon=True)
            self.thread.start()
        this, self._num_begun = self._num_begun, self._num_begun + 1
        while True:
            epoch, kind, value = self._next()
            if epoch < this:  # it was left early
                continue
            if kind == "error":
                raise value
            if kind == "end":
                return
            yield self._process_batch(value)  # type: ignore[attr-defined]

    def _next(self) -> tuple[int, str, Any]:
        while True:
            try:
                return self.queue.get(timeout=_POLL_S)
            except queue.Empty:
                if self.finished_event.is_set() or self.thread is None or not self.thread.is_alive():
                    raise RuntimeError("the loader was closed while batches were taken from it") from None

    # ---- in the thread -------------------------------------------------------------------------------------

    def _fill(self) -> None:
        epoch = 0
        while not self.finished_event.is_set():
            try:
                for batch in self._iterate():  # type: ignore[attr-defined]
                    if epoch + 1 < self._num_begun:  # the consumer has left it
                        break
                    if not self._put((epoch, "batch", batch)):
                        return
            except Exception as error:  # the consumer handles it
                if not self._put((epoch, "error", error)):
                    return
            else:
                if not self._put((epoch, "end", None)):
                    return
            epoch += 1

    def _put(self, entry: tuple[int, str, Any]) -> bool:
        while not self.finished_event.is_set():
            with contextlib.suppress(queue.Full):
                self.queue.put(entry, timeout=_POLL_S)
                return True
        return False


Batch = dict[str, torch.Tensor]


class BatchedReader:
    """One pass over the reader's rows: dicts of tensors with `batch_size` rows, the last one with the rest.

    `shuffling_queue_capacity`: size of the shuffle buffer; 0 keeps the order.
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
    """Batches of the reader's rows, epoch by epoch; `limit_step_per_epoch` of them, or all with -1."""

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
    """The same, prefetched."""


class EndlessReaderLoader(ReaderLoader):
    """Loader of an endless reader: an epoch continues where the last one stopped."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.limit_step_per_epoch == -1:
            raise ValueError("an epoch of an endless reader needs an end: pass limit_step_per_epoch")
        self._batches = iter(self._pass())

    def _iterate(self) -> Iterator[Any]:
        return itertools.islice(self._batches, self.limit_step_per_epoch)


class EndlessAsyncReaderLoader(AsyncDataLoaderMixin, EndlessReaderLoader):
    """The same, prefetched."""


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
            raise ValueError("a loader that keeps its rows needs the number of steps: pass limit_step_per_epoch")
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
    """The same, prefetched."""


def _checked(reader: Any) -> Any:
    if not all(hasattr(reader, name) for name in ("__iter__", "reset", "last_row_consumed")):
        raise ValueError(
            f"these loaders need a Petastorm reader, but got a {type(reader).__name__}; without Petastorm "
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
