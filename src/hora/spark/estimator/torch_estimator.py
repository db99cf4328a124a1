"""`TorchEstimator`: fit a torch model on a Spark DataFrame, on several processes. Users import it from `horovod.spark.torch`.

It checks what was asked for, has the data written to the store, runs the training through a backend, and wraps what comes
back in a `TorchModel`. The training itself is in `training`.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLWritable

from hora.spark.estimator.backend import SparkBackend
from hora.spark.estimator.dataset import Column, Dataset, InUse, describe, materialise, open_dataset
from hora.spark.estimator.params import ESTIMATOR, check_columns, check_values, signature_of, with_params
from hora.spark.estimator.persistence import ModelAndOptimizer, ParamsReader, ParamsWriter
from hora.spark.estimator.torch_model import TorchModel
from hora.spark.estimator.training import TrainingResult, TrainingSpec, train

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["TorchEstimator"]

_in_use = InUse()
_naming = threading.Lock()
_named: set[str] = set()


@with_params(ESTIMATOR)
class TorchEstimator(Estimator[TorchModel], MLWritable, MLReadable[Any]):
    """Fits a torch model on a DataFrame. Keywords are the parameters of `hora.spark.estimator.params.ESTIMATOR`."""

    __signature__ = signature_of(ESTIMATOR)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        unknown = sorted(set(kwargs) - set(ESTIMATOR))
        if unknown:
            raise TypeError(f"TorchEstimator has no parameter {', '.join(unknown)}; it has {', '.join(ESTIMATOR)}")
        self._setDefault(**{name: default for name, (default, _) in ESTIMATOR.items()})
        for name, value in kwargs.items():
            if value is not None:
                getattr(self, _setter(name))(value)

    def fit_on_parquet(self, params: Mapping[Any, Any] | None = None, dataset_idx: int | None = None) -> TorchModel:
        """Train on the Parquet data that already lies at the store's train (and, if asked for, validation) path."""
        chosen = self.copy(dict(params)) if params else self
        values = chosen._values()
        check_values(values)
        from pyspark.sql import SparkSession

        spark = SparkSession.builder.getOrCreate()
        dataset = open_dataset(spark, values["store"], dataset_idx, with_validation=bool(values["validation"]))
        return chosen._train(values, dataset)

    def write(self) -> ParamsWriter:
        return ParamsWriter(self)

    @classmethod
    def read(cls) -> ParamsReader:
        return ParamsReader(cls)

    def _fit(self, dataset: DataFrame) -> TorchModel:
        values = self._values()
        check_values(values)
        features = _features(values, dataset.columns)
        weight = values["sample_weight_col"]
        names = list(dict.fromkeys([*features, *values["label_cols"], *([weight] if weight else [])]))
        columns = describe(dataset, names)
        validation = values["validation"]
        if isinstance(validation, str):
            described = describe(dataset, [validation])[validation]
            if described.kind != "scalar":
                raise ValueError(f"the validation column {validation!r} must hold booleans or numbers")
        backend = values["backend"] or SparkBackend(values["num_proc"])
        num_partitions = max(values["partitions_per_process"], 1) * backend.num_processes()

        def make(index: int) -> Dataset:
            return materialise(
                dataset,
                columns,
                values["store"],
                index,
                validation=validation,
                num_partitions=num_partitions,
                seed=values["random_seed"],
            )

        key = (id(dataset), tuple(names), validation, num_partitions)
        with _in_use.borrow(values["store"], key, make) as prepared:
            return self._train(values, prepared)

    def _values(self) -> dict[str, Any]:
        return {name: self.getOrDefault(name) for name in ESTIMATOR}

    def _train(self, values: dict[str, Any], dataset: Dataset) -> TorchModel:
        features = _features(values, list(dataset.columns))
        missing = [name for name in [*features, *values["label_cols"]] if name not in dataset.columns]
        if missing and values["transformation_fn"] is None:
            raise ValueError(f"the data have no column {', '.join(missing)}; they have {', '.join(dataset.columns)}")
        check_columns(values, features, dataset.columns)
        backend = values["backend"] or SparkBackend(values["num_proc"])
        num_proc = backend.num_processes()
        if dataset.train_rows < num_proc:
            raise ValueError(f"{dataset.train_rows} training rows are too few for {num_proc} processes; use fewer")
        store, run_id = values["store"], values["run_id"] or _new_run(values["store"])
        # What the ranks need not have, or get in another way, stays here.
        sent = values | {"model": None, "optimizer": None, "store": None, "backend": None}
        spec = TrainingSpec(
            model_and_optimizer=ModelAndOptimizer.of(values["model"], values["optimizer"]),
            store=store,
            remote=store.to_remote(run_id, dataset.index),
            dataset=dataset,
            features=tuple(features),
            values=sent,
            checkpoint=_checkpoint(store, run_id),
        )
        result = backend.run(train, args=(spec,), kwargs={}, env={})[0]
        assert isinstance(result, TrainingResult), "rank 0 gave no result"
        return _model(values, spec, result, run_id)


def _setter(name: str) -> str:
    return "set" + "".join(part.capitalize() for part in name.split("_"))


def _features(values: Mapping[str, Any], columns: list[str]) -> list[str]:
    """The feature columns: as given, or all that are neither label, weight nor validation mark."""
    if values["feature_cols"]:
        return list(values["feature_cols"])
    others = {*values["label_cols"], values["sample_weight_col"], values["validation"]}
    return [name for name in columns if name not in others]


def _new_run(store: Any) -> str:
    """A name that no run has: trainings that begin in the same second must not resume one another."""
    with _naming:
        second = int(time.time())
        while (name := f"pytorch_{second}") in _named or store.exists(store.get_run_path(name)):
            second += 1
        _named.add(name)
    return name


def _checkpoint(store: Any, run_id: str) -> bytes | None:
    path = store.get_checkpoint_path(run_id)
    return store.read(path) if path is not None and store.exists(path) else None


def _model(values: Mapping[str, Any], spec: TrainingSpec, result: TrainingResult, run_id: str) -> TorchModel:
    trained, optimizer = dataclasses.replace(
        spec.model_and_optimizer, model=result.model, state=result.optimizer_state
    ).unpack()
    columns: Mapping[str, Column] = spec.dataset.columns
    metadata = {
        "columns": {name: dataclasses.asdict(column) for name, column in columns.items()},
        "output_sizes": list(result.output_sizes),
    }
    return TorchModel(
        history=result.history,
        model=trained,
        feature_columns=list(spec.features),
        input_shapes=values["input_shapes"],
        label_columns=list(values["label_cols"]),
        optimizer=optimizer,
        run_id=run_id,
        _metadata=metadata,
        loss=values["loss"],
        loss_constructors=values["loss_constructors"],
    )
