"""`horovod.runner.util.threads`: small tools around threads that old programs and tests import."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = ["execute_function_multithreaded", "in_thread", "on_event"]


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """A thread that calls `target(*args)`, already started. `silent`: an exception in it is not shown."""
    if not isinstance(args, tuple | list):
        raise ValueError(f"args must be a tuple, not {type(args).__name__}; for one argument write (arg,)")

    def call() -> None:
        with contextlib.suppress(Exception) if silent else contextlib.nullcontext():
            target(*args)

    thread = threading.Thread(target=call, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """A thread that calls `func(*args)` once the event is set, unless `stop` is set before."""

    def wait() -> None:
        if stop is None:
            event.wait()
        while stop is not None and not event.wait(check_stop_interval_s):
            if stop.is_set():
                return
        if stop is None or not stop.is_set():
            func(*args)

    return in_thread(wait, name=f"on-event-{getattr(func, '__name__', 'call')}", daemon=daemon, silent=silent)


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Call `fn(*args)` for each entry, at the same time: the results by index. RuntimeError if a call fails.

    Without `block_until_all_done` the calls go on in the background, and None is returned.
    """
    if not args_list:
        return {} if block_until_all_done else None
    pool = ThreadPoolExecutor(min(len(args_list), max_concurrent_executions), thread_name_prefix="execute")
    calls = [pool.submit(fn, *args) for args in args_list]
    pool.shutdown(wait=block_until_all_done)
    if not block_until_all_done:
        return None
    for index, call in enumerate(calls):
        if error := call.exception():
            raise RuntimeError(f"call {index} of {len(calls)} failed: {type(error).__name__}: {error}") from error
    return {index: call.result() for index, call in enumerate(calls)}
