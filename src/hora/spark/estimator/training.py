"""Training on one rank of an estimator: read the rank's rows, train, write a checkpoint and a log, report.

`train` does all of it, configured by a `RankSpec`; a backend calls it.

Steps, validation and averages are those of `hora.workflow`. The epoch loop differs from `fit`'s because an estimator
has other guarantees. The data module's batches are endless and continue across epochs, as do accumulated gradients,
which are summed, not averaged. The user may replace the step. The optimizer's state is broadcast even if it is new.
Each rank keeps its own batch-norm statistics. Checkpoint, log and history have Horovod's format.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

import hora.torch as hvd
from hora.data.shard import Transformation
from hora.spark.estimator.data_module import ParquetDataModule
from hora.spark.estimator.objective import LabelColumns, Minibatch
from hora.spark.estimator.packing import RankSpec, TrainingResult, as_list, pack_model, to_list
from hora.telemetry.report import outbox
from hora.torch.elastic.loop import is_elastic
from hora.workflow.fit import register_handlers
from hora.workflow.history import Tally
from hora.workflow.step import Recipe, Scored, Stepper, score_all


def join(spec: RankSpec) -> None:
    """Initialize this process as a rank."""
    if spec.values["mp_start_method"] is not None:
        torch.multiprocessing.set_start_method(spec.values["mp_start_method"], force=True)
    hvd.init()


@contextlib.contextmanager
def run_folder(spec: RankSpec) -> Iterator[str]:
    """Yield rank 0's folder for the run, to be copied to the store; empty on other ranks and for unsaved runs."""
    if not spec.remote.saving_runs or hvd.rank() != 0:
        yield ""
        return
    with spec.remote.get_local_output_dir() as folder:
        yield folder


def train(spec: RankSpec) -> TrainingResult | None:
    """Train to the end; returns a result on rank 0, None elsewhere."""
    values = spec.values
    join(spec)
    if values["random_seed"] is not None:
        torch.manual_seed(int(values["random_seed"]))
    device = rank_device(bool(values["use_gpu"]))
    model, inner = spec.model.unpack(device)
    place: Any = TrainingPosition(json.dumps(_resume(spec, model, inner)))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(inner, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        inner,
        named_parameters=model.named_parameters(),
        compression=values["gradient_compression"] or hvd.Compression.none,
        backward_passes_per_step=values["backward_passes_per_step"],
    )
    losses = losses_of(values, model=model, optimizer=optimizer, feature_cols=list(spec.features))
    objective = LabelColumns(values, losses, device)
    recipe = Recipe(accumulate=values["backward_passes_per_step"])
    stepper, tally = Stepper(model, optimizer, objective, recipe, device), Tally(objective.names, device)

    def state(**place: Any) -> Any:
        register_handlers()
        return hvd.elastic.TorchState(model, optimizer, per_step=True, tally=tally, **place)

    place = go_on(place, hvd.elastic.run, state, _train_epochs, spec, stepper, tally)
    if hvd.rank() != 0:
        return None
    packed = pack_model(model.cpu().eval())
    trained = replace(spec.model, model=packed, state=_unscaled(optimizer))
    return TrainingResult(trained, json.loads(place.history), objective.output_sizes)


@dataclass
class TrainingPosition:
    """Position in a training: the history of its epochs as JSON, and the finished share of the next one.

    `size`: the factor of the learning rates. In an elastic job the state holds all of it.
    """

    history: str
    done: float = 0.0
    size: int = 1

    def commit(self) -> None:
        """Let ranks join or leave, in an elastic job."""


def go_on(
    place: TrainingPosition,
    run: Callable[..., Any],
    state: Callable[..., Any],
    train: Callable[..., None],
    *arguments: Any,
) -> Any:
    """Train from a position on; returns the last position.

    In an elastic job `state` creates a state that also holds the position, and `run`, the framework's elastic loop,
    calls `train` in every new world.
    """
    if not is_elastic():
        train(place, *arguments)
        return place
    elastic = state(**vars(place))
    run(train)(elastic, *arguments)
    return elastic


def _train_epochs(place: Any, spec: RankSpec, stepper: Stepper, tally: Tally) -> None:
    """Train the remaining epochs on the current ranks."""
    values, device, objective = spec.values, stepper.device, cast(LabelColumns, stepper.objective)
    for group in stepper.optimizer.param_groups:
        group["lr"] *= hvd.size() / place.size
    place.size = hvd.size()
    with open_data_module(spec) as data, _run_files(spec, stepper) as keep:
        batches, numbers = endless(data.train_data()), itertools.count()  # of all backward passes in this world
        while len(history := json.loads(place.history)) < values["epochs"]:
            total = num_steps(spec, data)
            first = round(place.done * total)
            stepper.model.train()
            of_epoch = minibatches(spec, itertools.islice(batches, total - first), device)
            for index, minibatch in enumerate(of_epoch, first):
                if _completes_step(spec, stepper, tally, minibatch, index, next(numbers)):
                    place.done = (index + 1) / total
                    place.commit()
            entry = {"epoch": len(history), "train": objective.entry(tally.averages())}
            if spec.dataset.val_rows:
                scored = minibatches(spec, data.val_data(), device)
                found = score_all(stepper.model, scored, objective, recipe=stepper.recipe, device=device)
                entry["validation"] = objective.entry(found.averages())
            history.append(entry)
            if hvd.rank() == 0:
                keep(history)
            tally.clear()  # not before: the epoch's end may fail and run again
            place.history, place.done = json.dumps(history), 0.0
            place.commit()


def _completes_step(
    spec: RankSpec, stepper: Stepper, tally: Tally, minibatch: Minibatch, index: int, number: int
) -> bool:
    """Train on a minibatch with the user's own step or the workflow's; returns whether that completes a step."""
    passes, own_step = stepper.recipe.accumulate, spec.values["train_minibatch_fn"]
    completes = (number + 1) % passes == 0
    if own_step is None:
        if number % passes == 0:
            stepper.begin()
        stepper.add(minibatch, tally)
        if completes:
            stepper.finish()
        return completes
    objective = cast(LabelColumns, stepper.objective)
    outputs, loss = own_step(
        stepper.model,
        stepper.optimizer,
        objective.fit_labels,
        objective.loss,
        minibatch.inputs,
        minibatch.labels,
        minibatch.weights,
        passes,
        index,
    )
    stepper.report(Scored(*objective.fit_labels(outputs, minibatch.labels), loss, weight=1), tally)
    return completes


def rank_device(use_gpu: bool) -> torch.device:
    """Return this rank's device. Raises RuntimeError unless all ranks have the same kind."""
    device = torch.device("cpu")
    if use_gpu and torch.cuda.is_available():
        from hora.spark.estimator.metadata import gpu_or_local_rank

        number = gpu_or_local_rank(hvd.local_rank())
        device = torch.device("cuda", number if number < torch.cuda.device_count() else 0)
        torch.cuda.set_device(device)
    kinds = hvd.allgather_object(device.type)
    if len(set(kinds)) > 1:
        found = ", ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        raise RuntimeError(f"all ranks must train on the same kind of device, but they have {found}; set use_gpu=False")
    return device


def _resume(spec: RankSpec, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Load the checkpoint, if any, into model and optimizer; returns the history of the run so far."""
    if spec.checkpoint is None:
        return []
    state = spec.checkpoint
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    history = list(state.get("history", ()))  # Horovod's checkpoints have none
    if spec.values["verbose"] and hvd.rank() == 0:
        print(f"resuming {spec.remote.run_path} after epoch {len(history)}", flush=True)
    return history


def losses_of(values: Mapping[str, Any], **known: Any) -> list[Callable[..., Any]]:
    """Return the loss of each label, made here if the parameters have constructors, which get `values` and `known`."""
    given = values["loss"]
    if given is None:
        given = [maker(**{**values, **known}) for maker in as_list(values["loss_constructors"])]
    losses: list[Callable[..., Any]] = to_list(given, len(values["label_cols"]))
    return losses


def reader_arguments(spec: RankSpec) -> dict[str, Any]:
    """Return the arguments that the data modules of torch and Lightning share, for this rank's rows."""
    values = spec.values
    weight = values["sample_weight_col"]
    return {
        "train_dir": spec.remote.train_data_path,
        "val_dir": spec.remote.val_data_path,
        "num_train_epochs": values["epochs"],
        "has_val": spec.dataset.val_rows > 0,
        "train_batch_size": values["batch_size"],
        "val_batch_size": values["val_batch_size"] or values["batch_size"],
        "shuffle": values["shuffle"],
        "inmemory_cache_all": values["inmemory_cache_all"],
        "reader_pool_bytes": values["reader_pool_bytes"],
        "cur_shard": hvd.rank(),
        "shard_count": hvd.size(),
        "schema_fields": [*spec.features, *values["label_cols"], *([weight] if weight else [])],
        "storage_options": spec.store.storage_options,
        "steps_per_epoch_train": values["train_steps_per_epoch"],
        "steps_per_epoch_val": values["validation_steps_per_epoch"],
    }


def rank_seed(spec: RankSpec) -> int | None:
    """Return the seed of this rank's shuffling."""
    seed = spec.values["random_seed"]
    return None if seed is None else seed + hvd.rank()


def open_data_module(spec: RankSpec) -> Any:
    """Return the configured data module for this rank's rows."""
    values = spec.values
    transform = None
    if values["transformation_fn"] is not None:
        transform = Transformation(
            values["transformation_fn"], values["transformation_edit_fields"], values["transformation_removed_fields"]
        )
    reads_ahead = values["reader_pool_type"] != "dummy"
    return (values["data_module"] or ParquetDataModule)(
        **reader_arguments(spec),
        transform_fn=transform,
        verbose=values["verbose"],
        train_reader_worker_count=values["train_reader_num_workers"] if reads_ahead else 0,
        val_reader_worker_count=values["val_reader_num_workers"] if reads_ahead else 0,
        random_seed=rank_seed(spec),
        continuous_cols=values["continuous_cols"],
        categorical_cols=values["categorical_cols"],
    )


def num_steps(spec: RankSpec, data: Any) -> int:
    """Return the batches per epoch, the same number on every rank."""
    if spec.values["train_steps_per_epoch"]:
        return int(spec.values["train_steps_per_epoch"])
    if isinstance(data, ParquetDataModule):
        return data.train_steps
    return max(1, spec.dataset.train_rows // (spec.values["batch_size"] * hvd.size()))


def endless(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches repeatedly."""
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise RuntimeError(f"the data module has no training batch for rank {hvd.rank()}")


def minibatches(spec: RankSpec, batches: Iterable[Any], device: torch.device) -> Iterator[Minibatch]:
    """Convert the batches of a data module: dicts of columns, or `(features, label)`."""
    values = spec.values
    for batch in batches:
        weights = None
        if isinstance(batch, tuple | list):
            given, label = batch
            sources = list(given.values()) if isinstance(given, Mapping) else [given]
            targets = list(label.values()) if isinstance(label, Mapping) else [label]
        else:
            sources, targets = [batch[name] for name in spec.features], [batch[name] for name in values["label_cols"]]
            if values["sample_weight_col"] is not None:
                weights = _tensor(batch[values["sample_weight_col"]], device).float().reshape(-1)
        inputs = _shaped([_tensor(source, device).float() for source in sources], values["input_shapes"])
        labels = [_tensor(target, device) for target in targets]
        labels = [tensor.float() if tensor.is_floating_point() else tensor.long() for tensor in labels]
        yield Minibatch(inputs, _shaped(labels, values["label_shapes"]), weights)


def _tensor(values: Any, device: torch.device) -> torch.Tensor:
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values))
    return tensor.to(device)


def _shaped(tensors: list[torch.Tensor], shapes: Sequence[Sequence[int]] | None) -> list[torch.Tensor]:
    if not shapes:
        return tensors
    return [tensor.reshape(tuple(shape)) for tensor, shape in zip(tensors, shapes, strict=True)]


@contextlib.contextmanager
def _run_files(spec: RankSpec, stepper: Stepper) -> Iterator[Callable[[Sequence[Mapping[str, Any]]], None]]:
    """Yield a function that reports an epoch and, for a saved run, writes checkpoint and scalars to the store."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(run_folder(spec))
        writer: Any = None
        if folder:
            with contextlib.suppress(ImportError):  # tensorboard is optional
                from torch.utils.tensorboard import SummaryWriter

                writer = SummaryWriter(os.path.join(folder, spec.remote.logs_subdir))
                stack.callback(writer.close)

        def keep(history: Sequence[Mapping[str, Any]]) -> None:
            last = history[-1]
            outbox.add(_figures(last), last["epoch"] + 1)
            if spec.values["verbose"]:
                parts = [f"{part} loss {last[part]['loss']:.4f}" for part in ("train", "validation") if part in last]
                print(f"epoch {last['epoch'] + 1}/{spec.values['epochs']}: {', '.join(parts)}", flush=True)
            if not folder:
                return
            if writer is not None:
                for part, tag in (("train", "train"), ("validation", "val")):
                    for group in [{"loss": last[part]["loss"]}, *last[part]["all_metrics"]] if part in last else []:
                        for name, value in group.items():
                            writer.add_scalar(f"{tag}/{name}", value, last["epoch"])
                writer.flush()
            state = {"model": stepper.model.state_dict(), "optimizer": _unscaled(stepper.optimizer)}
            whole = {**state, "epoch": last["epoch"], "history": list(history)}
            torch.save(whole, os.path.join(folder, spec.remote.checkpoint_filename))
            spec.remote.sync(folder)

        yield keep


def _figures(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return an entry of the history as figures of a report."""
    found: dict[str, float] = {}
    for part, prefix in (("train", "train"), ("validation", "valid")):
        if part in entry:
            for group in [{"loss": entry[part]["loss"]}, *entry[part]["all_metrics"]]:
                found |= {f"{prefix}_{name}": value for name, value in group.items()}
    return found


def _unscaled(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state with the learning rates of a single rank."""
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["lr"] = group["lr"] / hvd.size()
    return state
