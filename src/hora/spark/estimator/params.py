"""The tables of the parameters of estimators and models, and the checks of their values.

`base.TableParams` makes constructors, accessors and pyspark's `Param` objects of them; ranks need no pyspark.ml.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Mapping, Sequence
from typing import Any

from hora.data.shard import POOL_BYTES
from hora.spark.estimator.dataset import Column

ParamTable = Mapping[str, tuple[Any, str]]  # name -> default, meaning

ESTIMATOR: dict[str, tuple[Any, str]] = {
    "num_proc": (None, "number of processes; Spark's default parallelism unless given"),
    "backend": (None, "runs the training function; SparkBackend(num_proc) unless given"),
    "store": (None, "location of data, checkpoints and logs"),
    "model": (None, "the torch.nn.Module, or a TorchScript module"),
    "optimizer": (None, "a torch optimizer of the model's parameters"),
    "loss": (None, "a function (output, label) -> tensor, or a list with one for each label"),
    "loss_constructors": (None, "functions that create the losses on the ranks"),
    "metrics": ([], "groups of functions (output, label) -> tensor"),
    "loss_weights": (None, "weights of the labels' losses; equal unless given"),
    "sample_weight_col": (None, "the column with the rows' weights"),
    "gradient_compression": (None, "for DistributedOptimizer"),
    "feature_cols": (None, "columns for the model's forward, in order; all but the labels unless given"),
    "label_cols": (None, "columns to learn"),
    "continuous_cols": (None, "for data modules that distinguish them"),
    "categorical_cols": (None, "for data modules that distinguish them"),
    "input_shapes": (None, "a shape for each feature, such as [-1, 2]"),
    "label_shapes": (None, "a shape for each label"),
    "validation": (None, "share of the rows, or the name of a column that is true for validation rows"),
    "callbacks": ([], "for Lightning only; a plain module has no hooks"),
    "batch_size": (32, "rows of a training batch"),
    "val_batch_size": (None, "rows of a validation batch; batch_size unless given"),
    "epochs": (1, "epochs of the run, including those before a resume"),
    "verbose": (1, "0: silent, 1: a line an epoch, 2: more"),
    "random_seed": (None, "for shuffling, the random split and torch"),
    "shuffle": (True, "random order of the training rows"),
    "shuffle_buffer_size": (None, "deprecated, without effect"),
    "partitions_per_process": (10, "Parquet files for each process, at most"),
    "run_id": (None, "name of the run; made up unless given. If it has a checkpoint, training resumes"),
    "train_minibatch_fn": (None, "replaces the step on one batch"),
    "train_steps_per_epoch": (None, "every row once unless given"),
    "validation_steps_per_epoch": (None, "every row once unless given"),
    "transformation_fn": (None, "a function on pandas DataFrames of rows, applied while reading"),
    "transformation_edit_fields": (None, "(name, dtype, shape, nullable) of the columns it changes"),
    "transformation_removed_fields": (None, "names of the columns it removes"),
    "train_reader_num_workers": (2, "threads that read training rows"),
    "val_reader_num_workers": (2, "threads that read validation rows"),
    "reader_pool_type": ("thread", "thread, process or dummy (no reading ahead)"),
    "reader_pool_bytes": (POOL_BYTES, "memory of a rank for the rows that it shuffles"),
    "inmemory_cache_all": (False, "keep a rank's rows in memory"),
    "compress_sparse_cols": (False, "store vectors without their zeros"),
    "use_gpu": (True, "train on GPUs where there are any"),
    "mp_start_method": (
        None,
        "multiprocessing's start method on the ranks, for a data module or a transformation",
    ),
    "backward_passes_per_step": (1, "batches whose gradients are added up before a step"),
    "data_module": (None, "the class that feeds the training"),
}

MODEL: dict[str, tuple[Any, str]] = {
    "history": (None, "a dict for each epoch"),
    "model": (None, "the trained module, on the CPU, in eval mode"),
    "feature_columns": (None, "columns for the model's forward, in order"),
    "input_shapes": (None, "a shape for each feature"),
    "label_columns": (None, "columns that were learnt"),
    "batch_size": (256, "rows that the model predicts at once"),
    "outputCols": (None, "names of the predictions; <label>__output unless given"),
    "optimizer": (None, "the optimizer after the training"),
    "run_id": (None, "name of the run in the store"),
    "_metadata": (None, "the training data's columns"),
    "loss": (None, "the minimized loss"),
    "loss_constructors": (None, "functions that created the losses"),
}


def check_values(values: Mapping[str, Any]) -> None:
    """Raise ValueError for parameters that are invalid for any data."""
    if values["model"] is None:
        raise ValueError("Model parameter is required: TorchEstimator(model=…)")
    if values["store"] is None:
        raise ValueError("Store parameter is required: TorchEstimator(store=Store.create('/shared/folder'))")
    if values["num_proc"] is not None and values["backend"] is not None:
        raise ValueError("pass num_proc or backend, not both: a backend has its own number of processes")
    if values["loss"] and values["loss_constructors"]:
        raise ValueError("one of loss and loss_constructors must be given, but both are")
    if not values["label_cols"]:
        raise ValueError("label_cols must name at least one column")
    for name in ("partitions_per_process", "backward_passes_per_step", "batch_size", "epochs", "reader_pool_bytes"):
        if not isinstance(values[name], int) or values[name] <= 0:
            raise ValueError(f"{name} must be an integer of at least 1, but it is {values[name]!r}")
    for name, allowed in (
        ("verbose", (0, 1, 2)),
        ("reader_pool_type", ("thread", "process", "dummy")),
        ("mp_start_method", (None, *multiprocessing.get_all_start_methods())),
    ):
        if values[name] not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, but it is {values[name]!r}")
    check_validation_value(values["validation"])
    labels, losses = values["label_cols"], values["loss"] or values["loss_constructors"]
    for name, found, lengths in (
        ("loss_weights", values["loss_weights"], {len(labels)}),
        ("label_shapes", values["label_shapes"], {len(labels)}),
        ("losses", losses if isinstance(losses, list | tuple) else None, {1, len(labels)}),
    ):
        if found and len(found) not in lengths:
            raise ValueError(f"there are {len(found)} {name}, but {len(labels)} label columns: {', '.join(labels)}")
    for group in values["metrics"]:
        if isinstance(group, list | tuple) and len(group) not in (1, len(labels)):
            raise ValueError(f"a group of metrics has 1 function or one for each label, but this one has {len(group)}")


def check_torch_values(values: Mapping[str, Any]) -> None:
    """Raise ValueError for missing parameters that a plain module needs."""
    if values["optimizer"] is None:
        raise ValueError(
            "Optimizer parameter is required: TorchEstimator(optimizer=…), made from the model's parameters"
        )
    if not values["loss"] and not values["loss_constructors"]:
        raise ValueError("one of loss and loss_constructors must be given, but none of them is")


def check_validation_value(validation: Any) -> None:
    """Raise ValueError unless it is a share of the rows or a column's name."""
    if validation is None or isinstance(validation, str):
        return
    if isinstance(validation, bool) or not isinstance(validation, int | float):
        raise ValueError(f"validation must be a share between 0 and 1 or a column's name, but it is {validation!r}")
    if not 0 <= validation < 1:
        raise ValueError(f"validation must be at least 0 and less than 1, but it is {validation}")


def check_columns(values: Mapping[str, Any], features: Sequence[str], columns: Mapping[str, Column]) -> None:
    """Raise ValueError if the shapes do not fit the columns."""
    shapes = values["input_shapes"]
    if not shapes or values["transformation_fn"]:  # a transformation may change every shape
        return
    if len(shapes) != len(features):
        raise ValueError(f"there are {len(shapes)} input_shapes, but {len(features)} features: {', '.join(features)}")
    for name, shape in zip(features, shapes, strict=True):
        elements = math.prod(int(extent) for extent in shape if int(extent) != -1)
        if name in columns and columns[name].size != elements:
            raise ValueError(
                f"input shape {list(shape)} of {name!r} does not fit its {columns[name].size} elements a row"
            )
