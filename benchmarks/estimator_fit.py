"""Where `TorchEstimator.fit` of a few hundred rows spends its time: `python benchmarks/estimator_fit.py [rounds]`.

A standalone Spark cluster (a master and two workers with one core each), two processes, 200 rows, 10 epochs, a store on
a local disk with runs (checkpoints, TensorBoard). The first `fit` of the session is told apart from the later ones, of
which the medians are shown: `data` is what Spark does to have the rows in the store, `before` passes until rank 0 is in
the training function, `train` in it, and `home` from there until `fit` returns.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "integration"))

import torch
from spark_cluster import StandaloneCluster, spark_session

from hora.spark.estimator import dataset
from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator

Phases = dict[str, float]


class Timed(SparkBackend):
    """Notes when the ranks are asked for, and when rank 0 is in the training function and has left it."""

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, env: Any = None) -> list[Any]:
        self.asked = time.time()

        def timed(*args: Any, **kwargs: Any) -> Any:
            entered = time.time()
            return fn(*args, **kwargs), entered, time.time()

        found = super().run(timed, args, kwargs, env)
        self.entered, self.left = found[0][1:]
        return [value for value, _, _ in found]


@contextlib.contextmanager
def timed_calls(*names: str) -> Iterator[Phases]:
    """How long the calls of these functions of `dataset` take, all together."""
    taken: Phases = dict.fromkeys(names, 0.0)

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.time()
            try:
                return function(*args, **kwargs)
            finally:
                taken[name] += time.time() - began

        return call

    plain = {name: getattr(dataset, name) for name in names}
    for name, function in plain.items():
        setattr(dataset, name, watched(name, function))
    try:
        yield taken
    finally:
        for name, function in plain.items():
            setattr(dataset, name, function)


def fit(frame: Any, folder: str) -> Phases:
    model = torch.nn.Linear(2, 1)
    backend = Timed(2)
    began = time.time()
    with timed_calls("_measured", "_write") as inside:
        TorchEstimator(
            backend=backend,
            store=Store.create(folder),
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=torch.nn.functional.mse_loss,
            feature_cols=["x"],
            label_cols=["y"],
            validation=0.2,
            batch_size=16,
            epochs=10,
            verbose=0,
        ).fit(frame)
    ended = time.time()
    return {
        "all": ended - began,
        "data": backend.asked - began,
        "  rows and shapes": inside["_measured"],
        "  Parquet": inside["_write"],
        "before": backend.entered - backend.asked,
        "train": backend.left - backend.entered,
        "home": ended - backend.left,
    }


def main(rounds: int) -> None:
    with StandaloneCluster(memory="2g") as cluster, spark_session(cluster.url) as spark:
        frame = (
            spark.range(200).selectExpr("rand(1) AS a", "rand(2) AS b").selectExpr("array(a, b) AS x", "2 * a - b AS y")
        )
        seen = []
        for _ in range(rounds + 1):
            with tempfile.TemporaryDirectory() as folder:
                seen.append(fit(frame, folder))
    print(f"{'':20s} {'first':>8s} {'later':>8s}  (s; later: median of {rounds})")
    for name, first in seen[0].items():
        print(f"{name:20s} {first:8.2f} {statistics.median(phases[name] for phases in seen[1:]):8.2f}")


if __name__ == "__main__":
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
