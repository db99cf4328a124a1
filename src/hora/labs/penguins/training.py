"""The penguins lab's training: one function for one or many ranks, run by the demo and by HorovodRunner."""

from __future__ import annotations

from dataclasses import dataclass

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


def train(data: Penguins, *, epochs: int = 50, model_path: str | None = None) -> PenguinRun:
    """Train the 5-10-10-3 network on this rank's share of the rows; rank 0 saves it."""
    hvd.init()
    torch.set_num_threads(1)  # 50 neurons: more threads would only wait for one another
    seed_everything(SEED)
    model = MLP([len(FEATURES), 10, 10, len(data.species)])
    history = fit(
        model,
        make_loaders(_dataset(data.train), _dataset(data.test), batch_size=BATCH_SIZE, seed=SEED),
        torch.optim.Adam(model.parameters(), lr=LEARNING_RATE),
        torch.nn.functional.cross_entropy,
        epochs=epochs,
        metrics={"accuracy": accuracy},
        recipe=Recipe(schedule=Schedule(decay="cosine")),  # scaled with the number of ranks, then down to 0
    )
    return finished(model, data, history, model_path)


def finished(model: MLP, data: Penguins, history: History, model_path: str | None) -> PenguinRun:
    """Return a run's result; rank 0 saves the model."""
    run = PenguinRun(history=history, num_ranks=hvd.size(), weights=model.state_dict())
    if model_path is not None and hvd.rank() == 0:
        notes = {"epochs": len(history), "ranks": run.num_ranks, "test accuracy": run.accuracy}
        save(model_path, model, classes=data.species, features=features_of(data), notes=notes)
    return run


def features_of(data: Penguins) -> tuple[Feature, ...]:
    """Describe how an observation in millimetres and grams becomes the network's input."""
    island, *numbers = FEATURES
    return (
        Feature(name=island, categories=data.islands),
        *(Feature(name=name, divisor=DIVISORS.get(name, 1.0)) for name in numbers),
    )


def _dataset(examples: Examples) -> TensorDataset:
    return TensorDataset(torch.from_numpy(examples.features), torch.from_numpy(examples.labels))
