"""The ranks of a world as processes that wait for functions to call. Used by this folder's conftest.

A module of its own, because what a fork server starts must be found by its module's name.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rank_pool import end_ranks

LIMIT_S = 90
_HERE = str(Path(__file__).parent)


def _rank_main(connection: Any, env: dict[str, str]) -> None:
    os.environ.update(env)
    sys.path.insert(0, _HERE)
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            module, function, arguments = connection.recv()
        except EOFError:
            return
        try:
            getattr(importlib.import_module(module), function)(**arguments)
            answer = ("ok", "")
        except pytest.skip.Exception as skipped:
            answer = ("skip", str(skipped))
        except BaseException:
            answer = ("fail", traceback.format_exc())
        connection.send(answer)


class Pool:
    """The ranks of one world, waiting for functions to call."""

    def __init__(self, size: int, env: dict[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed", "numpy", "horovod.torch"])
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes, self._connections = [], []
        for rank in range(size):
            here, there = context.Pipe()
            place = {
                "HOROVOD_RANK": rank,
                "HOROVOD_SIZE": size,
                "HOROVOD_LOCAL_RANK": rank,
                "HOROVOD_LOCAL_SIZE": size,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": self._store.port,
                "TORCHELASTIC_USE_AGENT_STORE": "true",
            }
            variables = {name: str(value) for name, value in place.items()} | env
            process = context.Process(target=_rank_main, args=(there, variables), daemon=False)
            process.start()
            there.close()
            self.processes.append(process)
            self._connections.append(here)

    def call(
        self, module: str, function: str, arguments: dict[str, Any], lost: tuple[int, ...]
    ) -> list[tuple[str, str]]:
        for connection in self._connections:
            connection.send((module, function, arguments))
        deadline = time.monotonic() + LIMIT_S
        return [self._answer(rank, deadline, lost) for rank in range(len(self.processes))]

    def _answer(self, rank: int, deadline: float, lost: tuple[int, ...]) -> tuple[str, str]:
        connection = self._connections[rank]
        if not connection.poll(max(deadline - time.monotonic(), 0.01)):
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
            self.processes[rank].join(0.5)
            return ("hang", f"no answer within {LIMIT_S} s")
        try:
            return connection.recv()
        except (EOFError, ConnectionResetError):
            return ("ok", "") if rank in lost else ("died", "the process died")

    def close(self) -> None:
        end_ranks(self.processes, self._connections)


class Pools:
    def __init__(self) -> None:
        self._pools: dict[object, Pool] = {}

    def call(self, size: int, env: dict[str, str], lost: tuple[int, ...], *call: Any) -> list[tuple[str, str]]:
        key = (size, tuple(sorted(env.items())))
        pool = self._pools.pop(key, None) or Pool(size, env)
        answers = []
        try:
            answers = pool.call(*call, lost)
        finally:
            if not lost and answers and all(status in ("ok", "skip") for status, _ in answers):
                self._pools[key] = pool
            else:
                pool.close()
        return answers

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
