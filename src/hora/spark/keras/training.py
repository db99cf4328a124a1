"""Training on one rank of a Keras estimator: `model.fit` on the rank's rows, a checkpoint in the store, a report."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

import hora.torch as hvd
from hora.keras import callbacks as methods
from hora.keras import elastic
from hora.keras.optimizer import DistributedOptimizer
from hora.keras.values import as_numpy, as_torch, optimizer_variables
from hora.safe_load import load_torch
from hora.spark.estimator.packing import RankSpec, TrainingResult
from hora.spark.estimator.training import (
    TrainingPosition,
    endless,
    go_on,
    join,
    minibatches,
    num_steps,
    open_data_module,
    run_folder,
)
from hora.spark.keras.packing import as_inputs, pack_model, unpack, unpack_model

_CPU = torch.device("cpu")


def train(spec: RankSpec) -> TrainingResult | None:
    """Train to the end; returns a result on rank 0, None elsewhere."""
    values = spec.values
    join(spec)
    keras = importlib.import_module(spec.package)
    if values["random_seed"] is not None:
        keras.utils.set_random_seed(int(values["random_seed"]))
    model = unpack_model(spec.package, spec.model, values["custom_objects"])
    optimizer = _compile(spec, keras, model)
    place: Any = TrainingPosition(json.dumps(_resume(spec, model, optimizer)))
    state = functools.partial(elastic.KerasState, model, optimizer)
    place = go_on(place, elastic.run, state, _train_epochs, spec, keras, model)
    if hvd.rank() != 0:
        return None
    sizes = tuple(int(np.prod([extent or 1 for extent in output.shape[1:]])) for output in model.outputs)
    return TrainingResult(pack_model(model), json.loads(place.history), sizes)


def _train_epochs(place: Any, spec: RankSpec, keras: Any, model: Any) -> None:
    """Train the remaining epochs on the current ranks: the rest of one that was interrupted, then the others."""
    _scale_rate(model.optimizer, hvd.size() / place.size)
    place.size = hvd.size()
    done, epochs = len(json.loads(place.history).get("loss", ())), spec.values["epochs"]
    with open_data_module(spec) as data, run_folder(spec) as folder:
        total = num_steps(spec, data)
        first = min(round(place.done * total), total - 1)  # batches of the next epoch that are already done
        while done < epochs:
            until = done + 1 if first else epochs
            keeper = type("Keeper", (_Keeper, keras.callbacks.Callback), {})(spec, folder, place, first, total)
            fitted: dict[str, Any] = {}
            if spec.dataset.val_rows:
                # A generator with a known number of batches per epoch: those of one pass.
                passes = len(list(data.val_data()))
                again = itertools.chain.from_iterable(data.val_data() for _ in itertools.count())
                fitted = {"validation_data": _rows(spec, model, again), "validation_steps": passes}
            model.fit(
                _rows(spec, model, endless(data.train_data())),
                steps_per_epoch=total - first,
                shuffle=False,  # the data module shuffles
                initial_epoch=done,
                epochs=until,
                verbose=spec.values["verbose"] if hvd.rank() == 0 else 0,
                callbacks=_callbacks(spec, keras, folder, keeper),
                **fitted,
            )
            done, first = until, 0


def _compile(spec: RankSpec, keras: Any, model: Any) -> Any:
    """Compile with the user's optimizer, wrapped."""
    values = spec.values
    known = values["custom_objects"]
    inner = keras.optimizers.get(unpack(spec.package, values["optimizer"], known))
    optimizer = DistributedOptimizer(inner, compression=values["gradient_compression"])
    model.compile(
        optimizer=optimizer,
        loss=unpack(spec.package, values["loss"], known),
        loss_weights=values["loss_weights"],
        metrics=unpack(spec.package, values["metrics"] or None, known),
    )
    return optimizer


def _scale_rate(optimizer: Any, factor: float) -> None:
    if hasattr(optimizer.learning_rate, "assign"):
        optimizer.learning_rate.assign(float(optimizer.learning_rate.numpy()) * factor)


def _callbacks(spec: RankSpec, keras: Any, folder: str, keeper: Any) -> list[Any]:
    base = keras.callbacks.Callback
    broadcast = methods.with_base(methods.BroadcastGlobalVariablesCallback, base, __name__)(0)
    average = methods.with_base(methods.MetricAverageCallback, base, __name__)()
    callbacks = [broadcast, average, *(spec.values["callbacks"] or ())]
    checkpoint = spec.values["checkpoint_callback"]
    if checkpoint is not None and hvd.rank() == 0:
        checkpoint.filepath = os.path.join(folder or ".", "best.keras")
        callbacks.append(checkpoint)
    return [*callbacks, keeper]


def _rows(spec: RankSpec, model: Any, batches: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield `(inputs, labels)` or `(inputs, labels, weights)` in the shapes and dtypes of the model's inputs."""
    wanted = len(model.inputs)
    for minibatch in minibatches(spec, batches, _CPU):
        if len(minibatch.inputs) != wanted:
            raise ValueError(f"the model has {wanted} inputs, but there are {len(spec.features)} feature columns")
        inputs = as_inputs(model, [as_numpy(tensor) for tensor in minibatch.inputs])
        labels = [as_numpy(label) for label in minibatch.labels]
        row = (_one_or_all(inputs), _one_or_all(labels))
        yield row if minibatch.weights is None else (*row, as_numpy(minibatch.weights))


def _one_or_all(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


class _Keeper:
    """The last callback: records history, writes a checkpoint to the store after each epoch, and commits."""

    model: Any

    def __init__(self, spec: RankSpec, folder: str, place: Any, first: int, total: int) -> None:
        super().__init__()
        self._spec, self._folder, self._place = spec, folder, place
        self._first, self._total = first, total

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        number = self._first + batch + 1
        if number < self._total:  # the epoch's end follows the last batch, and a part of it cannot be repeated
            self._place.done = number / self._total
            self._place.commit()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        history = json.loads(self._place.history)
        for name, value in (logs or {}).items():
            history.setdefault(name, []).append(float(value))
        self._keep(history)
        self._place.history, self._place.done = json.dumps(history), 0.0
        self._place.commit()

    def _keep(self, history: dict[str, list[float]]) -> None:
        if not self._folder:
            return
        variables = [*self.model.weights, *optimizer_variables(self.model.optimizer)]
        values = [as_torch(np.array(variable.numpy())) for variable in variables]
        path = os.path.join(self._folder, self._spec.remote.checkpoint_filename)
        torch.save({"variables": values, "history": history, "size": hvd.size()}, path)
        self._spec.remote.sync(self._folder)


def _resume(spec: RankSpec, model: Any, optimizer: Any) -> dict[str, list[float]]:
    """Load the checkpoint, if any, into model and optimizer; returns the history of the run so far."""
    if spec.checkpoint is None:
        return {}
    state = load_torch(spec.checkpoint).plain()
    if hasattr(optimizer, "build"):
        optimizer.build(model.trainable_variables)
    for variable, value in zip([*model.weights, *optimizer_variables(optimizer)], state["variables"], strict=False):
        variable.assign(as_numpy(value))
    _scale_rate(optimizer, 1 / state["size"])
    return {name: list(found) for name, found in state["history"].items()}
