"""`TorchEstimator`: fit a torch model on a Spark DataFrame, on several processes.

`base` has the path from data to a model, `training` the training itself. Users import it from `horovod.spark.torch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hora.spark.estimator.base import HorovodEstimator
from hora.spark.estimator.dataset import Dataset
from hora.spark.estimator.packing import ModelAndOptimizer
from hora.spark.estimator.params import ESTIMATOR, check_plain_training, check_torch_values, check_values, signature_of
from hora.spark.estimator.persistence import load_checkpoint
from hora.spark.estimator.torch_model import TorchModel
from hora.spark.estimator.training import TrainingResult, TrainingSpec, train

__all__ = ["TorchEstimator"]


class TorchEstimator(HorovodEstimator):
    """Fits a torch model on a DataFrame. The keywords are the parameters of `hora.spark.estimator.params.ESTIMATOR`."""

    __signature__ = signature_of(ESTIMATOR)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.setParams(**kwargs)

    def get_model_class(self) -> type[Any]:
        return TorchModel

    def _check_values(self, values: Mapping[str, Any]) -> None:
        check_values(values)
        check_torch_values(values)
        check_plain_training(values)

    def _training(
        self, values: dict[str, Any], dataset: Dataset, features: Sequence[str], run_id: str
    ) -> tuple[Callable[[Any], Any], Any]:
        store = values["store"]
        spec = TrainingSpec(
            model_and_optimizer=ModelAndOptimizer.of(values["model"], values["optimizer"]),
            store=store,
            remote=store.to_remote(run_id, dataset.index),
            dataset=dataset,
            features=tuple(features),
            # Do not send what the ranks do not need or get otherwise.
            values=values | {"model": None, "optimizer": None, "store": None, "backend": None},
            checkpoint=self._load_checkpoint(run_id),
        )
        return train, spec

    def _load_checkpoint(self, run_id: str) -> dict[str, Any] | None:
        """Return the state of model and optimizer and the history to resume from; None for a new run."""
        found = self._read_checkpoint(run_id)
        if found is None:
            return None
        return load_checkpoint(found, what=f"the checkpoint of run {run_id}")

    def _create_model(self, run_results: Sequence[Any], run_id: str, metadata: dict[str, Any]) -> Any:
        result = run_results[0]
        assert isinstance(result, TrainingResult), "rank 0 returned no result"
        model, optimizer = result.trained.unpack()
        metadata = metadata | {"output_sizes": list(result.output_sizes)}
        return self.get_model_class()(**self._get_model_kwargs(model, result.history, optimizer, run_id, metadata))
