"""Signatures of horovod.tensorflow, horovod.tensorflow.keras and horovod.spark.keras, as in Horovod 0.28."""

from __future__ import annotations

import importlib
import inspect

import pytest

pytest.importorskip("tensorflow", reason="needs TensorFlow: make test-tensorflow")

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras

NONE = hvd.Compression.none
PS = "process_set=global_process_set"

TENSORFLOW = {
    "allreduce": "tensor, average=None, device_dense='', device_sparse='', compression=none, op=None, "
    "prescale_factor=1.0, "
    f"postscale_factor=1.0, name=None, {PS}, ignore_name_scope=False",
    "grouped_allreduce": "tensors, average=None, device_dense='', device_sparse='', compression=none, op=None, "
    f"prescale_factor=1.0, postscale_factor=1.0, {PS}, ignore_name_scope=False, name=None",
    "allgather": f"tensor, name=None, ignore_name_scope=False, {PS}",
    "grouped_allgather": f"tensors, name=None, ignore_name_scope=False, {PS}",
    "broadcast": f"tensor, root_rank, name=None, ignore_name_scope=False, {PS}",
    "broadcast_": f"variables, root_rank, name=None, {PS}",
    "alltoall": f"tensor, splits=None, name=None, ignore_name_scope=False, {PS}",
    "reducescatter": f"tensor, device_dense='', compression=none, op=0, name=None, {PS}, ignore_name_scope=False, "
    "prescale_factor=1.0, postscale_factor=1.0",
    "grouped_reducescatter": f"tensors, device_dense='', compression=none, op=0, {PS}, prescale_factor=1.0, "
    "postscale_factor=1.0",
    "join": "",
    "size_op": "process_set_id=0, name=None",
    "process_set_included_op": "process_set_id=0, name=None",
    "local_size_op": "name=None",
    "rank_op": "name=None",
    "local_rank_op": "name=None",
    "broadcast_variables": f"variables, root_rank, {PS}, inplace=False",
    "broadcast_object": f"obj, root_rank=0, session=None, name=None, {PS}",
    "broadcast_object_fn": f"root_rank=0, session=None, name=None, {PS}",
    "allgather_object": f"obj, session=None, name=None, {PS}",
    "BroadcastGlobalVariablesHook": "root_rank, device=''",
    "broadcast_global_variables": "root_rank",
    "SyncBatchNormalization": "fused=False, **kwargs",
    "DistributedGradientTape": "gradtape, device_dense='', device_sparse='', compression=none, sparse_as_dense=False, "
    "op=0, "
    f"gradient_predivide_factor=1.0, num_groups=0, groups=None, {PS}, scale_local_gradients=True, on_drift='warn'",
    "DistributedOptimizer": "optimizer, name=None, use_locking=False, device_dense='', device_sparse='', "
    "compression=none, "
    "sparse_as_dense=False, backward_passes_per_step=1, op=0, gradient_predivide_factor=1.0, "
    f"average_aggregated_gradients=False, num_groups=0, groups=None, {PS}, scale_local_gradients=True, on_drift='warn'",
}

# A compression of None stands for the backend's default, none.
KERAS = {
    "DistributedOptimizer": "optimizer, name=None, device_dense='', device_sparse='', compression=None, "
    "sparse_as_dense=False, gradient_predivide_factor=1.0, op=0, backward_passes_per_step=1, "
    f"average_aggregated_gradients=False, num_groups=0, groups=None, {PS}, scale_local_gradients=True, on_drift='warn'",
    "allreduce": "value, name=None, average=True, prescale_factor=1.0, postscale_factor=1.0, op=None, compression=None",
    "allgather": "value, name=None",
    "broadcast": "value, root_rank, name=None",
    "reducescatter": "value, name=None, op=0",
    "broadcast_global_variables": "root_rank",
    "load_model": "filepath, custom_optimizers=None, custom_objects=None, compression=None, legacy_opts=False",
    "callbacks.BroadcastGlobalVariablesCallback": "root_rank, device='', local_variables=None",
    "callbacks.MetricAverageCallback": "device=''",
    "callbacks.LearningRateScheduleCallback": "initial_lr, multiplier, start_epoch=0, end_epoch=None, staircase=True, "
    "momentum_correction=True, steps_per_epoch=None",
    "callbacks.LearningRateWarmupCallback": "initial_lr, warmup_epochs=5, momentum_correction=True, "
    "steps_per_epoch=None, "
    "verbose=0",
    "callbacks.BestModelCheckpoint": "monitor='val_loss', verbose=0, mode='auto', save_freq='epoch'",
    "elastic.run": "func",
    "elastic.KerasState": "model, optimizer=None, **kwargs",
    "elastic.CommitStateCallback": "state, batches_per_commit=1",
    "elastic.UpdateBatchStateCallback": "state",
    "elastic.UpdateEpochStateCallback": "state",
}

ESTIMATOR = """num_proc=None data_module=None model=None backend=None store=None custom_objects=None optimizer=None
loss=None
loss_weights=None sample_weight_col=None gradient_compression=None metrics=None feature_cols=None label_cols=None
continuous_cols=None categorical_cols=None validation=None callbacks=None batch_size=None val_batch_size=None
epochs=None
verbose=None random_seed=None shuffle_buffer_size=None shuffle=True partitions_per_process=None run_id=None
train_steps_per_epoch=None validation_steps_per_epoch=None transformation_fn=None train_reader_num_workers=None
val_reader_num_workers=None reader_pool_type='thread' label_shapes=None checkpoint_callback=None
inmemory_cache_all=False
backend_env=None use_gpu=True mp_start_method=None tensorflow_dataset_prefetch_buffer_size=0"""

SHARED = """init is_initialized shutdown start_timeline stop_timeline rank size local_rank local_size cross_rank
cross_size
is_homogeneous mpi_threads_supported mpi_built mpi_enabled gloo_built gloo_enabled nccl_built ddl_built ccl_built
cuda_built
rocm_built Average Sum Adasum Min Max Product ProcessSet global_process_set add_process_set remove_process_set
Compression"""

MODULES = {
    "horovod.common.exceptions": "HorovodInternalError HostsUpdatedInterrupt",
    "horovod.tensorflow": "_executing_eagerly barrier PartialDistributedGradientTape PartialDistributedOptimizer "
    "HorovodInternalError",
    "horovod.tensorflow.compression": "Compression",
    "horovod.tensorflow.data.compute_service": "TfDataServiceConfig tf_data_service send_to_data_service",
    "horovod.tensorflow.data.compute_worker": "main",
    "horovod.tensorflow.elastic": "run TensorFlowKerasState TensorFlowState",
    "horovod.tensorflow.functions": "broadcast_variables broadcast_object allgather_object",
    "horovod.tensorflow.keras": "PartialDistributedOptimizer broadcast_object allgather_object broadcast_variables",
    "horovod.tensorflow.keras.callbacks": "BestModelCheckpoint",
    "horovod.tensorflow.keras.elastic": "KerasState CommitStateCallback run",
    "horovod.tensorflow.mpi_ops": "allreduce allgather broadcast alltoall join size_op rank_op init rank size",
    "horovod.tensorflow.sync_batch_norm": "SyncBatchNormalization",
    "horovod.tensorflow.util": "_executing_eagerly",
    "horovod.keras.callbacks": "BroadcastGlobalVariablesCallback MetricAverageCallback LearningRateWarmupCallback "
    "LearningRateScheduleCallback BestModelCheckpoint",
    "horovod.keras.elastic": "KerasState CommitStateCallback UpdateBatchStateCallback UpdateEpochStateCallback run",
    "horovod.spark.keras": "KerasEstimator KerasModel",
    "horovod.spark.keras.util": "TFKerasUtil",
}


def text(function) -> str:
    """Return the parameters of a function in the format of the tables above."""
    words = []
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.default
        if default is parameter.empty:
            words.append(str(parameter).split(":")[0])
        elif default is NONE:
            words.append(f"{parameter.name}=none")
        elif default is hvd.global_process_set:
            words.append(f"{parameter.name}=global_process_set")
        else:
            words.append(
                f"{parameter.name}={int(default)!r}"
                if parameter.name == "op" and default is not None
                else f"{parameter.name}={default!r}"
            )
    return ", ".join(words)


def of(module, name):
    for part in name.split("."):
        module = getattr(module, part)
    return module


@pytest.mark.parametrize("name", TENSORFLOW)
def test_horovod_tensorflow(name):
    assert text(of(hvd, name)) == TENSORFLOW[name]


@pytest.mark.parametrize("module", ["horovod.tensorflow.keras", "horovod.keras"])
@pytest.mark.parametrize("name", KERAS)
def test_horovod_keras(module, name):
    found = text(of(importlib.import_module(module), name))
    saves_weights = "save_weights_only=False, "  # a parameter of tf.keras
    assert found.replace(saves_weights, "").replace(", save_weights_only=False", "") == KERAS[name]


def test_states_of_tensorflow():
    assert text(hvd.elastic.TensorFlowState) == "variables=None, session=None, **kwargs"
    for module in (hvd, hvd_keras):
        assert text(module.elastic.TensorFlowKerasState) == "model, optimizer=None, backend=None, **kwargs"
    for partial in (hvd.PartialDistributedGradientTape, hvd.PartialDistributedOptimizer):
        assert inspect.signature(partial).parameters["local_layers"].default is None


@pytest.mark.parametrize("module", MODULES)
def test_modules(module):
    found = importlib.import_module(module)
    for name in MODULES[module].split():
        assert hasattr(found, name), name


@pytest.mark.parametrize("module", ["horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras"])
def test_names_of_every_front_end(module):
    found = importlib.import_module(module)
    assert [name for name in SHARED.split() if not hasattr(found, name)] == []


def test_the_estimator_has_every_parameter_with_a_getter_and_a_setter():
    pytest.importorskip("pyspark")
    from horovod.spark.keras import KerasEstimator, KerasModel

    given = KerasEstimator()
    for entry in ESTIMATOR.split():
        name, _, default = entry.partition("=")
        assert default == "None" or repr(given.getOrDefault(name)) == default, name  # None: the parameter's own default
        camel = "".join(part.capitalize() for part in name.split("_"))
        camel = {"ShuffleBufferSize": "ShufflingBufferSize"}.get(camel, camel)
        methods = [method for method in dir(given) if method.lower() in (f"get{camel}".lower(), f"set{camel}".lower())]
        assert len(methods) >= 2, (name, methods)
    for name in ("fit", "fit_on_parquet", "save", "load"):
        assert callable(getattr(KerasEstimator, name))
    model = KerasModel(
        history={},
        model=None,
        feature_columns=["x"],
        label_columns=["y"],
        custom_objects=None,
        run_id="r",
        _metadata={},
        _floatx="float32",
    )
    assert model.getHistory() == {}
    for name in ("getModel", "keras", "transform", "save", "load"):
        assert callable(getattr(KerasModel, name))


def test_eager_mode_names_the_function_to_use_instead():
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)
