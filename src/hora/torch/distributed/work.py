"""`Work`: a collective or message of a process group in flight, with torch's interface.

The thread that waits for the operation drives it, as everywhere in the engine. The future is created on demand. Without
Python callbacks, the thread that finished the operation completes the future. Python callbacks may wait for other
operations (PowerSGD's do), so they run on separate threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from hora.engine.request import Completion


class Operation:
    """Base class of the operations behind a `Work`: its parts, and functions to run once when all are done."""

    def __init__(self, parts: Sequence[Completion], finals: Sequence[Callable[[], object]]) -> None:
        self._parts, self._finals = parts, list(finals)
        self._lock = threading.Lock()

    def done(self) -> bool:
        return all(part.done for part in self._parts)

    def finish(self, limit_s: float | None) -> None:
        """Wait until it is done, at most for the time given or the group's limit; raises its error."""
        self._wait(limit_s)
        with self._lock:
            while self._finals:
                self._finals.pop(0)()

    def _wait(self, limit_s: float | None) -> None:
        raise NotImplementedError

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call a function once it is done, on any thread."""
        once = threading.Lock()

        def part_is_done() -> None:
            if all(part.done for part in self._parts) and once.acquire(blocking=False):
                callback()

        for part in self._parts:
            part.when_done(part_is_done)
        part_is_done()

    def source(self) -> int:
        """Return the sender of a received message; -1 for anything else."""
        return -1


class _Future(Future):  # type: ignore[type-arg]
    """A future that knows whether it has Python callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._has_callbacks = self._completing = False

    def then(self, callback: Any) -> Any:
        self._expect_callback()
        return super().then(callback)

    def add_done_callback(self, callback: Any) -> None:
        self._expect_callback()
        super().add_done_callback(callback)

    def complete_here(self) -> bool:
        """Return whether the thread that finished the operation may complete this future."""
        with self._lock:
            self._completing = not self._has_callbacks
            return self._completing

    def _expect_callback(self) -> None:
        with self._lock:
            self._has_callbacks, completing = True, self._completing
        if completing:  # else the callback would run on that thread
            with contextlib.suppress(Exception):  # the callback reports its own error
                super().wait()


class Work(dist.Work):
    """An operation in flight with its result tensors. No operation: it is done."""

    _lock = threading.Lock()  # of making futures
    _future: Any = None
    _error: BaseException | None = None

    def __init__(self, operation: Operation | None, tensors: Sequence[Any]) -> None:
        super().__init__()
        self.operation = operation
        self._tensors = tensors

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for the operation; raises its error. The default timeout is the group's."""
        if self.operation is not None:
            limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
            try:
                self.operation.finish(limit_s if limit_s is not None and limit_s > 0 else None)
            except BaseException as error:
                self._error = error
                raise
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.operation is None or self.operation.done()

    def is_success(self) -> bool:
        if not self.is_completed():
            return False
        try:
            self.wait()
        except Exception:
            return False
        return True

    def exception(self) -> BaseException | None:
        if self.is_completed():
            self.is_success()
        return self._error

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return list(self._tensors)

    def source_rank(self) -> int:
        return -1 if self.operation is None else self.operation.source()

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a future of the list of tensors."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = _Future()
        if self.operation is None or self.operation.done():
            self._complete()
        else:
            self.operation.when_done(self._on_done)
        return future

    def _on_done(self) -> None:
        if self._future.complete_here():
            self._complete()
        else:
            threading.Thread(target=self._complete, name="hora-callbacks", daemon=True).start()

    def _complete(self) -> None:
        try:
            self.wait()
        except Exception as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(list(self._tensors))


DONE = Work(None, [])  # for a call whose caller waits: the result is not used
