"""Compare the start-up time with TorchDistributor's, interleaved: `python benchmarks/spark_startup.py [rounds]`.

Each contender starts two processes that initialise, allreduce one tensor and return its value: on a
standalone Spark cluster (a master and two workers with one core each), classic and through a Connect server,
and as local processes. One round of everything runs first, to warm up the session and the executors. Prints medians,
spread and ratios, and splits the medians into the time before, in and after the function of rank 0.

Through Connect all contenders share Spark's Python workers, which Spark ends after TorchDistributor's tasks because
these leave input unread. So ours is measured twice: on new workers, and on warm ones.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "testbeds"))

import pyspark
from spark_cluster import ConnectServer, StandaloneCluster, spark_session

Answer = tuple[float, float, float]  # the sum, and the times of entering and leaving the function


def hora_main() -> Answer:
    entered = time.time()
    import torch

    import horovod.torch as hvd

    hvd.init()
    total = float(hvd.allreduce(torch.ones(1024), op=hvd.Sum)[0])
    return total, entered, time.time()


def torch_main() -> Answer:
    entered = time.time()
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.ones(1024)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return float(tensor[0]), entered, time.time()


def contenders(*, local: bool) -> dict[str, Callable[[], Answer]]:
    from pyspark.ml.torch.distributor import TorchDistributor

    from sparkdl import HorovodRunner

    def peer(local_mode: bool) -> Answer:
        distributor = TorchDistributor(num_processes=2, local_mode=local_mode, use_gpu=False)
        return distributor.run(torch_main)

    def ours(np: int) -> Answer:
        return HorovodRunner(np=np).run(hora_main)

    if local:
        return {
            "HorovodRunner(np=2)": lambda: ours(2),
            "TorchDistributor(2, local_mode=False)": lambda: peer(False),
            "HorovodRunner(np=-2)": lambda: ours(-2),
            "TorchDistributor(2, local_mode=True)": lambda: peer(True),
        }
    return {
        "HorovodRunner(np=2), new Python workers": lambda: ours(2),
        "HorovodRunner(np=2)": lambda: ours(2),
        "TorchDistributor(2, local_mode=False)": lambda: peer(False),
    }


def measure(rounds: int, *, local: bool) -> None:
    times: dict[str, list[float]] = {}
    parts: dict[str, list[Answer]] = {}
    for number in range(rounds + 1):
        for name, call in contenders(local=local).items():
            began = time.time()
            value, entered, left = call()
            ended = time.time()
            assert value == 2.0, f"{name} returned {value}"
            if number:
                times.setdefault(name, []).append(ended - began)
                parts.setdefault(name, []).append((entered - began, left - entered, ended - left))
    for name, taken in times.items():
        spread = f"{min(taken):.2f} … {max(taken):.2f}"
        print(f"{name:40s} median {statistics.median(taken):6.2f} s   spread {spread}   n={len(taken)}")
        before, within, after = (statistics.median(part) for part in zip(*parts[name], strict=True))
        print(f"{'':40s} before {before:6.2f} s   in the function {within:.2f} s   home {after:.2f} s")
    ratios, ours = [], []
    for name, taken in times.items():
        if name.startswith("HorovodRunner"):
            ours.append(statistics.median(taken))
            continue
        ratios += [own / statistics.median(taken) for own in ours]
        ours = []
    print("of the peer's time: " + ", ".join(f"{ratio:.3f}" for ratio in ratios), flush=True)


def main(rounds: int) -> None:
    with StandaloneCluster(memory="2g") as cluster:
        with spark_session(cluster.url):
            measure(rounds, local=True)
        settings = {"spark.master": cluster.url, "spark.executor.memory": "512m"}
        with ConnectServer(settings=settings) as server:
            print(f"through Spark Connect ({pyspark.__version__})", flush=True)
            # A separate process, because a process with a classic session cannot open another.
            subprocess.run([sys.executable, __file__, str(rounds), server.url], check=True)


def through_connect(rounds: int, url: str) -> None:
    from pyspark.sql import SparkSession

    session = SparkSession.builder.remote(url).getOrCreate()
    measure(rounds, local=False)
    session.stop()


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    if len(sys.argv) > 2:
        import cloudpickle

        cloudpickle.register_pickle_by_value(sys.modules["__main__"])
        through_connect(rounds, sys.argv[2])
    else:
        main(rounds)
