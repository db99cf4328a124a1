"""One rank of `test_two_hosts`: enters its host's network namespace, runs, and sends what it saw.

Started by a fork server that has torch loaded, so that four ranks load it once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from typing import Any

import torch

import horovod.torch as hvd
from hora import engine

_CLONE_NEWNET = 0x40000000
_ALL_PROTOCOLS = 0x0003
TENSOR_TEXT = b"what a tensor says"
OBJECT_TEXT = "what an object says"
NAME_TEXT = "what an operation is called"


def shared_memory() -> list[int]:
    """Inodes of the shared memory files of the engine that this process has mapped."""
    with open("/proc/self/maps") as file:
        return sorted({int(line.split()[4]) for line in file if "memfd:hora" in line})


def operations() -> dict[str, object]:
    rank, size = hvd.rank(), hvd.size()
    across = hvd.add_process_set([0, 2])
    three = hvd.add_process_set([1, 2, 3])
    results: dict[str, object] = {
        "large": hvd.allreduce(torch.arange(300_000.0) * (rank + 1), op=hvd.Sum)[[1, 299_999]].tolist(),
        "average": hvd.allreduce(torch.tensor([rank, -7])).tolist(),
        "grouped": [t.tolist() for t in hvd.grouped_allreduce([torch.ones(2), torch.ones(1)], op=hvd.Sum)],
        "allgather": hvd.allgather(torch.full((rank + 1,), rank)).tolist(),
        "broadcast": hvd.broadcast(torch.full((3,), float(rank)), root_rank=3).tolist(),
        "alltoall": hvd.alltoall(torch.arange(size) + 10 * rank).tolist(),
        "reducescatter": hvd.reducescatter(torch.arange(6.0) * (rank + 1), op=hvd.Sum).tolist(),
        "adasum": hvd.allreduce(torch.full((2,), 3.0), op=hvd.Adasum).tolist(),
        "object": hvd.broadcast_object({"from": rank}, root_rank=2),
    }
    if across.included():
        results["across"] = hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=across).tolist()
    if three.included():
        results["three"] = hvd.allgather(torch.tensor([rank]), process_set=three).tolist()
    hvd.barrier()
    return results


def say_what_must_not_be_read() -> None:
    """Send a tensor and an object from one host to the other, and the name of an operation."""
    told = hvd.broadcast(torch.frombuffer(bytearray(TENSOR_TEXT * 200), dtype=torch.uint8).clone(), root_rank=0)
    assert bytes(told.tolist()) == TENSOR_TEXT * 200
    assert hvd.broadcast_object({"text": OBJECT_TEXT * 20}, root_rank=3) == {"text": OBJECT_TEXT * 20}
    hvd.allreduce(torch.ones(1), name=NAME_TEXT)


def listen(namespace: str, answer: Any) -> None:
    """Record everything that passes the cable until told to stop; then send which of the texts were in it."""
    enter(namespace)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)) as sniffer:
        sniffer.bind(("cable", 0))
        sniffer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 2**20)
        sniffer.settimeout(0.2)
        answer.send("running")
        frames = []
        while not answer.poll():
            with contextlib.suppress(TimeoutError):
                frames.append(sniffer.recv(2**17))
    recorded = b"".join(frames)
    texts = (TENSOR_TEXT, OBJECT_TEXT.encode(), NAME_TEXT.encode(), b"hub_name")  # which is in the ranks' introductions
    answer.send([len(recorded), [text for text in texts if text in recorded]])


def describe() -> dict[str, object]:
    runtime = engine.current_runtime()
    return {
        "hosts": runtime.hosts,
        "place": [hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()],
        "transport": runtime.process_sets.queue(0).transport("cpu").name,
        "memory": shared_memory(),
    }


def train_until_lost(victim: int | None) -> dict[str, object]:
    """The victim is killed in the middle of a step; the others must be told."""
    tensor = torch.ones(100_000)
    for step in range(1_000_000):
        if hvd.rank() == victim and step == 20:
            os.kill(os.getpid(), 9)
        try:
            hvd.allreduce_(tensor, name="gradient")
        except hvd.HorovodInternalError as error:
            return {"error": str(error)}
    return {}


def run(namespace: str, env: dict[str, str], mode: str, answer: Any) -> None:
    enter(namespace)
    os.environ.update(env)
    torch.set_num_threads(1)
    hvd.init()
    hvd.allreduce(torch.ones(1), name="connected")
    say_what_must_not_be_read()
    answer.send("running")
    victim = 3 if mode == "killed" else None
    seen = operations() | describe() if mode == "operations" else train_until_lost(victim)
    hvd.shutdown()
    answer.send(seen)


def enter(namespace: str) -> None:
    """Move this thread, so far the only one, to a network namespace."""
    with open(namespace) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
