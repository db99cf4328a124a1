"""Every module path and name that old code imports exists, with the positions old code relies on."""

from __future__ import annotations

import importlib
import inspect
import warnings

import pytest

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
    "horovod.spark.runner": "run run_elastic",
    "horovod.spark.task.task_info": "get_available_devices",
    "horovod.spark.conf": """SPARK_CONF_MAX_INT SPARK_CONF_MAX_INT_MINUS_ONE
        SPARK_CONF_DONT_REUSE_EXECUTOR_FOR_SAME_TASK SPARK_CONF_DONT_REUSE_NODE_FOR_SAME_TASK""",
}
# Positional order as old code uses it.
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


def test_one_identity_under_all_names():
    import hora.torch
    import horovod.common.process_sets
    import horovod.torch.mpi_ops

    assert horovod.torch.mpi_ops.allreduce is hora.torch.allreduce
    assert horovod.common.process_sets.global_process_set is hora.torch.global_process_set


def test_an_optimizer_has_the_method_that_programs_look_for():
    from horovod.torch.optimizer import _DistributedOptimizer

    assert callable(_DistributedOptimizer._allreduce_grad_async)


def test_a_foreign_horovod_is_named(tmp_path, monkeypatch):
    from hora.horovod.foreign import foreign_horovod, warn_if_foreign_horovod

    assert foreign_horovod() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_foreign_horovod("here")
    info = tmp_path / "horovod-0.28.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(UserWarning, match=r"horovod 0\.28\.1.*/site/horovod/torch.*pip uninstall horovod"):
        warn_if_foreign_horovod("/site/horovod/torch")


def test_version_mismatch_error():
    from horovod.common.exceptions import HorovodVersionMismatchError, HostsUpdatedInterrupt

    error = HorovodVersionMismatchError("torch", "2.0", "1.0")
    assert (error.name, error.version, error.installed_version) == ("torch", "2.0", "1.0")
    assert isinstance(error, ImportError)
    assert HostsUpdatedInterrupt(skip_sync=True).skip_sync is True
