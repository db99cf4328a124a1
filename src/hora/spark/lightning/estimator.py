"""`TorchEstimator` for LightningModules. Users import it from `horovod.spark.lightning`.

The path from data to a model is that of all estimators (`hora.spark.estimator.base`); `training` trains.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hora.config import trusts_files
from hora.requirements import require
from hora.spark.estimator.base import HorovodEstimator
from hora.spark.estimator.packing import TrainingResult, pack_model, unpack_model
from hora.spark.estimator.params import check_torch_values
from hora.spark.estimator.persistence import load_checkpoint
from hora.spark.estimator.torch_model import TorchModel as _TorchModel
from hora.spark.estimator.training import losses_of
from hora.spark.lightning.module import to_lightning_module
from hora.spark.lightning.package import default_package, package_of
from hora.spark.lightning.training import train

_HYPERPARAMETERS = (
    "hparams_name",
    "hparams_type",
    "hyper_parameters",
    "datamodule_hparams_name",
    "datamodule_hparams_type",
    "datamodule_hyper_parameters",
)  # their keys in Lightning's checkpoints
_OWN: dict[str, tuple[Any, str]] = {
    "trainer_args": (None, "arguments of Trainer; they override the estimator's"),
    "num_gpus": (None, "GPUs per process; by default 1 if there are any; 0 for none"),
    "logger": (None, "a Lightning logger; TensorBoard in the run's logs unless given"),
    "log_every_n_steps": (50, "steps between two entries of the logger"),
    "loader_num_epochs": (None, "passes of the reader; unlimited unless given"),
    "terminate_on_nan": (False, "stop when the loss is not finite"),
    "profiler": (None, "a Lightning profiler, or its name"),
    "debug_data_loader": (False, "ignored: readers print nothing"),
    "train_async_data_loader_queue_size": (None, "for data modules that have such a queue"),
    "val_async_data_loader_queue_size": (None, "for data modules that have such a queue"),
}


class TorchModel(_TorchModel):
    """A trained model. `getHistory()` is what was logged at the end; `getEpochs()` has a dict per epoch."""

    def getEpochs(self) -> list[dict[str, Any]]:  # noqa: N802 - as its kin
        return list((self.getOrDefault("_metadata") or {}).get("epochs", ()))


# Lightning accumulates gradients itself (`trainer_args={"accumulate_grad_batches": 4}`).
class TorchEstimator(HorovodEstimator, own=_OWN, unlisted=("backward_passes_per_step",)):
    """Fits a LightningModule, or a plain module with optimizer and loss, on a DataFrame. Keywords: those of `table`."""

    validates_on_all_ranks = True
    model_class = TorchModel
    train = staticmethod(train)

    def _check_values(self, values: Mapping[str, Any]) -> None:
        super()._check_values(values)
        package = package_of(values["model"])
        require("lightning", str((package or default_package()).__version__))
        if package is None:
            check_torch_values(values)
            if values["loss_weights"]:
                warnings.warn("loss_weights is deprecated: weigh in the loss", DeprecationWarning, stacklevel=3)
        for name in ("optimizer", "loss", "loss_constructors", "loss_weights") if package else ():
            if values[name]:
                raise ValueError(f"{name} cannot be used with a LightningModule, which has its own")
        for name in ("train_async_data_loader_queue_size", "val_async_data_loader_queue_size"):
            if values[name] is not None and (
                isinstance(values[name], bool) or not isinstance(values[name], int | float)
            ):
                raise RuntimeError(f"{name} must be a number of batches or a share of the steps, not {values[name]!r}")
        for name in ("train_minibatch_fn", "gradient_compression", "metrics"):
            if values[name]:
                raise ValueError(f"{name} has no meaning for Lightning: the module's own steps and logs do that")

    def _pack(self, values: dict[str, Any], features: Sequence[str]) -> dict[str, Any]:
        package, model = package_of(values["model"]), values["model"]
        if package is None:
            model = to_lightning_module(
                model,
                values["optimizer"],
                losses_of(values),
                values["loss_weights"],
                features,
                values["label_cols"],
                values["sample_weight_col"],
                values["validation"],
            )
        own = dict.fromkeys(("optimizer", "loss", "loss_constructors"))
        return {"model": pack_model(model), "package": package or default_package(), "values": own}

    def _load_checkpoint(self, run_id: str) -> bytes | None:
        """Return the run's Lightning checkpoint, rewritten from its data: ranks unpickle nothing from the store.

        Hyperparameters are for `load_from_checkpoint` and may contain code: a resumed run omits them.
        """
        found = self._read_checkpoint(run_id)
        if found is None or trusts_files():
            return found
        written = io.BytesIO()
        torch.save(load_checkpoint(found, what=f"the checkpoint of run {run_id}", without=_HYPERPARAMETERS), written)
        return written.getvalue()

    def _create_model(self, run_results: Sequence[Any], run_id: str, metadata: dict[str, Any]) -> Any:
        result: TrainingResult = run_results[0]
        given = self.getOrDefault("model")
        plain = package_of(given) is None
        model: torch.nn.Module = unpack_model(pack_model(given))  # the user's module stays unchanged
        prefix = "_model." if plain else ""
        model.load_state_dict({name.removeprefix(prefix): value for name, value in result.model.items()})
        optimizer = self.getOrDefault("optimizer")
        metadata = metadata | {"epochs": result.history}
        return self.get_model_class()(
            **self._get_model_kwargs(model.eval(), result.logged_metrics, optimizer, run_id, metadata)
        )
