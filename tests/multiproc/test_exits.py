"""Ranks started with environment variables alone that exit without shutdown or too early."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from secrets import token_hex

import pytest
from hvd_session import needs_torch_2_7

LIMIT_S = 280


def start_by_hand(script: str, size: int, secret: Path, *arguments: str) -> list[subprocess.Popen]:
    """Run the script as `size` ranks with only variables and a secret, as a foreign launcher would."""
    secret.write_text(token_hex(32))
    secret.chmod(0o600)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    place["HORA_SECRET_FILE"] = str(secret)
    return [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", script, *arguments],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


NEVER_SHUTS_DOWN = """
import torch, horovod.torch as hvd
hvd.init()
assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
left = hvd.allreduce_async(torch.ones(1), name=f"nobody waits for it {hvd.rank()}")
hvd.barrier()
print("done", hvd.rank())
"""
ENDS_BY_ITSELF = """
import sys, torch, horovod.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(1))
if hvd.rank() == 1:
    sys.exit(3)
try:
    while True:
        hvd.allreduce(torch.ones(1))
except hvd.HorovodInternalError as error:
    print("stopped:", error)
"""


DIES_IN_A_GROUP = """
import os, signal, sys, time, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("hora", timeout=timedelta(seconds=250))
small, large = torch.ones(10), torch.ones(3_000_000)
for _ in range(3):
    dist.all_reduce(small)
    dist.all_reduce(large)
if dist.get_rank() == 1:
    dist.recv(small, 0)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
dist.send(small, 1)
try:
    if sys.argv[1] == "receive":
        dist.recv(small, 1)
    elif sys.argv[1] == "send":
        dist.send(large, 1)
    else:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in (small, large)]:
            work.wait()
except RuntimeError as error:
    print("stopped:", error)
dist.destroy_process_group()
"""


def finish(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Return the exit code, output and errors of each process."""
    try:
        texts = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]


@pytest.mark.parametrize("size", [1, 2])
def test_a_process_that_never_calls_shutdown(size, tmp_path):
    ranks = start_by_hand(NEVER_SHUTS_DOWN, size, tmp_path / "secret")
    assert finish(ranks) == [(0, f"done {rank}\n", "") for rank in range(size)]


def test_a_rank_that_exits_early_stops_the_others(tmp_path):
    (code, output, errors), (early, _, _) = finish(start_by_hand(ENDS_BY_ITSELF, 2, tmp_path / "secret"))
    assert early == 3
    assert (code, errors) == (0, "")
    assert "stopped: Horovod has been shut down by rank 1" in output


@needs_torch_2_7
@pytest.mark.parametrize("call", ["receive", "send", "calls in flight"])
def test_a_killed_rank_ends_a_process_groups_calls_and_is_named(call, tmp_path):
    (code, output, errors), (killed, _, _) = finish(start_by_hand(DIES_IN_A_GROUP, 2, tmp_path / "secret", call))
    assert killed == -9
    assert (code, errors) == (0, "")
    assert output.startswith("stopped: rank 1 (process")
