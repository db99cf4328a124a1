"""The penguins lab's training: one function for one or many ranks, run by the demo and by HorovodRunner.

Keras trains with `horovod.keras`; the result is that of the torch network, so that the rest of the lab is the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import TensorDataset

import hora.torch as hvd
from hora.labs.penguins.data import DIVISORS, FEATURES, Examples, Penguins
from hora.workflow import Feature, History, Recipe, Schedule, accuracy, fit, make_loaders, save, seed_everything
from hora.workflow.architectures import MLP

BATCH_SIZE = 20
LEARNING_RATE = 0.002
SEED = 0


@dataclass(frozen=True, kw_only=True)
class PenguinRun:
    """Result of a training run; only numbers and arrays, so that it can be pickled."""

    history: History
    num_ranks: int
    weights: dict[str, torch.Tensor]

    @property
    def accuracy(self) -> float:
        """Accuracy on the test rows, after the last epoch."""
        return self.history.last("valid_accuracy")


def train(data: Penguins, *, epochs: int = 50, model_path: str | None = None, framework: str = "torch") -> PenguinRun:
    """Train the 5-10-10-3 network on this rank's share of the rows; rank 0 saves it."""
    hvd.init()
    torch.set_num_threads(1)  # 50 neurons: more threads would only wait for one another
    seed_everything(SEED)
    network = MLP([len(FEATURES), 10, 10, len(data.species)])
    history = (_fit_in_keras if framework == "keras" else _fit)(network, data, epochs)
    run = PenguinRun(history=history, num_ranks=hvd.size(), weights=network.state_dict())
    if model_path is not None and hvd.rank() == 0:
        notes = {"epochs": epochs, "ranks": run.num_ranks, "test accuracy": run.accuracy}
        save(model_path, network, classes=data.species, features=features_of(data), notes=notes)
    return run


def _fit(network: MLP, data: Penguins, epochs: int) -> History:
    return fit(
        network,
        make_loaders(_dataset(data.train), _dataset(data.test), batch_size=BATCH_SIZE, seed=SEED),
        torch.optim.Adam(network.parameters(), lr=LEARNING_RATE),
        torch.nn.functional.cross_entropy,
        epochs=epochs,
        metrics={"accuracy": accuracy},
        recipe=Recipe(schedule=Schedule(decay="cosine")),  # scaled with the number of ranks, then down to 0
    )


def _fit_in_keras(network: MLP, data: Penguins, epochs: int) -> History:
    """Train a Keras network with the same weights, rows and rates, and copy its weights back."""
    import keras

    import horovod.keras as hvd_keras

    keras.utils.set_random_seed(SEED)
    sizes = [len(FEATURES), *(layer.out_features for layer in network.layers)]
    dense = [keras.layers.Dense(size, activation="relu") for size in sizes[1:-1]]
    model = keras.Sequential([keras.layers.Input((sizes[0],)), *dense, keras.layers.Dense(sizes[-1])])
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
    return history


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


def features_of(data: Penguins) -> tuple[Feature, ...]:
    """Describe how an observation in millimetres and grams becomes the network's input."""
    island, *numbers = FEATURES
    return (
        Feature(name=island, categories=data.islands),
        *(Feature(name=name, divisor=DIVISORS.get(name, 1.0)) for name in numbers),
    )


def _dataset(examples: Examples) -> TensorDataset:
    return TensorDataset(torch.from_numpy(examples.features), torch.from_numpy(examples.labels))
