"""What an estimator runs on every rank: read the rank's rows, train, keep a checkpoint and a log, report from rank 0.

`train` is the whole of it and gets everything in one `Task`. Called through a backend.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import hora.torch as hvd
from hora.data.transformation import Transformation
from hora.spark.estimator.data_module import ParquetDataModule
from hora.spark.estimator.dataset import Dataset
from hora.spark.estimator.model_bytes import Parcel, pack_model
from hora.spark.estimator.step import Batch, Step, split_batch
from hora.spark.estimator.store import RemoteStore, Store

__all__ = ["Outcome", "Task", "train"]


@dataclass(frozen=True)
class Task:
    """Everything that a rank has to know. `values` are the estimator's parameters."""

    parcel: Parcel
    store: Store
    remote: RemoteStore
    dataset: Dataset
    features: tuple[str, ...]
    values: Mapping[str, Any]
    checkpoint: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Outcome:
    """Rank 0's report: the trained model, the optimizer's state, and a dict for each epoch."""

    model: bytes
    optimizer_state: dict[str, Any]
    history: list[dict[str, Any]]
    output_sizes: tuple[int, ...]


def train(task: Task) -> Outcome | None:
    """Train to the end; an Outcome on rank 0, None elsewhere."""
    hvd.init()
    values = task.values
    if values["random_seed"] is not None:
        torch.manual_seed(int(values["random_seed"]))
    device = _device(bool(values["use_gpu"]))
    model, inner = task.parcel.unpack(device)
    history = _resume(task, model, inner)
    for group in inner.param_groups:
        group["lr"] = group["lr"] * hvd.size()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(inner, root_rank=0)
    compression = values["gradient_compression"] or hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        inner,
        named_parameters=model.named_parameters(),
        compression=compression,
        backward_passes_per_step=values["backward_passes_per_step"],
    )
    with _feed(task) as feed, _Record(task, inner) as record:
        step = Step(model, optimizer, values, losses=_losses(task, model, optimizer), device=device)
        batches = _endless(feed.train_data())
        for epoch in range(len(history), values["epochs"]):
            entry: dict[str, Any] = {"epoch": epoch}
            sampler = (next(batches) for _ in range(_num_steps(task, feed)))
            entry["train"] = step.run(_prepared(task, sampler, device), training=True)
            if task.dataset.val_rows:
                entry["validation"] = step.run(_prepared(task, feed.val_data(), device), training=False)
            history.append(entry)
            if hvd.rank() == 0:
                record.keep(model, history)
    if hvd.rank() != 0:
        return None
    for group in inner.param_groups:
        group["lr"] = group["lr"] / hvd.size()
    return Outcome(pack_model(model.cpu().eval()), inner.state_dict(), history, step.output_sizes)


def _device(use_gpu: bool) -> torch.device:
    """This rank's device. RuntimeError unless all ranks have one of the same kind."""
    from hora.launch.spark.environment import assigned_gpus

    device = torch.device("cpu")
    if use_gpu and torch.cuda.is_available():
        gpus = assigned_gpus()
        number = int(gpus[0]) if gpus and gpus[0].isdigit() else hvd.local_rank()
        device = torch.device("cuda", number if number < torch.cuda.device_count() else 0)
        torch.cuda.set_device(device)
    kinds = hvd.allgather_object(device.type)
    if len(set(kinds)) > 1:
        found = ", ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        raise RuntimeError(f"all ranks must train on the same kind of device, but they have {found}; set use_gpu=False")
    return device


def _resume(task: Task, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The history of the run so far; model and optimizer become those of its checkpoint, if there is one."""
    if task.checkpoint is None:
        return []
    state = torch.load(io.BytesIO(task.checkpoint), map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    history = list(state.get("history", ()))  # Horovod's own checkpoints have none
    if task.values["verbose"] and hvd.rank() == 0:
        print(f"resuming {task.remote.run_path} after epoch {len(history)}", flush=True)
    return history


def _losses(task: Task, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    given = task.values["loss"]
    if given is None:
        makers = task.values["loss_constructors"]
        facts = {**task.values, "model": model, "optimizer": optimizer, "feature_cols": list(task.features)}
        given = [maker(**facts) for maker in (makers if isinstance(makers, list | tuple) else [makers])]
    losses = list(given) if isinstance(given, list | tuple) else [given]
    return losses * len(task.values["label_cols"]) if len(losses) == 1 else losses


def _feed(task: Task) -> Any:
    values = task.values
    transform = None
    if values["transformation_fn"] is not None:
        transform = Transformation(
            values["transformation_fn"], values["transformation_edit_fields"], values["transformation_removed_fields"]
        )
    reads_ahead = values["reader_pool_type"] != "dummy"
    extra: dict[str, Any] = {
        "continuous_cols": values["continuous_cols"],
        "categorical_cols": values["categorical_cols"],
    }
    weight = values["sample_weight_col"]
    return (values["data_module"] or ParquetDataModule)(
        train_dir=task.remote.train_data_path,
        val_dir=task.remote.val_data_path,
        num_train_epochs=values["epochs"],
        has_val=task.dataset.val_rows > 0,
        train_batch_size=values["batch_size"],
        val_batch_size=values["val_batch_size"] or values["batch_size"],
        shuffle=values["shuffle"],
        transform_fn=transform,
        inmemory_cache_all=values["inmemory_cache_all"],
        cur_shard=hvd.rank(),
        shard_count=hvd.size(),
        schema_fields=[*task.features, *values["label_cols"], *([weight] if weight else [])],
        storage_options=task.store.storage_options,
        steps_per_epoch_train=values["train_steps_per_epoch"],
        steps_per_epoch_val=values["validation_steps_per_epoch"],
        verbose=values["verbose"],
        train_reader_worker_count=values["train_reader_num_workers"] if reads_ahead else 0,
        val_reader_worker_count=values["val_reader_num_workers"] if reads_ahead else 0,
        random_seed=None if values["random_seed"] is None else values["random_seed"] + hvd.rank(),
        **extra,
    )


def _num_steps(task: Task, feed: Any) -> int:
    """Batches of an epoch, the same number on every rank."""
    if task.values["train_steps_per_epoch"]:
        return int(task.values["train_steps_per_epoch"])
    if isinstance(feed, ParquetDataModule):
        return feed.train_steps
    return max(1, task.dataset.train_rows // (task.values["batch_size"] * hvd.size()))


def _endless(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise RuntimeError(f"the data module gave rank {hvd.rank()} no batch to train on")


def _prepared(task: Task, batches: Iterable[Any], device: torch.device) -> Iterator[Batch]:
    values = task.values
    for batch in batches:
        yield split_batch(
            batch,
            features=task.features,
            labels=values["label_cols"],
            weight=values["sample_weight_col"],
            input_shapes=values["input_shapes"],
            label_shapes=values["label_shapes"],
            device=device,
        )


class _Record:
    """What rank 0 keeps of a run in the store: the checkpoint, and scalars for TensorBoard. Nothing if runs are not saved."""

    def __init__(self, task: Task, optimizer: torch.optim.Optimizer) -> None:
        self._task, self._optimizer = task, optimizer
        self._stack = contextlib.ExitStack()
        self._folder = ""
        self._writer: Any = None

    def __enter__(self) -> _Record:
        if self._task.remote.saving_runs and hvd.rank() == 0:
            self._folder = self._stack.enter_context(self._task.remote.get_local_output_dir())
            with contextlib.suppress(ImportError):  # tensorboard is optional
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(os.path.join(self._folder, self._task.remote.logs_subdir))
                self._stack.callback(self._writer.close)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def keep(self, model: torch.nn.Module, history: Sequence[Mapping[str, Any]]) -> None:
        last = history[-1]
        if self._task.values["verbose"]:
            parts = [f"{part} loss {last[part]['loss']:.4f}" for part in ("train", "validation") if part in last]
            print(f"epoch {last['epoch'] + 1}/{self._task.values['epochs']}: {', '.join(parts)}", flush=True)
        if not self._folder:
            return
        if self._writer is not None:
            for part, tag in (("train", "train"), ("validation", "val")):
                for name, value in _scalars(last.get(part, {})):
                    self._writer.add_scalar(f"{tag}/{name}", value, last["epoch"])
            self._writer.flush()
        state = self._optimizer.state_dict()
        for group in state["param_groups"]:
            group["lr"] = group["lr"] / hvd.size()
        whole = {"model": model.state_dict(), "optimizer": state, "epoch": last["epoch"], "history": list(history)}
        torch.save(whole, os.path.join(self._folder, self._task.remote.checkpoint_filename))
        self._task.remote.sync(self._folder)


def _scalars(part: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    if "loss" in part:
        yield "loss", part["loss"]
    for group in part.get("all_metrics", ()):
        yield from group.items()
