"""One rank of `test_two_hosts` or `several_hosts`: enters its host's network namespace, runs a mode and sends results.

Started by a fork server that has loaded torch, so that four ranks load it once.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from benchmarks.models import resnet18

import horovod.torch as hvd
from hora import engine
from waiting import wait_until

_CLONE_NEWNET = 0x40000000
_ALL_PROTOCOLS = 0x0003
TENSOR_TEXT = b"what a tensor says"
OBJECT_TEXT = "what an object says"
NAME_TEXT = "what an operation is called"


def shared_memory() -> list[int]:
    """Return the inodes of the engine's shared memory files that this process has mapped."""
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
    """Send the texts of a tensor, an object and a name across hosts; the test looks for them on the cable."""
    text = torch.frombuffer(bytearray(TENSOR_TEXT * 200), dtype=torch.float32).clone()
    assert hvd.broadcast(text, root_rank=0).numpy().tobytes() == TENSOR_TEXT * 200
    assert hvd.broadcast_object({"text": OBJECT_TEXT * 20}, root_rank=hvd.size() - 1) == {"text": OBJECT_TEXT * 20}
    hvd.allreduce(torch.ones(1), name=NAME_TEXT)


def listen(namespace: str, answer: Any) -> None:
    """Capture the traffic on the cable until asked to stop; then send which of the texts it contained."""
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
    texts = (
        TENSOR_TEXT,
        OBJECT_TEXT.encode(),
        NAME_TEXT.encode(),
        b"fusion_threshold_bytes",
    )  # part of the ranks' introductions
    answer.send([len(recorded), [text for text in texts if text in recorded]])


def process_group() -> dict[str, object]:
    """Exchange messages and run collectives of torch.distributed with ranks on both hosts."""
    rank, size = hvd.rank(), hvd.size()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], 29401, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("hora", store=store, rank=rank, world_size=size)
    results: dict[str, object] = {}
    text = torch.frombuffer(bytearray(TENSOR_TEXT * 200), dtype=torch.uint8).clone()
    for name, sent in (("text", text), ("large", torch.arange(1_000_001.0)), ("empty", torch.ones(0))):
        wrong = []
        for distance in range(1, size):
            found = torch.zeros_like(sent)
            receiving = dist.irecv(found, (rank - distance) % size, tag=distance)
            dist.send(sent + rank, (rank + distance) % size, tag=distance)
            receiving.wait()
            if not found.equal(sent + (rank - distance) % size):
                wrong.append(distance)
        results[name] = wrong
    others = [other for other in range(size) if other != rank]
    found = {other: torch.zeros(50_000) for other in others}
    batch = [dist.P2POp(dist.isend, torch.full((50_000,), 10.0 * rank + other), other) for other in others]
    batch += [dist.P2POp(dist.irecv, found[other], other) for other in others]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    results["batch"] = [[tensor.min().item(), tensor.max().item()] for tensor in found.values()]
    if rank == 0:
        any_of = torch.zeros(3)
        results["any"] = sorted([dist.recv(any_of), int(any_of[0])] for _ in others)
    else:
        dist.send(torch.full((3,), float(rank)), 0)
    outputs = [torch.zeros(rank + 1) for _ in range(size)]
    dist.all_to_all(outputs, [torch.full((other + 1,), float(rank)) for other in range(size)])
    results["all_to_all"] = [output.tolist() for output in outputs]
    across = dist.new_group([0, 2])
    if rank in (0, 2):
        summed = torch.tensor([rank + 1.0])
        dist.all_reduce(summed, group=across)
        results["across"] = summed.item()
    mixed = dist.new_group([3, 0, 2, 1], sort_ranks=False)  # neither ascending nor host by host
    gathered, part, top = torch.zeros(size), torch.zeros(1), torch.tensor([float(rank)])
    dist.all_gather_into_tensor(gathered, top, group=mixed)
    dist.reduce_scatter_tensor(part, torch.arange(4.0), group=mixed)
    dist.broadcast(top, 3, group=mixed)
    results["mixed"] = [gathered.tolist(), part.item(), top.item()]
    dist.barrier()
    dist.destroy_process_group()
    return results


def describe() -> dict[str, object]:
    runtime = engine.current_runtime()
    return {
        "hosts": runtime.hosts,
        "place": [hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()],
        "transport": runtime.sets.queue(0).transport("cpu").name,
        "memory": shared_memory(),
    }


def train_until_lost(victim: int | None) -> dict[str, object]:
    """Train until the victim is killed in the middle of a step; the other ranks return the error."""
    tensor = torch.ones(100_000)
    for step in range(1_000_000):
        if hvd.rank() == victim and step == 20:
            os.kill(os.getpid(), 9)
        try:
            hvd.allreduce_(tensor, name="gradient")
        except hvd.HorovodInternalError as error:
            return {"error": str(error)}
    return {}


REDUCED = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


SPLITS = torch.tensor([1, 2, 0, 4], dtype=torch.int32)


def everything() -> dict[str, object]:
    """Run all collectives with all dtypes, on numbers whose sum does not depend on the order of additions; use sets
    that span hosts; and train in sharded and compressed modes.
    """
    rank, size = hvd.rank(), hvd.size()
    sets = {"across": hvd.add_process_set([0, 2]), "three": hvd.add_process_set([1, 2, 3])}
    found: dict[str, object] = {}
    for dtype in (*REDUCED, torch.bool):
        values = (torch.arange(7) % 3 + rank).to(dtype)
        if dtype is not torch.bool:
            for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product):
                with contextlib.suppress(ValueError):  # not every operation supports every dtype, but all ranks agree
                    found[f"{dtype} allreduce {op}"] = hvd.allreduce(values, op=op).tolist()
            found[f"{dtype} reducescatter"] = hvd.reducescatter(values, op=hvd.Sum).tolist()
            grouped = hvd.grouped_allreduce([values, values[:2]], op=hvd.Sum)
            found[f"{dtype} grouped"] = [tensor.tolist() for tensor in grouped]
        found[f"{dtype} allgather"] = hvd.allgather(values[: rank + 1]).tolist()
        found[f"{dtype} broadcast"] = hvd.broadcast(values, root_rank=size - 1).tolist()
        found[f"{dtype} alltoall"] = hvd.alltoall(values, splits=SPLITS)[0].tolist()
        for name, members in sets.items():
            if members.included():
                gathered = hvd.allgather(values[:2], process_set=members)
                found[f"{dtype} allgather {name}"] = gathered.tolist()
    for name, members in sets.items():
        if members.included():
            total = hvd.allreduce(torch.arange(70_000.0) * (rank + 1), op=hvd.Sum, process_set=members)
            found[f"sum {name}"] = fingerprint(total)
    whole = torch.arange(2_000_003.0) % 1000 * (rank + 1)
    found["large allreduce"] = fingerprint(hvd.allreduce(whole, op=hvd.Sum))
    found["large reducescatter"] = fingerprint(hvd.reducescatter(whole, op=hvd.Sum))
    found["large alltoall"] = fingerprint(hvd.alltoall(whole[:2_000_000]))
    found["objects"] = hvd.allgather_object({"rank": rank})
    for sharded in (False, True):
        found[f"weights, sharded={sharded}"] = trained(sharded=sharded)
    for name in ("bf16", "int8"):
        found[f"compressed weights, {name}"] = trained(compression=getattr(hvd.Compression, name))
    hvd.barrier()
    return found


def fingerprint(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def trained(**options: Any) -> list[float]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), named_parameters=model.named_parameters(), **options
    )
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(hvd.rank()))
    for _ in range(5):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def cable_bytes() -> int:
    """Return the number of bytes that this host has sent so far."""
    with open("/proc/self/net/dev") as file:
        return next(int(line.split(":")[1].split()[8]) for line in file if "cable" in line)


def slow_links() -> dict[str, object]:
    """Run trainings that send less; return the weights of each and the bytes sent."""
    powersgd = hvd.Compression.powersgd
    kinds: dict[str, Callable[[Any], Any]] = {
        "plain": hvd.DistributedOptimizer,
        "whole rank": lambda o: hvd.DistributedOptimizer(
            o, compression=powersgd(rank=128, start_step=1, min_compression_rate=0.1)
        ),
        "rank 2": lambda o: hvd.DistributedOptimizer(o, compression=powersgd(rank=2, start_step=1)),
        "LocalSGD": lambda o: hvd.LocalSGD(o, every=4),
        "DiLoCo": lambda o: hvd.DiLoCo(o, every=8, fragments=2, compression=hvd.Compression.int8),
    }
    found: dict[str, object] = {}
    for name, wrap in kinds.items():
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.Tanh(), torch.nn.Linear(512, 128))
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        generator = torch.Generator().manual_seed(hvd.rank())
        inputs, targets = torch.randn(2, 16, 128, generator=generator)
        for step in range(11):
            if step == 3:
                hvd.barrier()
                before = cable_bytes()
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
        found[f"{name}, bytes"] = cable_bytes() - before
        found[name] = torch.cat([p.detach().flatten() for p in model.parameters()])[::97].tolist()
        if name in ("LocalSGD", "DiLoCo"):
            optimizer.exchange()
            found[f"{name} at last"] = torch.cat([p.detach().flatten() for p in model.parameters()])[::97].tolist()
    hvd.barrier()
    return found


def collectives_and_trainings() -> dict[str, object]:
    """Run on any number of ranks; return the wrong collectives, and the losses of an MLP and of a narrow ResNet18 per
    step.
    """
    rank, size = hvd.rank(), hvd.size()
    speakers = [host[0] for host in engine.current_runtime().hosts]
    sets = {"world": None, "odd": hvd.add_process_set(range(1, size))}
    if 1 < len(speakers) < size and speakers[1:] != list(range(1, size)):
        sets["one of each host"] = hvd.add_process_set(speakers)
    wrong = []

    def check(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        if not torch.equal(found, expected):
            wrong.append(what)

    for name, members in sets.items():
        ranks = list(range(size)) if members is None else sorted(members.ranks)
        if rank not in ranks:
            continue
        options = {} if members is None else {"process_set": members}
        total, me, count = sum(ranks), ranks.index(rank), len(ranks)
        for length in (1, 1000, 300_001):
            values = torch.arange(length, dtype=torch.float64) % 100
            got = hvd.allreduce(values * rank, op=hvd.Sum, name=f"sum {length}", **options)
            check(f"{name} allreduce {length}", got, values * total)
        got = hvd.allgather(torch.full((rank + 1,), rank), **options)
        check(f"{name} allgather", got, torch.cat([torch.full((one + 1,), one) for one in ranks]))
        check(f"{name} broadcast", hvd.broadcast(torch.tensor([rank]), ranks[-1], **options), torch.tensor([ranks[-1]]))
        got = hvd.alltoall(torch.arange(count) + 100 * rank, **options)
        check(f"{name} alltoall", got, torch.tensor([100 * one + me for one in ranks]))
        got = hvd.reducescatter(torch.arange(2.0 * count) * rank, op=hvd.Sum, **options)
        check(f"{name} reducescatter", got, torch.tensor([2.0 * me, 2.0 * me + 1]) * total)
    hvd.barrier()
    models = {
        "MLP": (lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 64), torch.nn.Linear(64, 10)))
    }
    models["ResNet18"] = lambda: resnet18(width=4)
    return {"wrong": wrong} | {name: losses(make) for name, make in models.items()}


def losses(make_model: Callable[[], torch.nn.Module]) -> list[float]:
    """Return the losses of three training steps, averaged over all ranks."""
    torch.manual_seed(1)
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), named_parameters=model.named_parameters()
    )
    generator = torch.Generator().manual_seed(hvd.rank())
    inputs, labels = torch.randn(4, 3, 32, 32, generator=generator), torch.arange(4)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        found.append(hvd.allreduce(loss.detach(), name="loss").item())
    return found


def rounds_of_sharded_steps(rounds: Callable[[], int]) -> int:
    """Return the number of negotiation rounds in steady steps of a sharded optimizer, or -1 if a result is wrong."""
    parameter = torch.nn.Parameter(torch.zeros(700_000))
    # Ranks that compare themselves now and then announce that.
    inner = torch.optim.SGD([parameter], lr=1.0)
    optimizer = hvd.DistributedOptimizer(inner, [("p", parameter)], sharded=True, on_drift="ignore")
    before = 0
    for number in range(10):
        if number == 3:
            before = rounds()
        optimizer.zero_grad()
        (parameter * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
    expected = torch.full_like(parameter, -10.0 * (hvd.size() + 1) / 2)
    return rounds() - before if torch.allclose(parameter.detach(), expected, rtol=1e-4) else -1


def steady_steps(victim: int | None) -> dict[str, object]:
    """Train several buckets of known gradients; return the number of negotiation rounds and the wrong results, also
    while ranks join, and the error of the other ranks if one is killed in a step.
    """
    rank, size = hvd.rank(), hvd.size()
    parameters = [torch.nn.Parameter(torch.zeros(count)) for count in (1_100_000, 5, 1_100_000, 70)]
    named = [(f"p{n}", p) for n, p in enumerate(parameters)]
    # Ranks that have joined leave out steps of the others, so they part.
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), named, on_drift="ignore")
    wrong: list[object] = []

    def step(what: object, ranks: Sequence[int] = range(size)) -> None:
        before = [parameter.detach().clone() for parameter in parameters]
        optimizer.zero_grad()
        sum((parameter * (rank + 1)).sum() for parameter in parameters).backward()
        optimizer.step()
        expected = sum(one + 1 for one in ranks) / size
        for old, parameter in zip(before, parameters, strict=True):
            if not torch.allclose(old - parameter.detach(), torch.full_like(old, expected), rtol=1e-4):
                wrong.append(what)

    def rounds() -> int:
        return sum(negotiation.rounds for negotiation in engine.current_runtime().sets.trees().values())

    announced = [rounds_of_sharded_steps(rounds)]
    for epoch in range(2):
        for number in range(3):
            step((epoch, number))
        before = rounds()
        for number in range(10):
            step((epoch, "steady", number))
        announced.append(rounds() - before)
        # Delays the announcements of joins until all ranks have read the count: rank 0 notices joins once a second.
        step((epoch, "counted"))
        for number in range((rank + epoch) % size):
            step((epoch, "joining", number), [one for one in range(size) if (one + epoch) % size > number])
        hvd.join()
    for number in range(10 if victim is None else 1_000_000):
        if rank == victim and number == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            step(("in the end", number))
        except hvd.HorovodInternalError as error:
            return {"announced": announced, "wrong": wrong, "error": str(error)}
    return {"announced": announced, "wrong": wrong}


def wait_for_a_stopped_speaker(victim: int) -> dict[str, object]:
    """Stop the victim, which is its host's leader; the other ranks return the error of the stall check."""
    if hvd.rank() == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        hvd.allreduce(torch.ones(1), name="in vain")
    except hvd.HorovodInternalError as error:
        return {"error": str(error)}
    return {}


def memory_of_an_allgather() -> float:
    """Return the peak memory in MiB that a rank allocates while all ranks gather 64 MiB."""
    mine = torch.ones(16 * 2**20 // 4)
    hvd.allgather(mine[: 2**20])  # allocates connections and buffers
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    before = status("VmHWM")
    gathered = hvd.allgather(mine)
    return (status("VmHWM") - before) / 1024 if bool((gathered == 1).all()) else -1.0


def status(what: str) -> int:
    """Return a value of /proc/self/status in KiB."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(what))


def add_until_told(answer: Any) -> dict[str, object]:
    """Sum small and large tensors until rank 0 is asked to stop."""
    before, rounds, wrong, over = status("VmRSS"), 0, 0, False
    while not over:
        finish = torch.tensor([float(hvd.rank() == 0 and answer.poll())])
        over = bool(hvd.allreduce(finish, op=hvd.Sum, name="over").item())
        for count in (1000, 300_000):
            total = hvd.allreduce(torch.full((count,), hvd.rank() + 1.0), op=hvd.Sum, name=f"sum of {count}")
            wrong += int((total != 10.0).sum())
        rounds += 1
    return {"rounds": rounds, "wrong": wrong, "mib": (status("VmRSS") - before) / 1024}


def fall_silent(how: signal.Signals, victim: int) -> dict[str, object]:
    """Kill or stop the victim while it sends: the cable is so slow that an exchange takes a second."""
    tensor = torch.full((4 * 2**20,), hvd.rank() + 1.0)
    hvd.allreduce(tensor[:1000], name="before")
    if hvd.rank() == victim:
        threading.Timer(0.3, os.kill, (os.getpid(), how)).start()
    try:
        total = hvd.allreduce(tensor, op=hvd.Sum, name="exchange")
    except hvd.HorovodInternalError as error:
        return {"error": str(error)}
    return {"wrong": int((total != 10.0).sum())}


def agree_without(absent: int) -> dict[str, object]:
    """Negotiate more than a local socket buffers for the absent rank, which is stopped meanwhile."""
    others = hvd.add_process_set([rank for rank in range(hvd.size()) if rank != absent])
    pids, num_rounds = hvd.allgather_object(os.getpid()), 0
    if hvd.rank() == absent:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        stopped = psutil.Process(pids[absent])
        wait_until("a rank is stopped", lambda: stopped.status() == psutil.STATUS_STOPPED)
        while num_rounds < 400:
            name = f"{num_rounds} {'x' * 4000}"
            num_rounds += int(hvd.allreduce(torch.ones(1), op=hvd.Average, name=name, process_set=others).item())
        hvd.barrier(process_set=others)
        if hvd.rank() == 0:
            assert stopped.status() == psutil.STATUS_STOPPED
            os.kill(stopped.pid, signal.SIGCONT)
    together = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="together").item()
    return {"rounds": num_rounds, "together": together}


def habits(columns: Sequence[str]) -> dict[str, object]:
    """Return the wrong cells in these columns of the matrix of habits, with their errors."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "multiproc"))
    from habits import COLUMNS, ROWS, compare

    hosts = engine.current_runtime().hosts
    wrong: dict[str, object] = {} if hosts == [[0, 1], [2, 3]] else {"hosts": hosts}
    for column in columns:
        for row in ROWS:
            try:
                compare(ROWS[row], COLUMNS[column], [[0, 1], [2, 3]])
            except Exception:  # the other cells should run as well
                wrong[f"{column}, {row}"] = traceback.format_exc(limit=-3)
    return wrong


def fuzzed_trainings(texts: list[str]) -> dict[str, object]:
    """Return the failing random trainings of `tests/fuzz/trainings.py`, with their errors."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
    from trainings import play_on_two_hosts

    return play_on_two_hosts(texts)


def run(namespace: str, env: dict[str, str], mode: str, answer: Any) -> None:
    enter(namespace)
    os.environ.update(env)
    torch.set_num_threads(1)
    hvd.init()
    hvd.allreduce(torch.ones(1), name="connected")
    say_what_must_not_be_read()
    answer.send("running")
    seen = done(mode, answer)
    hvd.shutdown()
    answer.send(seen)


def done(mode: str, answer: Any) -> dict[str, object]:
    if mode == "operations":
        return operations() | describe()
    if mode == "everything":
        return everything() | describe()
    if mode.startswith("habits: "):
        return habits(mode.removeprefix("habits: ").split(", "))
    if mode.startswith("trainings: "):
        return fuzzed_trainings(json.loads(mode.removeprefix("trainings: ")))
    if mode == "slow links":
        return slow_links()
    if mode == "process group":
        return process_group()
    if mode == "memory":
        return {"mib": memory_of_an_allgather()}
    if mode == "until told":
        return add_until_told(answer)
    if mode == "any number":
        return collectives_and_trainings() | {"hosts": engine.current_runtime().hosts}
    if mode in ("steady", "steady, then killed"):
        return steady_steps(None if mode == "steady" else 3)
    if mode == "a speaker is stopped":
        return wait_for_a_stopped_speaker(2)
    if mode == "one is stopped":
        return agree_without(1)
    if mode in ("killed in mid-exchange", "stopped in mid-exchange"):
        return fall_silent(signal.SIGKILL if mode.startswith("killed") else signal.SIGSTOP, victim=3)
    return train_until_lost(3 if mode == "killed" else None)


def enter(namespace: str) -> None:
    """Move this thread, the only one so far, to a network namespace."""
    with open(namespace) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
