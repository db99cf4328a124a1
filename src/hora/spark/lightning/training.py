"""Training on one rank of a Lightning estimator (`train`): a `Trainer` on the rank's rows, checkpoints, a report."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

import hora.torch as hvd
from hora.safe_load import load_torch
from hora.spark.estimator.packing import RankSpec, TrainingResult, unpack_model
from hora.spark.estimator.training import join, rank_device, rank_seed, reader_arguments
from hora.spark.lightning.data_module import parquet_data_module
from hora.spark.lightning.module import modern, old_hooks
from hora.spark.lightning.strategy import horovod_strategy
from hora.telemetry.report import outbox

# Arguments of `Trainer` before Lightning 2: their successors, each with its value; and those without one.
_RENAMED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "replace_sampler_ddp": ("use_distributed_sampler", bool),
    "progress_bar_refresh_rate": ("enable_progress_bar", bool),
    "checkpoint_callback": ("enable_checkpointing", bool),
    "weights_summary": ("enable_model_summary", lambda value: value is not None),
    "reload_dataloaders_every_epoch": ("reload_dataloaders_every_n_epochs", int),
}
_REMOVED = ("gpus", "num_processes", "flush_logs_every_n_steps", "resume_from_checkpoint", "log_gpu_memory",
            "weights_save_path", "prepare_data_per_node", "process_position")  # fmt: skip

_STRATEGY = ("accelerator", "strategy", "distributed_backend")  # arguments that have named "horovod" over the years


def train(spec: RankSpec) -> TrainingResult | None:
    """Train to the end; returns a result on rank 0, None elsewhere."""
    values, package = spec.values, spec.package
    join(spec)
    if values["random_seed"] is not None:
        package.seed_everything(int(values["random_seed"]))
    device = rank_device(bool(values["use_gpu"]) and values["num_gpus"] != 0)
    module: Any = modern(unpack_model(spec.model))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(spec.remote.get_local_output_dir())
        keeper = _made(package, _RunKeeper)(spec, folder)
        trainer = _trainer(spec, folder, device, keeper)
        trainer.fit(module, datamodule=_data_module(spec), **_resume(spec, folder, trainer))
        keeper.sync()
        if hvd.rank() != 0:
            return None
        state = _best(folder, keeper.users_checkpoint) or module.state_dict()
        logged = {name: torch.as_tensor(value).detach().cpu() for name, value in trainer.logged_metrics.items()}
        cpu = {name: tensor.detach().cpu() for name, tensor in state.items()}
        return TrainingResult(cpu, keeper.history, logged_metrics=logged)


def _trainer(spec: RankSpec, folder: str, device: torch.device, keeper: Any) -> Any:
    values, package = spec.values, spec.package
    users = list(values["callbacks"] or ())
    callbacks = [*users, *old_hooks(package, users), keeper]  # a copy: the estimator's list stays unchanged
    kinds = package.callbacks
    found = keeper.users_checkpoint = next((one for one in callbacks if isinstance(one, kinds.ModelCheckpoint)), None)
    if found is not None:  # it writes to the run's folder, under the store's name, as in Horovod
        found.dirpath, found.filename = folder, spec.remote.checkpoint_filename
    # A progress bar of the user is quiet on other ranks by itself.
    own_bar = any(isinstance(callback, kinds.ProgressBar) for callback in callbacks)
    own = translated(package, values["trainer_args"] or {})
    callbacks += own.pop("callbacks", None) or []
    if values["terminate_on_nan"]:
        callbacks.append(_made(package, _StopOnNan)())
    arguments: dict[str, Any] = {
        "strategy": horovod_strategy(package)(new_data=lambda: _data_module(spec)),
        "accelerator": "gpu" if device.type == "cuda" else "cpu",
        "devices": 1 if device.type == "cpu" else [device.index or 0],
        "max_epochs": values["epochs"],
        "callbacks": callbacks,
        "logger": _logger(spec, folder),  # on every rank, for callbacks that need one: it writes only on rank 0
        "log_every_n_steps": values["log_every_n_steps"],
        "enable_progress_bar": own_bar or (values["verbose"] >= 2 and hvd.rank() == 0),
        "enable_model_summary": values["verbose"] >= 2 and hvd.rank() == 0,
        "enable_checkpointing": any(isinstance(callback, kinds.Checkpoint) for callback in callbacks),
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,  # the rows are sharded already
        "default_root_dir": folder,
        "profiler": values["profiler"],
    }
    return package.Trainer(**arguments | own)


def translated(package: ModuleType, given: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a user's arguments of `Trainer` from before Lightning 2 to their current names, with a warning."""
    found: dict[str, Any] = {}
    callbacks = list(given.get("callbacks") or ())
    for name, value in given.items():
        if name in _CALLBACKS:
            callbacks += [_made(package, *_CALLBACKS[name])()] if value else []
            _warn_of_removed(name, "add its callback to `callbacks`")
        elif name in _RENAMED:
            instead, convert = _RENAMED[name]
            _warn_of_removed(name, f"use {instead}")
            found[instead] = convert(value)
        elif name in _REMOVED:
            _warn_of_removed(name, "it is not needed here")
        elif name != "callbacks" and not (name in _STRATEGY and value == "horovod"):
            found[name] = value
    return found | ({"callbacks": callbacks} if callbacks else {})


def _warn_of_removed(name: str, advice: str) -> None:
    warnings.warn(f"trainer_args: {name} was removed in Lightning 2.0; {advice}", DeprecationWarning, stacklevel=3)


def _logger(spec: RankSpec, folder: str) -> Any:
    """Return the user's logger, else one that writes to the run's folder.

    As in Lightning, that is TensorBoard's if it is installed and the run is saved.
    """
    given = spec.values["logger"]
    if given is not None:
        return given
    kept = spec.remote.saving_runs and importlib.util.find_spec("tensorboard") is not None
    kind = "TensorBoardLogger" if kept else "CSVLogger"
    return getattr(spec.package.loggers, kind)(folder, name=spec.remote.logs_subdir, version="")


def _data_module(spec: RankSpec) -> Any:
    values, shared = spec.values, reader_arguments(spec)
    # A transformation may make columns that the data lacks.
    shared["schema_fields"] = [name for name in shared["schema_fields"] if name in spec.dataset.columns]
    return (values["data_module"] or parquet_data_module(spec.package))(
        **shared,
        num_reader_epochs=values["loader_num_epochs"],
        reader_pool_type=values["reader_pool_type"],
        reader_worker_count=values["train_reader_num_workers"],
        transformation=values["transformation_fn"],
        transformation_edit_fields=values["transformation_edit_fields"],
        transformation_removed_fields=values["transformation_removed_fields"],
        verbose=bool(values["verbose"]),
        debug_data_loader=values["debug_data_loader"],
        train_async_data_loader_queue_size=values["train_async_data_loader_queue_size"],
        val_async_data_loader_queue_size=values["val_async_data_loader_queue_size"],
        seed=rank_seed(spec),
    )


def _resume(spec: RankSpec, folder: str, trainer: Any) -> dict[str, Any]:
    """Return arguments of `fit` that resume the run: weights, optimizers, schedulers, epoch, callbacks."""
    if spec.checkpoint is None:
        return {}
    path = os.path.join(folder, ".resume.ckpt")
    with open(path, "wb") as file:
        file.write(spec.checkpoint)
    if spec.values["verbose"] and hvd.rank() == 0:
        print(f"resuming {spec.remote.run_path}", flush=True)
    # The driver wrote these bytes (or the user trusts them) and sent them over the job's own connection.
    own_file = {"weights_only": False} if "weights_only" in inspect.signature(trainer.fit).parameters else {}
    return {"ckpt_path": path, **own_file}


def _best(folder: str, users_checkpoint: Any) -> dict[str, torch.Tensor] | None:
    """Return the best state according to the user's ModelCheckpoint, if it is in the run's folder."""
    path = os.path.realpath(getattr(users_checkpoint, "best_model_path", "") or "")
    if os.path.dirname(path) != os.path.realpath(folder) or not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        found: dict[str, torch.Tensor] = load_torch(file).value["state_dict"]
    return found


def _made(package: ModuleType, kind: type[Any], base: str = "Callback") -> Callable[..., Any]:
    """Return the constructor of a callback of the package with these methods."""
    return type(kind.__name__, (kind, getattr(package.callbacks, base)), {})


class _RunKeeper:
    """Callback that records and prints an entry per epoch; rank 0 copies a checkpoint to the store."""

    def __init__(self, spec: RankSpec, folder: str) -> None:
        self._spec, self._folder = spec, folder
        self.history: list[dict[str, Any]] = []
        self.users_checkpoint: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = list(state_dict["history"])

    @property
    def state_key(self) -> str:
        return "hora.run"

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set this rank's folder: Lightning gives all ranks the folder of rank 0, which may have changed."""
        if self.users_checkpoint is not None:
            self.users_checkpoint.dirpath = self._folder

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the epoch. Lightning calls this after the epoch's validation and the module's own hook."""
        del self.history[trainer.current_epoch :]  # of an epoch's end that has failed
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.history.append({"epoch": trainer.current_epoch, **metrics})
        outbox.add(metrics, trainer.current_epoch + 1)
        if self._spec.values["verbose"] and hvd.rank() == 0:
            shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            print(f"epoch {trainer.current_epoch + 1}/{self._spec.values['epochs']}: {shown}", flush=True)
        if not self._spec.remote.saving_runs:
            return
        path = os.path.join(self._folder, self._spec.remote.checkpoint_filename)
        trainer.save_checkpoint(path, weights_only=False)  # on all ranks: gathering the state may need all of them
        if hvd.rank() == 0 and self.users_checkpoint is None:
            shutil.copyfile(path, f"{path}.ckpt")
        self.sync()

    def sync(self) -> None:
        """Copy the run's files so far."""
        if self._spec.remote.saving_runs and hvd.rank() == 0:
            self._spec.remote.sync(self._folder)


class _StopOnNan:
    """Callback that raises ValueError if the loss is not finite."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and not bool(torch.isfinite(loss).all()):
            raise ValueError(f"the loss of rank {hvd.rank()} is {loss.item()} in batch {batch_idx} (terminate_on_nan)")


class _Averaging:
    """Lightning 1's `stochastic_weight_avg=True`: averages weights at the optimizer's learning rates."""

    _initialized: bool

    def __init__(self) -> None:
        super().__init__(swa_lrs=1.0)  # type: ignore[call-arg]  # until the optimizer exists

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if not self._initialized:
            self._swa_lrs = [group["lr"] for group in trainer.optimizers[0].param_groups]
        super().on_train_epoch_start(trainer, pl_module)  # type: ignore[misc]


# Arguments of `Trainer` before Lightning 2 that are callbacks now: their methods and Lightning's class.
_CALLBACKS: dict[str, tuple[type[Any], str]] = {
    "stochastic_weight_avg": (_Averaging, "StochasticWeightAveraging"),
    "terminate_on_nan": (_StopOnNan, "Callback"),
}
