"""Every module path and name that old code imports exists, with its old positional parameters."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import warnings

import pytest
import torch

HVD = """
Compression allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters
allreduce allreduce_async allreduce_ allreduce_async_
grouped_allreduce grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_ sparse_allreduce_async
allgather allgather_async grouped_allgather grouped_allgather_async
broadcast broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async
reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async
join barrier poll synchronize init shutdown is_initialized start_timeline stop_timeline
size local_size cross_size rank local_rank cross_rank
mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built
cuda_built rocm_built
ProcessSet global_process_set add_process_set remove_process_set
Average Sum Adasum Min Max Product HorovodInternalError _check_has_gpu
"""
FRONT = "elastic DistributedOptimizer SyncBatchNorm compression functions mpi_ops optimizer sync_batch_norm"
MPI_OPS = """
is_homogeneous handle_average_backwards_compatibility gpu_available num_rank_is_power_2 _basics
HorovodAllreduce HorovodGroupedAllreduce HorovodAllgather HorovodGroupedAllgather HorovodBroadcast
HorovodAlltoall HorovodReducescatter HorovodGroupedReducescatter
"""
STATE = "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters"
TEXT = "serialize_fn deserialize_fn save_into_bio save_into_bio_fn is_module_available is_module_available_fn"
OPS = set(HVD.split()) - {"Compression", "_check_has_gpu", *STATE.split()}
NAMES = {
    "horovod.torch": HVD + FRONT + " check_extension _MPI_LIB_AVAILABLE",
    "horovod.torch.mpi_ops": " ".join(OPS) + MPI_OPS,
    "horovod.torch.compression": "Compressor NoneCompressor FP16Compressor Compression",
    "horovod.torch.functions": STATE,
    "horovod.torch.optimizer": "DistributedOptimizer _DistributedOptimizer _DistributedAdasumOptimizer",
    "horovod.torch.sync_batch_norm": "SyncBatchNorm _SyncBatchNorm",
    "horovod.torch.elastic": "run run_fn reset TorchState ElasticSampler init shutdown _reset",
    "horovod.torch.elastic.state": """TorchState StateHandler ModelStateHandler OptimizerStateHandler
        SamplerStateHandler get_handler_registry set_handler_registry""",
    "horovod.torch.elastic.sampler": "ElasticSampler",
    "horovod.common.elastic": "State ObjectState run_fn notification_manager HostUpdateResult",
    "horovod.runner.elastic.worker": "HostUpdateResult WorkerNotificationManager",
    "horovod.common.exceptions": """HorovodInternalError HostsUpdatedInterrupt HorovodVersionMismatchError
        get_version_mismatch_message""",
    "horovod.common.process_sets": "ProcessSet global_process_set add_process_set remove_process_set HorovodBasics MPI",
    "horovod.common.util": """EXTENSIONS extension_available gpu_available mpi_built gloo_built nccl_built
        ddl_built ccl_built env num_rank_is_power_2 split_list is_iterable check_extension check_installed_version
        get_average_backwards_compatibility_fun is_version_greater_equal_than _cache""",
    "horovod.common.basics": "init shutdown rank size HorovodBasics MPI",
    "horovod.runner.launch": "_run _run_elastic parse_args run_commandline check_build gloo_built is_gloo_used",
    "horovod.runner.mpi_run": "mpi_available is_open_mpi is_spectrum_mpi is_mpich is_intel_mpi mpi_run",
    "horovod.runner.js_run": "js_run",
    "horovod.runner.common.util.safe_shell_exec": "execute GRACEFUL_TERMINATION_TIME_S",
    "horovod.runner.common.util.tiny_shell_exec": "execute",
    "horovod.runner.elastic.rendezvous": "create_rendezvous_handler GET_RANK_AND_SIZE PUT_WORKER_ADDRESSES",
    "horovod.runner.common.util.secret": """make_secret_key compute_digest check_digest SECRET_LENGTH DIGEST_LENGTH
        HOROVOD_SECRET_KEY""",
    "horovod.runner.common.util.timeout": "Timeout TimeoutException",
    "horovod.runner.common.util.codec": "dumps_base64 loads_base64",
    "horovod.runner.common.util.hosts": "INVALID_SLOT_INFO SlotInfo HostInfo parse_hosts get_host_assignments",
    "horovod.runner.common.util.settings": "BaseSettings Settings",
    "horovod.runner.common.util.config_parser": """validate_config_args set_env_from_args
        HOROVOD_FUSION_THRESHOLD HOROVOD_TIMELINE LOG_LEVELS""",
    "horovod.runner.common.util.env": """is_exportable IGNORE_REGEXES LOG_LEVEL_STR KUBEFLOW_MPI_EXEC is_kubeflow_mpi
        get_env_rank_and_size""",
    "horovod.runner.common.util.host_hash": "host_hash",
    "horovod.runner.http.http_server": "RendezvousServer RendezvousHandler RendezvousHTTPServer",
    "horovod.runner.gloo_run": """RendezvousServer parse_hosts get_host_assignments create_slot_env_vars
        create_run_env_vars _get_min_start_hosts gloo_run gloo_run_elastic launch_gloo launch_gloo_elastic""",
    "horovod.runner": "run _HorovodArgs",
    "horovod.runner.elastic.discovery": "HostDiscovery HostDiscoveryScript FixedHosts",
    "horovod.runner.elastic.settings": "ElasticSettings",
    "horovod.runner.elastic.driver": "ElasticDriver DISCOVER_HOSTS_FREQUENCY_SECS ELASTIC_TIMEOUT_SECS",
    "horovod.runner.elastic.constants": "RESET_LIMIT_EXCEEDED_MESSAGE",
    "horovod.runner.util.threads": "in_thread on_event execute_function_multithreaded",
    "horovod.runner.util.network": """get_local_host_addresses get_local_intfs resolve_host_address
        filter_local_addresses find_port get_driver_ip""",
    "horovod.runner.util.streams": "Pipe",
    "horovod.runner.util.lsf": "LSFUtils",
    "horovod.data": "BaseDataLoader AsyncDataLoaderMixin",
    "horovod.data.data_loader_base": "BaseDataLoader AsyncDataLoaderMixin",
    "horovod.spark": "run run_elastic",
    "horovod.spark.common.backend": "Backend SparkBackend default_num_proc",
    "horovod.spark.common.constants": """ARRAY CUSTOM_SPARSE NOCHANGE PETASTORM_HDFS_DRIVER METRIC_PRINT_FREQUENCY
        BYTES_PER_GIB TOTAL_BUFFER_MEMORY_CAP_GIB MIXED_SPARSE_DENSE_VECTOR SPARSE_VECTOR DENSE_VECTOR""",
    "horovod.spark.common.datamodule": "DataModule",
    "horovod.spark.common.estimator": "HorovodEstimator HorovodModel",
    "horovod.spark.common.params": "EstimatorParams ModelParams",
    "horovod.spark.common.serialization": "HorovodParamsWriter HorovodParamsReader",
    "horovod.spark.common.store": "Store AbstractFilesystemStore FilesystemStore LocalStore HDFSStore DBFSLocalStore",
    "horovod.spark.common.util": """prepare_data get_dataset_properties clear_training_cache
        get_simple_meta_from_parquet
        _get_metadata _has_vector_column to_petastorm_fn check_validation check_shape_compatibility to_list
        get_output_cols
        spark_scalar_to_python_type data_type_to_numpy _get_assigned_gpu_or_local_rank is_databricks host_hash""",
    "horovod.spark.common._namedtuple_fix": "",
    "horovod.spark.data_loaders": "PytorchDataLoader PytorchAsyncDataLoader",
    "horovod.spark.data_loaders.pytorch_data_loaders": """PytorchDataLoader PytorchAsyncDataLoader
        PytorchInfiniteDataLoader
        PytorchInfiniteAsyncDataLoader PytorchInmemDataLoader PytorchInmemAsyncDataLoader PetastormBatchedDataLoader""",
    "horovod.spark.torch": "TorchEstimator TorchModel",
    "horovod.spark.torch.estimator": """TorchEstimator TorchModel EstimatorParams _torch_param_serialize
        TorchEstimatorParamsWriter TorchEstimatorParamsWritable TorchEstimatorParamsReader
        TorchEstimatorParamsReadable""",
    "horovod.spark.torch.datamodule": "PetastormDataModule NVTabularDataModule",
    "horovod.spark.torch.remote": "_prepare_data_fn _calculate_loss_fn",
    "horovod.spark.torch.util": TEXT,
    "horovod.spark.lightning": "TorchEstimator TorchModel",
    "horovod.spark.lightning.estimator": """TorchEstimator TorchModel MIN_PL_VERSION EstimatorParams
        _torch_param_serialize
        TorchEstimatorParamsWriter TorchEstimatorParamsWritable TorchEstimatorParamsReader
        TorchEstimatorParamsReadable""",
    "horovod.spark.lightning.legacy": "to_lightning_module",
    "horovod.spark.lightning.datamodule": "PetastormDataModule PETASTORM_HDFS_DRIVER",
    "horovod.spark.lightning.remote": "_prepare_data_fn",
    "horovod.spark.lightning.util": TEXT,
    "horovod.spark.runner": "run run_elastic",
    "horovod.spark.task.task_info": "get_available_devices",
    "horovod.spark.conf": """SPARK_CONF_MAX_INT SPARK_CONF_MAX_INT_MINUS_ONE
        SPARK_CONF_DONT_REUSE_EXECUTOR_FOR_SAME_TASK SPARK_CONF_DONT_REUSE_NODE_FOR_SAME_TASK""",
}
# The order of positional parameters in old code.
PARAMETERS = {
    "allreduce": "tensor average name compression op prescale_factor postscale_factor process_set",
    "allreduce_async": "tensor average name op prescale_factor postscale_factor process_set",
    "allreduce_": "tensor average name op prescale_factor postscale_factor process_set",
    "allreduce_async_": "tensor average name op prescale_factor postscale_factor process_set",
    "grouped_allreduce": "tensors average name compression op prescale_factor postscale_factor process_set",
    "grouped_allreduce_async": "tensors average name op prescale_factor postscale_factor process_set",
    "grouped_allreduce_": "tensors average name op prescale_factor postscale_factor process_set",
    "grouped_allreduce_async_": "tensors average name op prescale_factor postscale_factor process_set",
    "allgather": "tensor name process_set",
    "allgather_async": "tensor name process_set",
    "grouped_allgather": "tensors name process_set",
    "grouped_allgather_async": "tensors name process_set",
    "broadcast": "tensor root_rank name process_set",
    "broadcast_async": "tensor root_rank name process_set",
    "broadcast_": "tensor root_rank name process_set",
    "broadcast_async_": "tensor root_rank name process_set",
    "alltoall": "tensor splits name process_set",
    "alltoall_async": "tensor splits name process_set",
    "reducescatter": "tensor name compression op process_set prescale_factor postscale_factor",
    "reducescatter_async": "tensor name op process_set prescale_factor postscale_factor",
    "grouped_reducescatter": "tensors name compression op process_set prescale_factor postscale_factor",
    "grouped_reducescatter_async": "tensors name op process_set prescale_factor postscale_factor",
    "sparse_allreduce_async": "tensor name op process_set",
    "join": "device",
    "barrier": "process_set",
    "poll": "handle",
    "synchronize": "handle",
    "init": "comm process_sets",
    "start_timeline": "file_path mark_cycles",
    "broadcast_optimizer_state": "optimizer root_rank model",
    "broadcast_object": "obj root_rank name process_set",
    "allgather_object": "obj name process_set",
}


@pytest.mark.parametrize("module", NAMES)
def test_names_exist(module):
    found = importlib.import_module(module)
    assert not [name for name in NAMES[module].split() if not hasattr(found, name)]


@pytest.mark.parametrize("name", PARAMETERS)
def test_positional_parameters(name):
    import horovod.torch as hvd

    assert list(inspect.signature(getattr(hvd, name)).parameters) == PARAMETERS[name].split()


def test_reduce_ops_are_plain_numbers():
    import horovod.torch as hvd

    ops = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
    assert ops == [0, 1, 2, 3, 4, 5]
    assert {type(op) for op in ops} == {int}


@pytest.mark.parametrize(
    ("op", "advice"),
    [("sum", "write op=hvd.Sum"), ("MEAN", "write op=hvd.Average"), (torch.distributed.ReduceOp.MAX, "op=hvd.Max"),
     (None, "use one of hvd.Adasum, hvd.Average, ")],
)  # fmt: skip
def test_what_is_no_reduce_op_is_rejected_with_the_one_that_is_meant(op, advice):
    import horovod.torch as hvd

    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match=advice):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), model.named_parameters(), op=op)


def test_a_model_in_the_place_of_an_optimizer_or_of_its_parameters_is_rejected():
    import horovod.torch as hvd

    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"wraps an optimizer, but it was given Linear: .*SGD\(model.parameters"):
        hvd.DistributedOptimizer(model)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=r"was given a Linear: pass model\.named_parameters\(\)"):
        hvd.DistributedOptimizer(optimizer, named_parameters=model)
    with pytest.raises(ValueError, match=r"was given a dict: pass its items\(\)"):
        hvd.DistributedOptimizer(optimizer, named_parameters=dict(model.named_parameters()))


def test_all_old_names_are_the_same_object():
    import hora.torch
    import horovod.common.process_sets
    import horovod.torch.mpi_ops

    assert horovod.torch.mpi_ops.allreduce is hora.torch.allreduce
    assert horovod.common.process_sets.global_process_set is hora.torch.global_process_set


def test_an_optimizer_has_the_private_method_that_programs_look_for():
    from horovod.torch.optimizer import _DistributedOptimizer

    assert callable(_DistributedOptimizer._allreduce_grad_async)


def test_a_foreign_horovod_is_named(tmp_path, monkeypatch):
    from hora.foreign_horovod import foreign_conflict, warn_if_foreign_horovod

    assert foreign_conflict() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_foreign_horovod()
    (tmp_path / "horovod-0.28.1+hora.dist-info").mkdir()  # packaging/horovod
    monkeypatch.syspath_prepend(str(tmp_path))
    assert foreign_conflict() is None
    (tmp_path / "horovod-0.28.1.dist-info").mkdir()
    assert foreign_conflict()[0].startswith("horovod 0.28.1 is installed beside Hora")
    with pytest.warns(UserWarning, match=r"horovod 0\.28\.1.*In use now: Hora's .*pip uninstall -y horovod"):
        warn_if_foreign_horovod()


def test_a_foreign_horovod_that_has_overwritten_ours_is_named(tmp_path, monkeypatch):
    from hora import foreign_horovod

    (tmp_path / "horovod-0.28.1.dist-info").mkdir()
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("__version__ = '0.28.1'")
    monkeypatch.syspath_prepend(str(tmp_path))
    theirs = importlib.machinery.ModuleSpec("horovod", None, origin=str(tmp_path / "horovod" / "__init__.py"))
    monkeypatch.setattr(foreign_horovod.importlib.util, "find_spec", lambda name: theirs)
    assert f"In use now: horovod 0.28.1's {tmp_path}" in foreign_horovod.foreign_message()


def test_version_mismatch_error():
    from horovod.common.exceptions import HorovodVersionMismatchError, HostsUpdatedInterrupt

    error = HorovodVersionMismatchError("torch", "2.0", "1.0")
    assert (error.name, error.version, error.installed_version) == ("torch", "2.0", "1.0")
    assert isinstance(error, ImportError)
    assert HostsUpdatedInterrupt(skip_sync=True).skip_sync is True


def test_every_old_module_of_the_table_can_be_imported_and_has_its_names():
    from horovod import _modules

    for name in _modules._MODULES:
        package = name.split(".")[1]
        if package in ("ray", "tensorflow") and importlib.util.find_spec(package) is None:
            continue
        module = importlib.import_module(name)
        assert all(hasattr(module, public) for public in getattr(module, "__all__", ())), name


@pytest.mark.parametrize("name", ["horovod.spark.gloo_run", "horovod.runner.common.service.task_service"])
def test_an_unsupported_module_names_its_replacement(name):
    with pytest.raises(ModuleNotFoundError, match="in Hora: "):
        importlib.import_module(name)


def test_one_module_under_two_names_is_one_object():
    import hora.legacy.elastic
    import horovod.runner.elastic.driver

    assert horovod.runner.elastic.driver is hora.legacy.elastic
