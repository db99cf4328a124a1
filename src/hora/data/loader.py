"""`BaseDataLoader` and `AsyncDataLoaderMixin`: loaders that subclasses fill, batch by batch, optionally in a thread.

Users know them from `horovod.data`. Ours own reading (`shard`) does not use them.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]

_POLL_S = 0.2
_CLOSE_LIMIT_S = 30.0


class BaseDataLoader:
    """A subclass says how long it is (`__len__`) and gives the batches of one epoch (`_iterate`)."""

    def __len__(self) -> int:
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:
        """Called for each batch on its way out; for subclasses."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin:
    """Reads ahead: `class Mine(AsyncDataLoaderMixin, MyLoader)`. A daemon thread fills a queue, epoch after epoch.

    `async_loader_queue_size=0`: without a thread. An exception of `_iterate` is raised where the batches are taken. An
    epoch that was left early ends there: the next one begins at its beginning.
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
        self._epoch = 0  # the one that is being taken out
        self._given = False  # whether its end has not been seen yet
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End the thread; what it has read ahead is dropped."""
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
        if self._given:  # the last epoch was left early
            self._epoch += 1
        self._given = True
        while True:
            epoch, kind, value = self._next()
            if epoch < self._epoch:
                continue
            if kind == "error":
                self._given = False
                raise value
            if kind == "end":
                self._epoch, self._given = epoch + 1, False
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
                    if epoch < self._epoch:
                        break
                    if not self._put((epoch, "batch", batch)):
                        return
            except Exception as error:  # the consumer's to handle
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
