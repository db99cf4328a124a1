"""Time TensorFlow's training steps on two ranks: `python -m benchmarks.tensorflow [--rounds 3] [--model mlp]`.

Contenders, in turns, with one thread per rank: two processes without communication, `horovod.tensorflow`, and
`tf.distribute.MultiWorkerMirroredStrategy` with its collectives over gRPC. Then the MLP in Keras 3 on its torch backend
beside plain torch, each with its `DistributedOptimizer`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODELS = {"tiny": 200, "mlp": 20, "convolutional": 30}
CONTENDERS = ("alone", "horovod", "strategy")
ON_TORCH = ("torch", "keras_on_torch")
LIMIT_S = 300


def build(tf, name):
    """Return a model and a batch for it."""
    import numpy as np

    rng, layers = np.random.default_rng(0), tf.keras.layers
    if name == "tiny":
        body, shape, classes = [layers.Dense(10, "relu"), layers.Dense(10, "relu")], (5,), 3
    elif name == "mlp":
        body, shape, classes = [layers.Dense(2048, "relu") for _ in range(3)], (2048,), 2048
    else:
        stages = [layers.Conv2D(width, 3, 2, activation="relu", padding="same") for width in (32, 64, 128)]
        body, shape, classes = [*stages, layers.Flatten()], (32, 32, 3), 10
    model = tf.keras.Sequential([layers.Input(shape), *body, layers.Dense(classes)])
    x = rng.normal(size=(32, *shape)).astype("float32")
    return model, tf.constant(x), tf.constant(rng.integers(0, classes, 32))


def worker(contender: str, name: str) -> None:
    """Train on this rank; rank 0 prints the median milliseconds of a step."""
    import contextlib

    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    scope, run, first = contextlib.nullcontext(), None, True
    if contender == "strategy":
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        scope, run = strategy.scope(), strategy.run
        first = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0
    else:
        import horovod.tensorflow as hvd

        hvd.init()
        first = hvd.rank() == 0
    with scope:
        model, x, y = build(tf, name)
        optimizer = tf.keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer.build(model.trainable_variables)
    loss_of = tf.nn.sparse_softmax_cross_entropy_with_logits

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of(y, model(x, training=True)))
        if contender == "horovod":
            tape = hvd.DistributedGradientTape(tape)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    report(tf.function(step if run is None else lambda: run(step)), MODELS[name], first)


def report(step, num_steps: int, first: bool) -> None:
    """Time steps; rank 0 prints their median."""
    times = []
    for _ in range(num_steps + 5):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    if first:
        print(f"ms {statistics.median(times[5:]) * 1e3}", flush=True)


def worker_on_torch(contender: str) -> None:
    """Train the MLP on torch tensors, with a plain torch loop or with Keras."""
    import torch
    from torch import nn

    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    x, y = torch.randn(32, 2048), torch.randint(0, 2048, (32,))
    loss_of = nn.CrossEntropyLoss()
    if contender == "torch":
        body = [part for _ in range(3) for part in (nn.Linear(2048, 2048), nn.ReLU())]
        model = nn.Sequential(*body, nn.Linear(2048, 2048))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))

        def step():
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()

    else:
        import keras

        import horovod.keras

        layers = keras.layers
        body = [layers.Dense(2048, "relu") for _ in range(3)]
        model = keras.Sequential([layers.Input((2048,)), *body, layers.Dense(2048)])
        optimizer = horovod.keras.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9))

        def step():
            model.zero_grad()
            loss_of(model(x), y).backward()
            with torch.no_grad():
                optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)

    report(step, MODELS["mlp"], hvd.rank() == 0)


def measure(contender: str, name: str) -> float:
    """Return the milliseconds of a step, on two ranks."""
    command = [sys.executable, "-m", "benchmarks.tensorflow", "--worker", contender, "--model", name]
    env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    if contender in ON_TORCH:
        env["KERAS_BACKEND"] = "torch"
    if contender != "strategy":
        launcher = str(Path(sys.executable).parent / "horovodrun")
        done = subprocess.run(
            [launcher, "-np", "2", *command],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
        return _number(done.stdout)
    with socket.socket() as a, socket.socket() as b:
        ports = []
        for one in (a, b):
            one.bind(("127.0.0.1", 0))
            ports.append(one.getsockname()[1])
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    workers = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=env | {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for index in (0, 1)
    ]
    try:
        return _number(workers[0].communicate(timeout=LIMIT_S)[0])
    finally:
        for one in workers:
            one.kill()
            one.wait()


def _number(text: str) -> float:
    return float(text.rpartition("ms ")[2].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--worker", choices=CONTENDERS + ON_TORCH, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker in ON_TORCH:
        worker_on_torch(options.worker)
        return
    if options.worker:
        worker(options.worker, options.model)
        return
    for name in [options.model] if options.model else MODELS:
        compare(name, name, CONTENDERS, options.rounds, ("strategy", "horovod"))
        if name == "mlp":
            compare("mlp on torch", name, ON_TORCH, options.rounds, ON_TORCH)


def compare(title: str, name: str, contenders: tuple[str, ...], rounds: int, ratio_of: tuple[str, str]) -> None:
    """Measure the contenders in turns; print the medians and their ratio."""
    found: dict[str, list[float]] = {contender: [] for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            found[contender].append(measure(contender, name))
    theirs, ours = ratio_of
    ratio = statistics.median(a / b for a, b in zip(found[theirs], found[ours], strict=True))
    ms = ", ".join(f"{contender} {statistics.median(values):.2f} ms" for contender, values in found.items())
    print(f"{title}: {ms}; time of {theirs} / {ours} {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
