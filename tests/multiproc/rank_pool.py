"""A few processes that wait for functions to run as ranks. Tests of single layers use it, below the engine.

The processes come from a fork server that has torch loaded, so a fresh pool costs milliseconds: tests that
kill ranks take a pool of their own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist

LIMIT_S = 60


def _serve(connection: Any, port: int, rank: int) -> None:
    import torch

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            function, size, prefix, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, function(rank, size, dist.PrefixStore(prefix, store), *arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)


class Ranks:
    """`run` calls `function(rank, size, store, *arguments)` in the first `size` processes."""

    def __init__(self, num: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "torch.testing", "numpy", "pytest"])
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._runs = 0
        self.processes, self._connections = [], []
        for rank in range(num):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, self._store.port, rank), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self._connections.append(here)

    def run(self, function: Callable[..., Any], size: int, *arguments: Any, lost: tuple[int, ...] = ()) -> list[Any]:
        """The ranks' results; a rank in `lost` is expected to die and gives None."""
        self._runs += 1
        for connection in self._connections[:size]:
            connection.send((function, size, f"run{self._runs}", arguments))
        results, failures = [], []
        for rank, connection in enumerate(self._connections[:size]):
            if not connection.poll(LIMIT_S):
                raise TimeoutError(f"rank {rank} of {size} gave no answer within {LIMIT_S} s")
            try:
                good, value = connection.recv()
            except EOFError:
                good, value = rank in lost, None if rank in lost else "it died\n"
            results.append(value)
            if not good:
                failures.append(f"rank {rank} of {size}:\n{value}")
        assert not failures, "\n".join(failures)
        return results

    def close(self) -> None:
        end_ranks(self.processes, self._connections)


def end_ranks(processes: Iterable[Any], connections: Iterable[Any]) -> None:
    """Ranks end when their connection does; those that don't are killed."""
    for connection in connections:
        connection.close()
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()


@contextlib.contextmanager
def ranks(num: int) -> Iterator[Ranks]:
    pool = Ranks(num)
    try:
        yield pool
    finally:
        pool.close()
