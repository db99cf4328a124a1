"""`Work`: a collective or message of a process group in flight, with torch's interface.

The thread that waits for the operation drives it, as everywhere in the engine. The future is created on demand. Without
Python callbacks, the thread that finished the operation completes the future. Python callbacks may wait for other
operations (PowerSGD's do), so they run on separate threads.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from hora.engine.request import Completion


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
    """An operation with its result tensors, its parts (requests or a message), and functions to run once when all are
    done. Its group waits for the parts, for `limit_s` by default.
    """

    _future: Any = None
    _error: BaseException | None = None

    def __init__(
        self,
        tensors: Sequence[Any],
        parts: Sequence[Completion] = (),
        finals: Sequence[Callable[[], object]] = (),
        group: Any = None,
        limit_s: float = 0.0,
    ) -> None:
        super().__init__()
        self._tensors, self._parts, self._finals = tensors, parts, list(finals)
        self._group, self._limit_s = group, limit_s
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for the operation; raises its error. The default timeout is the group's."""
        limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if limit_s is None or limit_s <= 0:
            limit_s = self._limit_s
        deadline = time.monotonic() + limit_s
        try:
            for part in self._parts:
                self._group.finish(part, deadline, limit_s)
            with self._lock:
                while self._finals:
                    self._finals.pop(0)()
        except BaseException as error:
            self._error = error
            raise
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._parts_done():
            self._group.go_on_now()
        return self._parts_done()

    def _parts_done(self) -> bool:
        return all(part.done for part in self._parts)

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
        """Return the member that sent a received message; -1 for anything else."""
        source = getattr(self._parts[0], "source", None) if self._parts else None
        return -1 if source is None else self._group.member_of(source)

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a future of the list of tensors."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = _Future()
        if self.is_completed():
            self._complete()
        else:
            self._call_on_done()
            self._group.go_on_in_background()
        return future

    def _call_on_done(self) -> None:
        """Complete the future once all parts are done, on any thread."""
        once = threading.Lock()

        def part_is_done() -> None:
            if not self._parts_done() or not once.acquire(blocking=False):
                return
            if self._future.complete_here():
                self._complete()
            else:
                threading.Thread(target=self._complete, name="hora-callbacks", daemon=True).start()

        for part in self._parts:
            part.when_done(part_is_done)
        part_is_done()

    def _complete(self) -> None:
        try:
            self.wait()
        except Exception as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(list(self._tensors))


DONE = Work([])  # for a call whose caller waits: the result is not used
