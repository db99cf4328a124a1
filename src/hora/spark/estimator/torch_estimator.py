"""`TorchEstimator`: fit a torch model on a Spark DataFrame, on several processes.

`base` has the path from data to a model, `training` the training itself. Users import it from `horovod.spark.torch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hora.spark.estimator.base import HorovodEstimator
from hora.spark.estimator.packing import ModelAndOptimizer, TrainingResult
from hora.spark.estimator.params import check_torch_values
from hora.spark.estimator.persistence import load_checkpoint
from hora.spark.estimator.torch_model import TorchModel
from hora.spark.estimator.training import train


class TorchEstimator(HorovodEstimator):
    """Fits a torch model on a DataFrame. The keywords are the parameters of `hora.spark.estimator.params.ESTIMATOR`."""

    model_class = TorchModel
    train = staticmethod(train)

    def _check_values(self, values: Mapping[str, Any]) -> None:
        super()._check_values(values)
        check_torch_values(values)
        if values["callbacks"]:
            raise ValueError(
                "callbacks are not supported for a plain module: use "
                "horovod.spark.lightning.TorchEstimator, or train_minibatch_fn"
            )

    def _pack(self, values: dict[str, Any], features: Sequence[str]) -> dict[str, Any]:
        return {"model": ModelAndOptimizer.of(values["model"], values["optimizer"]), "values": {"optimizer": None}}

    def _load_checkpoint(self, run_id: str) -> dict[str, Any] | None:
        """Return the state of model and optimizer and the history to resume from; None for a new run."""
        found = self._read_checkpoint(run_id)
        return None if found is None else load_checkpoint(found, what=f"the checkpoint of run {run_id}")

    def _create_model(self, run_results: Sequence[Any], run_id: str, metadata: dict[str, Any]) -> Any:
        result: TrainingResult = run_results[0]
        model, optimizer = result.model.unpack()
        metadata = metadata | {"output_sizes": list(result.output_sizes)}
        return self.get_model_class()(**self._get_model_kwargs(model, result.history, optimizer, run_id, metadata))
