"""The penguins lab's training with Keras: the same network, rows and rates as `training`, with `horovod.keras`.

The weights start from the torch network of the same shape and are copied back to it, so that the rest of the lab is the
same.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

import hora.torch as hvd
from hora.labs.penguins.steps import FEATURES, Penguins
from hora.labs.penguins.training import BATCH_SIZE, LEARNING_RATE, SEED, PenguinRun, features_of
from hora.workflow import History, save, seed_everything
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
    parameters: list[tuple[Any, Any]] = [(layer.weight, layer.bias) for layer in network.layers]
    model.set_weights(
        [value for weight, bias in parameters for value in (weight.T.detach().numpy(), bias.detach().numpy())]
    )
    mine = slice(hvd.rank(), len(data.train) // hvd.size() * hvd.size(), hvd.size())
    features, labels = data.train.features[mine].astype("float32"), data.train.labels[mine]
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
        validation_data=(data.test.features.astype("float32"), data.test.labels),
        callbacks=[
            hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd_keras.callbacks.MetricAverageCallback(),
            _recorder(keras, history, hvd.rank() == 0),
        ],
    )
    trained = iter(model.get_weights())
    with torch.no_grad():
        for weight, bias in parameters:
            weight.copy_(torch.from_numpy(np.array(next(trained)).T.copy()))
            bias.copy_(torch.from_numpy(np.array(next(trained))))
    if model_path is not None and hvd.rank() == 0:
        notes = {"epochs": epochs, "ranks": hvd.size(), "test accuracy": history.last("valid_accuracy")}
        save(model_path, network, classes=data.species, features=features_of(data), notes=notes)
    return PenguinRun(history=history, num_ranks=hvd.size(), weights=network.state_dict())


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
