"""Base of all estimators and their models: parameters, the path from a DataFrame to a model, saving and loading.

`HorovodEstimator` validates the parameters, writes the data to the store, runs a training through a backend and wraps
its result. A subclass defines the training function (`train`), what the ranks get (`_pack`), and interprets the result
(`_create_model`). Other packages subclass these and override the methods with Horovod's names:
`_get_or_create_backend`, `_fit_on_prepared_data`, `_read_checkpoint`, `get_model_class`, `_get_model_kwargs`. Clients'
tests also use `TorchEstimator._load_checkpoint`.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.ml import Estimator, Model
from pyspark.ml.param import Param, Params

from hora.spark.estimator.dataset import Column, Dataset, describe, open_dataset, prepared
from hora.spark.estimator.packing import RankSpec, TrainingResult
from hora.spark.estimator.params import ESTIMATOR, MODEL, ParamTable, check_columns, check_values
from hora.spark.estimator.persistence import ParamsReadable, ParamsWritable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Backend:
    """Interface that runs an estimator's training on processes. Users may implement their own."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every process; returns the values in rank order."""
        raise NotImplementedError

    def num_processes(self) -> int:
        """Return the number of processes that `run` uses."""
        raise NotImplementedError


class SparkBackend(Backend):
    """Runs on the tasks of the active Spark cluster through `horovod.spark.run`, which gets further arguments.

    With `min_num_proc` or `max_num_proc` it uses `horovod.spark.run_elastic`: training continues when tasks are lost.

    Args:
        env: Environment variables of the ranks, a dict.
        kwargs: Keyword arguments of the function, a dict; of a state: the values that it keeps, by name.
    """

    def __init__(self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        self._num_proc = default_num_proc() if num_proc is None else num_proc
        self._env = env
        self._kwargs = kwargs
        self._is_elastic = not kwargs.keys().isdisjoint(("min_num_proc", "max_num_proc"))

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        from hora.spark.run import run, run_elastic

        variables = dict(self._env or {}) | dict(env or {})
        call: Callable[..., list[Any]] = run_elastic if self._is_elastic else run
        return call(fn, args=args, kwargs=kwargs or {}, num_proc=self.num_processes(), env=variables, **self._kwargs)

    def num_processes(self) -> int:
        return self._num_proc


def default_num_proc() -> int:
    """Return Spark's default parallelism."""
    from hora.launch.providers.spark import cluster

    found = cluster.active_cluster()
    if found is None:
        raise RuntimeError("Could not find an active SparkContext: create a SparkSession first, or give num_proc.")
    return cluster.default_num_proc(found)


class TableParams(Params):
    """Parameters that a table defines, with `setX` and `getX` for each; the constructor takes them as keywords.

    A class adds its `own`. Its constructor's signature lists all except `unlisted`, which have no meaning there.
    """

    table: ClassVar[ParamTable] = {}

    def __init_subclass__(cls, own: ParamTable | None = None, unlisted: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if own is None:
            return
        cls.table = {**cls.table, **own}
        kind = inspect.Parameter.KEYWORD_ONLY
        listed = {name: value for name, (value, _) in cls.table.items() if name not in unlisted}
        signature = inspect.Signature([inspect.Parameter(n, kind, default=v) for n, v in listed.items()])
        cls.__signature__ = signature  # type: ignore[attr-defined]
        for name, (_, doc) in own.items():
            setattr(cls, name, Param(Params._dummy(), name, doc))
            getter, setter = _accessors(name)
            for camel in {_camel(name), _OTHER_NAMES.get(name, _camel(name))}:
                setattr(cls, f"get{camel}", getter)
                setattr(cls, f"set{camel}", setter)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._setDefault(**{name: default for name, (default, _) in self.table.items()})
        self.setParams(**kwargs)

    def setParams(self, **kwargs: Any) -> TableParams:  # noqa: N802 - pyspark's name
        """Set these parameters; None leaves a parameter unchanged. Raises TypeError for an unknown name."""
        unknown = sorted(set(kwargs) - set(self.table))
        if unknown:
            kind = type(self).__name__
            raise TypeError(f"{kind} has no parameter {', '.join(unknown)}; it has {', '.join(self.table)}")
        for name, value in kwargs.items():
            if value is not None:
                getattr(self, f"set{_camel(name)}")(value)
        return self

    def values(self) -> dict[str, Any]:
        """Return all parameters by name."""
        return {name: self.getOrDefault(name) for name in self.table}


# Horovod's accessors that do not follow from the parameter's name. One is misspelt, and programs use it.
_OTHER_NAMES = {
    "shuffle_buffer_size": "ShufflingBufferSize",
    "train_reader_num_workers": "TrainReaderNumWorker",
    "val_reader_num_workers": "ValReaderNumWorker",
    "inmemory_cache_all": "InMemoryCacheAll",
    "num_gpus": "NumGPUs",
    "label_columns": "LabelColoumns",
    "outputCols": "OutputCols",
}


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _accessors(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def get(self: Params) -> Any:
        return self.getOrDefault(name)

    def set_(self: Params, value: Any) -> Params:
        if name == "shuffle_buffer_size" and value is not None:
            warnings.warn(
                "shuffle_buffer_size is deprecated: use shuffle=True or False", DeprecationWarning, stacklevel=2
            )
        return self._set(**{name: value})

    get.__doc__ = f"The parameter `{name}`."
    set_.__doc__ = f"Set the parameter `{name}`; returns this object."
    return get, set_


class EstimatorParams(TableParams, own=ESTIMATOR):
    """The parameters of an estimator."""


class ModelParams(TableParams, own=MODEL):
    """The parameters of a trained model."""

    def _get_metadata(self) -> Any:
        return self.getOrDefault("_metadata")


class HorovodModel(Model, ModelParams, ParamsWritable, ParamsReadable):
    """A trained model. `transform(df)` adds a column of predictions for each label."""


class HorovodEstimator(Estimator[Any], EstimatorParams, ParamsWritable, ParamsReadable):
    """Fits a model on a DataFrame, on several processes."""

    run_prefix: ClassVar[str] = "pytorch"
    validates_on_all_ranks: ClassVar[bool] = False
    model_class: ClassVar[type[Any]]

    def fit_on_parquet(self, params: Mapping[Any, Any] | None = None, dataset_idx: int | None = None) -> Any:
        """Train on the Parquet data at the store's train (and, if present, validation) path."""
        return (self.copy(dict(params)) if params else self)._fit_on_parquet(dataset_idx)

    # ---- from data to a model: methods that other packages override have Horovod's names -----------------------------

    def _fit(self, dataset: DataFrame) -> Any:
        values = self.values()
        self._check_values(values)
        features = _features(values, dataset.columns)
        weight, validation = values["sample_weight_col"], values["validation"]
        names = list(dict.fromkeys([*features, *values["label_cols"], *([weight] if weight else [])]))
        if isinstance(validation, str) and describe(dataset, [validation])[validation].kind != "scalar":
            raise ValueError(f"the validation column {validation!r} must hold booleans or numbers")
        backend = self._get_or_create_backend()
        with prepared(
            dataset,
            names,
            values["store"],
            any_type=values["transformation_fn"] is not None,
            validation=validation,
            num_partitions=max(values["partitions_per_process"], 1) * backend.num_processes(),
            num_proc=backend.num_processes(),
            seed=values["random_seed"],
            sparse=values["compress_sparse_cols"],
        ) as found:
            return self._fit_on(backend, found)

    def _fit_on_parquet(self, dataset_idx: int | None = None) -> Any:
        values = self.values()
        self._check_values(values)
        from pyspark.sql import SparkSession

        spark = SparkSession.builder.getOrCreate()
        dataset = open_dataset(
            spark,
            values["store"],
            dataset_idx,
            with_validation=bool(values["validation"]),
            any_type=values["transformation_fn"] is not None,
        )
        return self._fit_on(self._get_or_create_backend(), dataset)

    def _get_or_create_backend(self) -> Any:
        """Return the backend that runs the training function on every process."""
        return self.getOrDefault("backend") or SparkBackend(self.getOrDefault("num_proc"))

    def _fit_on(self, backend: Any, dataset: Dataset) -> Any:
        return self._fit_on_prepared_data(
            backend, dataset.train_rows, dataset.val_rows, dataset.columns, 0, dataset_idx=dataset.index
        )

    def _fit_on_prepared_data(
        self,
        backend: Any,
        train_rows: int,
        val_rows: int,
        metadata: Mapping[str, Column],
        avg_row_size: float,
        dataset_idx: int | None = None,
    ) -> Any:
        """Train on the data in the store, with the columns `metadata`. `avg_row_size` is Horovod's and ignored."""
        dataset = Dataset(index=dataset_idx, train_rows=train_rows, val_rows=val_rows, columns=metadata)
        values = self.values()
        features = _features(values, list(metadata))
        missing = [name for name in [*features, *values["label_cols"]] if name not in metadata]
        if missing and values["transformation_fn"] is None:
            raise ValueError(f"the data has no column {', '.join(missing)}; it has {', '.join(metadata)}")
        check_columns(values, features, metadata)
        num_proc = backend.num_processes()
        if train_rows < num_proc:
            raise ValueError(f"{train_rows} training rows are too few for {num_proc} processes; use fewer")
        if self.validates_on_all_ranks and 0 < val_rows < num_proc:
            raise ValueError(f"{val_rows} validation rows are too few for {num_proc} processes; use fewer")
        store = values["store"]
        run_id = values["run_id"] or _new_run(self.run_prefix)
        packed = self._pack(values, features)
        # Do not send what the ranks do not need or get otherwise.
        packed["values"] = values | {"model": None, "store": None, "backend": None} | packed["values"]
        spec = RankSpec(
            store=store,
            remote=store.to_remote(run_id, dataset_idx),
            dataset=dataset,
            features=tuple(features),
            checkpoint=self._load_checkpoint(run_id),
            **packed,
        )
        results = backend.run(type(self).train, args=(spec,), kwargs={}, env=dict(values.get("backend_env") or {}))
        assert isinstance(results[0], TrainingResult), "rank 0 returned no result"
        columns = {name: dataclasses.asdict(column) for name, column in metadata.items()}
        return self._create_model(results, run_id, {"columns": columns, "features": features})

    def _has_checkpoint(self, run_id: str) -> bool:
        store = self.getOrDefault("store")
        path = store.get_checkpoint_path(run_id)
        return path is not None and store.exists(path)

    def _read_checkpoint(self, run_id: str) -> bytes | None:
        """Read the run's checkpoint from the store, to resume from."""
        store = self.getOrDefault("store")
        return store.read(store.get_checkpoint_path(run_id)) if self._has_checkpoint(run_id) else None

    def get_model_class(self) -> type[Any]:
        """Return the class of the fitted model."""
        return self.model_class

    def _get_model_kwargs(
        self, model: Any, history: Any, optimizer: Any, run_id: str, metadata: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments of the model's constructor."""
        return {
            "history": history,
            "model": model,
            "feature_columns": list(metadata["features"]),
            "input_shapes": self.getOrDefault("input_shapes"),
            "label_columns": list(self.getOrDefault("label_cols")),
            "optimizer": optimizer,
            "run_id": run_id,
            "_metadata": metadata,
            "loss": self.getOrDefault("loss"),
            "loss_constructors": self.getOrDefault("loss_constructors"),
        }

    # ---- for subclasses ----------------------------------------------------------------------------------------------

    def _check_values(self, values: Mapping[str, Any]) -> None:
        """Raise ValueError for parameters that are invalid for any data."""
        check_values(values)

    @staticmethod
    def train(spec: RankSpec) -> Any:
        """Train on one rank. Every process calls it; rank 0 returns a `TrainingResult`."""
        raise NotImplementedError

    def _pack(self, values: dict[str, Any], features: Sequence[str]) -> dict[str, Any]:
        """Return the `model` (and `package`) of a `RankSpec`, and the `values` that replace given ones."""
        raise NotImplementedError

    def _load_checkpoint(self, run_id: str) -> Any:
        """Return what the ranks resume from; None for a new run."""
        return self._read_checkpoint(run_id)

    def _create_model(self, run_results: Sequence[Any], run_id: str, metadata: dict[str, Any]) -> Any:
        """Return the model for the values of all processes, in rank order."""
        raise NotImplementedError


def _features(values: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    """Return the feature columns: as given, or all except labels, weight and validation column."""
    if values["feature_cols"]:
        return list(values["feature_cols"])
    others = {*values["label_cols"], values["sample_weight_col"], values["validation"]}
    return [name for name in columns if name not in others]


def _new_run(prefix: str) -> str:
    """Return a name that no run has, of other applications neither: they must not resume each other."""
    return f"{prefix}_{int(time.time())}_{uuid.uuid4().hex[:8]}"
