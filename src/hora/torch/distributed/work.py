"""`Work`: a collective or message of a process group in flight, with torch's interface.

The thread that waits for the operation drives it, as everywhere in the engine; a background thread drives one that
nobody waits for. The results are written before the operation is done (`Completion.last`), so a work object only looks.

The future is created on demand, and completed by the thread that finished the operation. Python callbacks may wait for
other operations (PowerSGD's do), so they run on separate threads. Nobody calls `wait` on an operation whose future
torch's C++ waits for, so one thread (`_Deadlines`) ends those in time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from math import inf
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.futures import Future

from hora.engine.request import Completion
from hora.torch.distributed.phases import phases

_TICK_S = 1.0  # the watching thread looks this often whether anything is left to watch


class _Failure:
    """The value of a failed future. Python code gets the error from `reveal`.

    C++ code, such as DDP's reducer, knows no errors of Python: it extracts the tensors from a value by pickling it, and
    turns an exception of that into one of its own.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise self._error

    def __repr__(self) -> str:
        return f"the result of a failed operation ({self._error})"

    @staticmethod
    def reveal(value: Any) -> Any:
        """Return the value of a future, or raise its error."""
        if isinstance(value, _Failure):
            raise type(value._error)(*value._error.args)
        return value


class _Future(Future):  # type: ignore[type-arg]
    """A future whose Python callbacks run on separate threads, unless it is done already."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__(devices=list(devices))
        self.devices = list(devices)
        self._set_unwrap_func(_Failure.reveal)

    def then(self, callback: Any) -> Any:
        if self.done():
            return super().then(callback)
        begun: Any = Future(devices=[*self.devices])
        result = begun.then(lambda _: self._call(callback))
        super().add_done_callback(lambda _: _on_thread(begun.set_result, None))
        return result

    def add_done_callback(self, callback: Any) -> None:
        if self.done():
            super().add_done_callback(callback)
        else:
            super().add_done_callback(lambda _: _on_thread(self._call, callback))

    def _call(self, callback: Any) -> Any:
        with contextlib.suppress(Exception):  # the callback asks for the value itself
            self.wait()  # makes the current streams of GPUs wait
        return callback(self)


def _on_thread(function: Callable[[Any], object], argument: object) -> None:
    threading.Thread(target=function, args=(argument,), name="hora-callbacks", daemon=True).start()


class _Deadlines:
    """Expires works at their deadlines on a thread of its own, which ends when there is nothing to watch."""

    def __init__(self) -> None:
        self._watched: dict[Work, float] = {}
        self._changed = threading.Condition()
        self._wakes_at = inf  # inf while no thread runs

    def watch(self, work: Work, deadline: float) -> None:
        with self._changed:
            self._watched[work] = deadline
            if self._wakes_at == inf:
                self._wakes_at = deadline
                threading.Thread(target=self._run, name="hora-deadlines", daemon=True).start()
            elif deadline < self._wakes_at:
                self._changed.notify_all()

    def forget(self, work: Work) -> None:
        with self._changed:
            self._watched.pop(work, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._watched:
                    self._wakes_at = inf
                    return
                now = time.monotonic()
                self._wakes_at = min(*self._watched.values(), now + _TICK_S)
                late = [work for work, deadline in self._watched.items() if deadline <= now]
                if not late:
                    self._changed.wait(self._wakes_at - now)
            for work in late:
                self.forget(work)
                work.expire()


_deadlines = _Deadlines()


class Work(dist.Work):
    """An operation with its result tensors and its parts (requests or a message).

    Its group waits for the parts, for `limit_s` by default.
    """

    _future: Any = None
    _parts: Sequence[Completion] = ()

    def __init__(
        self, tensors: Sequence[Any], parts: Sequence[Completion] = (), group: Any = None, limit_s: float = 0.0
    ) -> None:
        super().__init__()
        self._tensors, self._parts = tensors, parts
        self._group, self._limit_s = group, limit_s
        self._deadline = time.monotonic() + limit_s  # of those that do not call `wait`
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if not self._is_done():  # nobody can wait for it any more
            self._group.go_on_in_background()

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for the operation; raises its error. The default timeout is the group's, and its end ends the group.

        A collective goes on after a shorter one, and may be waited for again.
        """
        limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if limit_s is None or limit_s <= 0:
            limit_s = self._limit_s
        self._finish(time.monotonic() + limit_s, limit_s)
        return True

    def _finish(self, deadline: float, limit_s: float) -> None:
        """Wait until all parts are done; raises the first error."""
        failure: Exception | None = None
        for part in self._parts:
            try:
                self._group.finish(part, deadline, limit_s, ends_group=deadline == 0.0 or deadline >= self._deadline)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._is_done():
            self._group.go_on_now()
        if not self._is_done():
            if time.monotonic() > self._deadline:
                self.expire()
            else:
                self._group.go_on_in_background()  # which also notices other calls and deaths
        return all(part.has_result for part in self._parts)

    def _is_done(self) -> bool:
        return all(part.done for part in self._parts)

    def expire(self) -> None:
        """End the operation with an error if it is not done: its time is over."""
        with contextlib.suppress(Exception):  # it is the operation's error
            self._finish(0.0, self._limit_s)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        errors = (part.error for part in self._parts if part.done)
        return next(filter(None, errors), None)

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
            self._future = _Future(self._gpus())
        if self._is_done():
            self._complete()
        else:
            phases.future_made()
            _deadlines.watch(self, self._deadline)
            self._complete_when_done()
            self._group.go_on_in_background()
        return self._future

    def _gpus(self) -> list[torch.device]:
        tensors = (tensor for some in self._tensors for tensor in (some if isinstance(some, (list, tuple)) else [some]))
        return sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)

    def _complete_when_done(self) -> None:
        """Complete the future once all parts are done, on any thread."""
        once = threading.Lock()

        def part_is_done() -> None:
            if self._is_done() and once.acquire(blocking=False):
                _deadlines.forget(self)
                self._complete()

        for part in self._parts:
            part.when_done(part_is_done)
        part_is_done()

    def _complete(self) -> None:
        """Complete the future of an operation that is done."""
        with contextlib.ExitStack() as streams:
            for device in self._future.devices:
                streams.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))  # waits for the results only
            try:
                self._finish(0.0, self._limit_s)
            except Exception as error:
                self._future.set_result(_Failure(error))
            else:
                self._future.set_result(list(self._tensors))


DONE = Work([])  # for a call whose caller waits: the result is not used
