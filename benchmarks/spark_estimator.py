"""Compare `TorchEstimator` with a plain Parquet reader: `python benchmarks/spark_estimator.py [rows] [rounds]`.

Both train the same model for an epoch on two processes under `HorovodRunner`, from the same Parquet files of 100
features a row, and then predict all rows. The reader hands whole batches of Arrow to a `DataLoader` without workers,
and does not shuffle. `fit` also copies the DataFrame to its store; `fit_on_parquet` finds it there. Prints the medians
and spread of alternating rounds, microseconds a row, ratios, and the most memory of all Python processes together.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

NUM_FEATURES, BATCH, NUM_PROC, NUM_FILES = 100, 1024, 2, 4


def write_rows(folder: Path, num_rows: int) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir()
    for number in range(NUM_FILES):
        count = num_rows // NUM_FILES
        values = np.random.default_rng(number).standard_normal((count, NUM_FEATURES), dtype=np.float32)
        x = pa.ListArray.from_arrays(np.arange(0, values.size + 1, NUM_FEATURES, dtype=np.int32), values.ravel())
        parquet.write_table(pa.table({"x": x, "y": values.sum(1)}), folder / f"{number}.parquet", row_group_size=65536)


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))


def squared_error(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.reshape(-1), y.reshape(-1))


class PlainReader(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Every second file of a folder, in batches."""

    def __init__(self, folder: str, rank: int) -> None:
        self.files = sorted(Path(folder).glob("*.parquet"))[rank::NUM_PROC]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        from pyarrow import parquet

        for file in self.files:
            for batch in parquet.ParquetFile(file).iter_batches(BATCH):
                x = batch.column("x").flatten().to_numpy().reshape(-1, NUM_FEATURES)
                yield torch.tensor(x), torch.tensor(batch.column("y").to_numpy())


def plain(folder: str, trains: bool) -> float:
    """Train or predict on this rank's files; return the seconds after the start of the processes."""
    import horovod.torch as hvd

    hvd.init()
    model, began = make_model(), time.perf_counter()
    loader = torch.utils.data.DataLoader(PlainReader(folder, hvd.rank()), batch_size=None)
    if not trains:
        with torch.no_grad():
            for x, _ in loader:
                model(x)
        return time.perf_counter() - began
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for x, y in loader:
        optimizer.zero_grad()
        squared_error(model(x), y).backward()
        optimizer.step()
    return time.perf_counter() - began


def discard(frame: Any) -> None:
    """Compute all rows of a DataFrame."""
    frame.write.format("noop").mode("overwrite").save()


class Memory:
    """The most memory that the Python processes below this one have together."""

    def __enter__(self) -> Memory:
        self.most_bytes, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.2):
            self.most_bytes = max(self.most_bytes, sum(self._own_bytes(pid) for pid in _below(os.getpid())))

    def _own_bytes(self, pid: int) -> int:
        try:
            if not Path(f"/proc/{pid}/comm").read_text().startswith(("python", "hora")):
                return 0
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def _below(pid: int) -> list[int]:
    try:
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        children = [int(child) for task in tasks for child in task.read_text().split()]
    except OSError:
        return []
    return [*children, *(one for child in children for one in _below(child))]


def main(num_rows: int, rounds: int) -> None:
    import cloudpickle
    from pyspark.sql import SparkSession

    from horovod.spark.common.store import Store
    from horovod.spark.torch import TorchEstimator
    from sparkdl import HorovodRunner

    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(f"local[{NUM_PROC}]").config("spark.ui.enabled", "false")
    local = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.driver.memory": "3g"}
    for name, value in local.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/data"
        write_rows(Path(data), num_rows)
        frame, model = spark.read.parquet(data), make_model()
        estimator = TorchEstimator(
            num_proc=NUM_PROC, store=Store.create(f"{folder}/store", save_runs=False), model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.001), loss=squared_error,
            feature_cols=["x"], label_cols=["y"], batch_size=BATCH, epochs=1, verbose=0,
        )  # fmt: skip
        trained = estimator.fit(frame.limit(BATCH * NUM_PROC))
        runner = HorovodRunner(np=NUM_PROC)
        ways: dict[str, Callable[[], Any]] = {
            "fit": lambda: estimator.fit(frame),
            "fit_on_parquet": lambda: estimator.fit_on_parquet(dataset_idx=0),
            "plain reader, training": lambda: runner.run(plain, folder=data, trains=True),
            "transform": lambda: discard(trained.transform(frame).select("y__output")),
            "plain reader, predicting": lambda: runner.run(plain, folder=data, trains=False),
        }  # fmt: skip
        measure(ways, num_rows, rounds)
    spark.stop()


def measure(ways: dict[str, Callable[[], Any]], num_rows: int, rounds: int) -> None:
    times: dict[str, list[float]] = {name: [] for name in ways}
    most: dict[str, int] = dict.fromkeys(ways, 0)
    for _ in range(rounds):
        for name, call in ways.items():
            with Memory() as memory:
                began = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - began)
            most[name] = max(most[name], memory.most_bytes)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    for name, taken in times.items():
        spread = f"{min(taken):.2f} … {max(taken):.2f}"
        per_row = medians[name] / num_rows * 1e6
        size = f"{per_row:6.2f} us a row   {most[name] / 2**20:6.0f} MiB"
        print(f"{name:26s} median {medians[name]:7.2f} s   spread {spread}   {size}")
    for name, peer in (("fit", "training"), ("fit_on_parquet", "training"), ("transform", "predicting")):
        print(f"{name}: {medians[name] / medians[f'plain reader, {peer}']:.2f} of the plain reader's time", flush=True)


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    main(arguments[0] if arguments else 1_000_000, arguments[1] if len(arguments) > 1 else 3)
