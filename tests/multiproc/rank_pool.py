"""Pools of rank processes that wait for functions to call; all tests with ranks use them.

This folder's conftest runs every test marked `ranks` in them. The processes come from a fork server that has torch
loaded, so a fresh pool costs milliseconds. This is a module of its own because the fork server finds its target by
the module's name.
"""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

LIMIT_S = 300
_PRELOAD = os.environ.get("HORA_TEST_PRELOAD", "").split()  # set by make test-tensorflow: the import takes seconds
_HERE = str(Path(__file__).parent)


class Place:
    """The rank, the size and a store for a test below the engine (its parameter `place`)."""

    def __init__(self, number: int) -> None:
        self.rank, self.size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
        port = int(os.environ["MASTER_PORT"])
        self.store = dist.PrefixStore(f"test{number}", dist.TCPStore("127.0.0.1", port, is_master=False))
        self._num_gathers = 0

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        self._num_gathers += 1
        self.store.set(f"gather{self._num_gathers}/{self.rank}", pickle.dumps(value))
        return [pickle.loads(self.store.get(f"gather{self._num_gathers}/{rank}")) for rank in range(self.size)]


def _rank_main(connection: Any, env: dict[str, str]) -> None:
    os.environ.update(env)
    sys.path.insert(0, _HERE)
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    import torch

    torch.set_num_threads(1)
    if os.environ.get("HORA_TEST_POISON") == "1":
        importlib.import_module("poison").poison_unused_memory()
    while True:
        try:
            number, module, function, arguments = connection.recv()
        except EOFError:
            return
        try:
            test = getattr(importlib.import_module(module), function)
            if "place" in inspect.signature(test).parameters:
                arguments["place"] = Place(number)
            test(**arguments)
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
        context.set_forkserver_preload(
            ["torch", "torch._dynamo", "torch.distributed", "numpy", "horovod.torch", *_PRELOAD]
        )
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._num_calls = 0
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
        """Call a function on every rank; return its status and traceback. Ranks in `lost` are expected to die."""
        self._num_calls += 1
        for connection in self._connections:
            connection.send((self._num_calls, module, function, arguments))
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
        """Close the connections, at which the ranks exit; kill those that do not."""
        for connection in self._connections:
            connection.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


class Pools:
    """One pool per size and environment, reused between tests unless a rank failed or was expected to die."""

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
