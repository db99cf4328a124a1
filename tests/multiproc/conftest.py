"""Tests that run *inside* rank processes.

    pytestmark = pytest.mark.ranks(1, 2, 3, 4)          # every test of the module, in worlds of these sizes
    @pytest.mark.ranks(3, lost=(1,))                    # rank 1 is expected to die; the pool is then thrown away
    @pytest.mark.ranks(2, env={"HORA_TRANSPORT": "gloo"})

The test function itself is called on every rank at the same time. Pools of ranks are kept for the whole session, one per
world size and environment, so a test costs milliseconds; a test that calls `hvd.init()` must leave the runtime shut down.
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
        context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "horovod.torch"])
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
        for connection in self._connections:
            connection.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


class Pools:
    def __init__(self) -> None:
        self._pools: dict[object, Pool] = {}

    def call(
        self, size: int, env: dict[str, str], lost: tuple[int, ...], *call: Any
    ) -> list[tuple[str, str]]:
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


_pools = Pools()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is not None:
        metafunc.fixturenames.append("num_ranks")
        metafunc.parametrize(
            "num_ranks", marker.args, ids=[f"np{size}" for size in marker.args], indirect=True
        )


@pytest.fixture
def num_ranks(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    size = pyfuncitem.callspec.params["num_ranks"]
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names if name != "num_ranks"}
    lost = tuple(marker.kwargs.get("lost", ()))
    answers = _pools.call(
        size,
        marker.kwargs.get("env", {}),
        lost,
        pyfuncitem.module.__name__,
        pyfuncitem.originalname,
        arguments,
    )
    failures = [
        f"rank {rank} of {size}: {status}\n{text}"
        for rank, (status, text) in enumerate(answers)
        if status not in ("ok", "skip")
    ]
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
    if any(status == "skip" for status, _ in answers):
        pytest.skip(answers[0][1])
    return True


def pytest_sessionfinish() -> None:
    _pools.close()
