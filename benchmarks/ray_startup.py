"""Start-up side by side with Ray Train, interleaved in one run, and recovery: `python benchmarks/ray_startup.py
[rounds]`.

Each contender starts two workers that initialise, allreduce one tensor and return, on a cluster of two nodes on this
machine. One round of everything runs before the clock does. Then an elastic job loses a worker: from its death to the
survivors' next step. Prints medians and the ratio. Needs `ray[train]`.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "integration"))

from ray_cluster import RayCluster

from horovod.ray import ElasticRayExecutor, RayExecutor
from horovod.runner.elastic.discovery import FixedHosts


def hora_main() -> float:
    import torch

    import horovod.torch as hvd

    hvd.init()
    return float(hvd.allreduce(torch.ones(1024), op=hvd.Sum)[0])


def with_hora() -> None:
    with RayExecutor(RayExecutor.create_settings(), num_workers=2) as executor:
        executor.start()
        assert executor.run(hora_main) == [2.0, 2.0]


def torch_main() -> None:
    import torch
    import torch.distributed as dist
    from ray import train

    tensor = torch.ones(1024)
    dist.all_reduce(tensor)
    assert tensor[0] == 2.0
    train.report({"value": 2.0})


def with_ray_train() -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as folder:
        scaling = ScalingConfig(num_workers=2, use_gpu=False)
        TorchTrainer(torch_main, scaling_config=scaling, run_config=RunConfig(storage_path=folder)).fit()


def steps(folder: str) -> None:
    import horovod.torch as hvd
    from horovod.ray import ray_logger

    hvd.init()
    state = hvd.elastic.TorchState(step=0)

    @hvd.elastic.run
    def loop(state) -> None:
        while not hvd.broadcast_object(os.path.exists(f"{folder}/over"), root_rank=0):
            state.step += 1
            ray_logger.log({"step": state.step, "at": time.time(), "pid": os.getpid(), "size": hvd.size()})
            state.commit()

    loop(state)


def recovery_s() -> float:
    """Seconds from the death of one of three workers to the next step of the others."""
    settings = ElasticRayExecutor.create_settings(min_num_proc=1, max_num_proc=3)
    settings.discovery = FixedHosts({"host-1": 2, "host-2": 1})
    executor = ElasticRayExecutor(settings, override_discovery=False)
    died: list[float] = []
    again: list[float] = []
    with tempfile.TemporaryDirectory() as folder:

        def watch(entry: dict) -> None:
            if not died and entry["step"] > 20 and entry["size"] == 3:
                died.append(time.time())
                os.kill(entry["pid"], signal.SIGKILL)
            elif died and not again and entry["size"] == 2:
                again.append(entry["at"])
                Path(folder, "over").touch()

        executor.start()
        executor.run(lambda: steps(folder), callbacks=[watch])
    return again[0] - died[0]


def main(rounds: int) -> None:
    contenders = {"RayExecutor(num_workers=2)": with_hora, "TorchTrainer(num_workers=2)": with_ray_train}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with RayCluster():
        for number in range(rounds + 1):
            for name, call in contenders.items():
                began = time.perf_counter()
                call()
                if number:
                    times[name].append(time.perf_counter() - began)
        lost = [recovery_s() for _ in range(rounds)]
    for name, taken in times.items():
        print(f"{name:30} {statistics.median(taken):6.2f} s   ({min(taken):.2f} to {max(taken):.2f})")
    ours, peers = times.values()
    print(f"TorchTrainer / RayExecutor     {statistics.median(b / a for a, b in zip(ours, peers, strict=True)):6.2f}")
    print(f"from a death to the next step  {statistics.median(lost):6.2f} s   ({min(lost):.2f} to {max(lost):.2f})")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
