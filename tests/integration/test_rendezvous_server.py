"""Programs that start ranks themselves: Horovod's variables, one secret, and slots that change with every plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from hora.launch.slots import get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousHTTPServer, RendezvousServer

# Like ElasticDL's workers: reads its variables from stdin, a line per plan, and joins the other ranks.
WORKER = """
import json, os, sys
import torch
import horovod.torch as hvd
for line in sys.stdin:
    os.environ.update(json.loads(line))
    hvd.init()
    print(hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item(), hvd.rank(), hvd.size(), flush=True)
    hvd.shutdown()
"""


class Worker:
    """A worker process that receives its variables on stdin."""

    def __init__(self, **env: str) -> None:
        clean = {name: text for name, text in os.environ.items() if not name.startswith(("HOROVOD_", "HORA_"))}
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            env=clean | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def place(self, variables: dict[str, str]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(variables) + "\n")
        self._process.stdin.flush()

    def answer(self) -> list[float]:
        assert self._process.stdout is not None
        return [float(word) for word in self._process.stdout.readline().split()]

    def end(self) -> tuple[int, str]:
        _, errors = self._process.communicate(timeout=280)
        return self._process.returncode, errors

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def workers():
    started: list[Worker] = []

    def start(**env):
        started.append(Worker(**env))
        return started[-1]

    yield start
    for worker in started:
        worker.kill()


@pytest.fixture
def server():
    server = RendezvousServer()
    yield server
    server.stop()


def meet(server, port, members, **more):
    """Start a plan that gives these workers slots in this order; return their answers."""
    plan = get_host_assignments(parse_hosts(f"localhost:{len(members)}"), len(members))
    server.init(plan)
    for worker, slot in zip(members, plan, strict=True):
        worker.place(create_slot_env_vars(slot) | create_run_env_vars("127.0.0.1", ["lo"], port, elastic=True) | more)
    return [worker.answer() for worker in members]


def test_workers_meet_through_variables_in_every_plan(server, workers):
    port = server.start()
    first, second, third = (workers(HORA_SECRET=server.secret) for _ in range(3))
    assert meet(server, port, [first, second]) == [[3, 0, 2], [3, 1, 2]]
    # Another order, with a third worker, for which this is the first plan.
    assert meet(server, port, [third, second, first]) == [[6, 0, 3], [6, 1, 3], [6, 2, 3]]
    assert [worker.end() for worker in (first, second, third)] == [(0, "")] * 3


@pytest.mark.slow
def test_master_and_workers_can_share_a_secret_file(server, workers, tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text("0123456789abcdef" * 4)
    monkeypatch.setenv("HORA_SECRET_FILE", str(path))
    port = server.start()
    pair = [workers(HORA_SECRET_FILE=str(path)) for _ in range(2)]
    assert meet(server, port, pair) == [[3, 0, 2], [3, 1, 2]]


def test_a_worker_without_a_secret_reports_the_missing_variable(server, workers):
    port = server.start()
    (plan, _) = get_host_assignments(parse_hosts("localhost:2"), 2)
    worker = workers()
    worker.place(create_slot_env_vars(plan) | create_run_env_vars("127.0.0.1", [], port))
    code, errors = worker.end()
    assert code == 1
    assert "give the workers HORA_SECRET (the `secret` of the RendezvousServer)" in errors


def test_unsupported_calls_are_rejected(server):
    with pytest.raises(ValueError, match="start"):
        server.init([])
    with pytest.raises(ValueError, match="handlers"):
        server.start(object)
    with pytest.raises(ValueError, match="RendezvousServer"):
        RendezvousHTTPServer()
