"""The penguins lab's training with Keras: the same network, rows and rates as `training`, with `horovod.keras`.

The weights start from the torch network of the same shape and are copied back to it, so that the rest of the lab is the
same.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import hora.torch as hvd
from hora.labs.penguins.data import FEATURES, Penguins
from hora.labs.penguins.training import BATCH_SIZE, LEARNING_RATE, SEED, PenguinRun, finished
from hora.workflow import History, seed_everything
from hora.workflow.architectures import MLP


def train(data: Penguins, *, epochs: int = 50, model_path: str | None = None) -> PenguinRun:
    """Train the 5-10-10-3 network on this rank's share of the rows; rank 0 saves it."""
    import keras

    import horovod.keras as hvd_keras

    hvd.init()
    keras.utils.set_random_seed(SEED)
    seed_everything(SEED)
    sizes = [len(FEATURES), 10, 10, len(data.species)]
    dense = [keras.layers.Dense(size, activation="relu") for size in sizes[1:-1]]
    model = keras.Sequential([keras.layers.Input((sizes[0],)), *dense, keras.layers.Dense(sizes[-1])])
    network = MLP(sizes)
    pairs: list[tuple[Any, Any]] = list(zip(network.layers, model.layers, strict=True))
    for ours, theirs in pairs:
        theirs.set_weights([ours.weight.T.detach().numpy(), ours.bias.detach().numpy()])
    mine = slice(hvd.rank(), len(data.train) // hvd.size() * hvd.size(), hvd.size())
    features, labels = data.train.features[mine], data.train.labels[mine]
    rate = LEARNING_RATE * hvd.size()
    steps = max(1, -(-len(labels) // BATCH_SIZE)) * epochs
    model.compile(
        optimizer=hvd_keras.DistributedOptimizer(
            keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(rate, steps))
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = History()
    model.fit(
        features,
        labels,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        verbose=0,
        validation_data=(data.test.features, data.test.labels),
        callbacks=[
            hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd_keras.callbacks.MetricAverageCallback(),
            _recorder(keras, history, hvd.rank() == 0),
        ],
    )
    with torch.no_grad():
        for ours, theirs in pairs:
            kernel, bias = theirs.get_weights()
            ours.weight.copy_(torch.tensor(kernel.T))
            ours.bias.copy_(torch.tensor(bias))
    return finished(network, data, history, model_path)


def _recorder(keras: Any, history: History, progress: bool) -> Any:
    """Return a callback that records an epoch's values in the lab's history."""
    began = 0.0

    def begin(epoch: int, logs: Any) -> None:
        nonlocal began
        began = time.perf_counter()

    def end(epoch: int, logs: Any) -> None:
        record = {
            f"{ours}_{name}": float(logs[f"{theirs}{name}"])
            for ours, theirs in (("train", ""), ("valid", "val_"))
            for name in ("loss", "accuracy")
        }
        history.append({"epoch": epoch + 1, **record, "seconds": time.perf_counter() - began})
        if progress and (epoch + 1) % 10 == 0:
            figures = f"loss {record['train_loss']:.3f}, accuracy {record['valid_accuracy']:.1%}"
            print(f"epoch {epoch + 1}: {figures}", flush=True)

    return keras.callbacks.LambdaCallback(on_epoch_begin=begin, on_epoch_end=end)
