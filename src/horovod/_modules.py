"""Import hook for old modules that are no files here: a table maps their names to where they are now.

A module is created when it is first imported. It has the names of its row, `old=new` if they differ, `*` for all public
ones. A row that is a single module name makes both names refer to the same module, so assignments in one are visible in
the other.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_ESTIMATOR = (
    "hora.spark.estimator.base: EstimatorParams",
    "hora.spark.estimator.persistence: TorchEstimatorParamsReadable=ParamsReadable "
    "TorchEstimatorParamsReader=ParamsReader TorchEstimatorParamsWritable=ParamsWritable "
    "TorchEstimatorParamsWriter=ParamsWriter _torch_param_serialize=serialize_param",
)
_PACKING = (
    "hora.spark.estimator.packing: deserialize_fn is_module_available is_module_available_fn "
    "save_into_bio save_into_bio_fn serialize_fn",
)
_MODULES: dict[str, tuple[str, ...] | str] = {
    "horovod.common": (),
    "horovod.common.basics": ("hora.legacy.mpi_ops: HorovodBasics MPI", "hora.torch.basics: *"),
    "horovod.common.elastic": (
        "hora.errors: HorovodInternalError HostsUpdatedInterrupt",
        "hora.torch.elastic: ObjectState State notification_manager run_fn",
        "hora.torch.elastic.state: HostUpdateResult WorkerNotificationManager=NotificationManager",
    ),
    "horovod.common.exceptions": (
        "hora.errors: HorovodInternalError HorovodVersionMismatchError HostsUpdatedInterrupt "
        "get_version_mismatch_message",
    ),
    "horovod.common.process_sets": (
        "hora.legacy.mpi_ops: HorovodBasics MPI",
        "hora.torch.process_sets: ProcessSet add_process_set global_process_set remove_process_set",
    ),
    "horovod.common.util": (
        "hora.legacy.env: env",
        "hora.legacy.util: EXTENSIONS _cache ccl_built check_extension check_installed_version ddl_built "
        "extension_available get_average_backwards_compatibility_fun gloo_built gpu_available is_gloo_used is_iterable "
        "is_version_greater_equal_than mpi_built nccl_built num_rank_is_power_2 split_list",
    ),
    "horovod.data": ("hora.data.loader: AsyncDataLoaderMixin BaseDataLoader",),
    "horovod.data.data_loader_base": ("hora.data.loader: AsyncDataLoaderMixin BaseDataLoader",),
    "horovod.ray.adapter": ("hora.ray.adapter: Adapter BaseParams",),
    "horovod.ray.elastic": (
        "ray.exceptions: GetTimeoutError",
        "hora.ray.elastic: ElasticRayExecutor RayHostDiscovery=RaySlotDiscovery TestDiscovery",
    ),
    "horovod.ray.elastic_v2": (
        "ray.exceptions: GetTimeoutError",
        "hora.ray.elastic: ElasticAdapter ElasticParams RayHostDiscovery TestDiscovery",
    ),
    "horovod.ray.ray_logger": "hora.ray.ray_logger",
    "horovod.ray.runner": (
        "hora.ray.coordinator: Coordinator",
        "hora.ray.executor: MiniSettings RayExecutor",
        "hora.ray.static: StaticAdapter StaticParams logger",
    ),
    "horovod.ray.strategy": ("hora.ray.strategy: BaseStrategy ColocatedStrategy PGStrategy create_placement_group",),
    "horovod.ray.utils": ("hora.ray.adapter: detect_nics map_blocking nics_to_env_var",),
    "horovod.ray.worker": ("hora.ray.strategy: BaseHorovodWorker",),
    "horovod.runner.common": (),
    "horovod.runner.common.util": (),
    "horovod.runner.common.util.codec": ("hora.legacy.runner: dumps_base64 loads_base64",),
    "horovod.runner.common.util.config_parser": (
        "hora.launch.options: LOG_LEVELS",
        "hora.legacy.runner: set_env_from_args validate_config_args __getattr__=variable_name",
    ),
    "horovod.runner.common.util.env": (
        "hora.legacy.env: IGNORE_REGEXES KUBEFLOW_MPI_EXEC LOG_LEVEL_STR get_env_rank_and_size is_exportable "
        "is_kubeflow_mpi",
    ),
    "horovod.runner.common.util.host_hash": ("hora.launch.providers.spark.task: host_hash",),
    "horovod.runner.common.util.hosts": (
        "hora.launch.slots: INVALID_SLOT_INFO HostInfo get_host_assignments parse_host_files parse_hosts "
        "parse_hosts_and_slots SlotInfo=Slot",
    ),
    "horovod.runner.common.util.safe_shell_exec": ("hora.legacy.runner: GRACEFUL_TERMINATION_TIME_S execute",),
    "horovod.runner.common.util.secret": (
        "hora.legacy.runner: DIGEST_LENGTH HOROVOD_SECRET_KEY SECRET_LENGTH check_digest compute_digest "
        "make_secret_key",
    ),
    "horovod.runner.common.util.settings": ("hora.legacy.runner: BaseSettings Settings",),
    "horovod.runner.common.util.timeout": ("hora.legacy.runner: Timeout TimeoutException",),
    "horovod.runner.common.util.tiny_shell_exec": ("hora.legacy.runner: execute=execute_quietly",),
    "horovod.runner.elastic": (),
    "horovod.runner.elastic.constants": ("hora.launch.controller.policy: RESET_LIMIT_EXCEEDED_MESSAGE",),
    "horovod.runner.elastic.discovery": ("hora.legacy.elastic: FixedHosts HostDiscovery HostDiscoveryScript",),
    "horovod.runner.elastic.driver": "hora.legacy.elastic",
    "horovod.runner.elastic.rendezvous": (
        "hora.legacy.elastic: GET_RANK_AND_SIZE PUT_WORKER_ADDRESSES create_rendezvous_handler",
    ),
    "horovod.runner.elastic.settings": ("hora.legacy.runner: ElasticSettings",),
    "horovod.runner.elastic.worker": (
        "hora.torch.elastic.state: HostUpdateResult WorkerNotificationManager=NotificationManager",
        "hora.legacy.elastic: HOROVOD_GLOO_IFACE HOROVOD_GLOO_RENDEZVOUS_ADDR HOROVOD_GLOO_RENDEZVOUS_PORT "
        "HOROVOD_HOSTNAME HOROVOD_LOCAL_RANK",
    ),
    "horovod.runner.gloo_run": (
        "hora.legacy.rendezvous: create_run_env_vars create_slot_env_vars gloo_run gloo_run_elastic launch_gloo "
        "launch_gloo_elastic _get_min_start_hosts=get_min_start_hosts RendezvousServer",
        "hora.launch.slots: get_host_assignments parse_hosts",
    ),
    "horovod.runner.http": (),
    "horovod.runner.http.http_server": (
        "hora.legacy.rendezvous: RendezvousHandler RendezvousHTTPServer RendezvousServer",
    ),
    "horovod.runner.js_run": ("hora.legacy.runner: js_run=mpi_run",),
    "horovod.runner.mpi_run": (
        "hora.legacy.runner: is_intel_mpi is_mpich is_open_mpi is_spectrum_mpi mpi_available mpi_run",
    ),
    "horovod.runner.util": (),
    "horovod.runner.util.lsf": ("hora.legacy.env: LSFUtils",),
    "horovod.runner.util.network": (
        "hora.legacy.runner: filter_local_addresses find_port get_driver_ip get_local_host_addresses "
        "get_local_intfs resolve_host_address",
    ),
    "horovod.runner.util.streams": ("hora.legacy.runner: Pipe",),
    "horovod.runner.util.threads": ("hora.legacy.runner: execute_function_multithreaded in_thread on_event",),
    "horovod.spark.common._namedtuple_fix": (),
    "horovod.spark.common.constants": (
        "hora.legacy.util: ARRAY BYTES_PER_GIB CUSTOM_SPARSE DENSE_VECTOR METRIC_PRINT_FREQUENCY "
        "MIXED_SPARSE_DENSE_VECTOR NOCHANGE PETASTORM_HDFS_DRIVER SPARSE_VECTOR TOTAL_BUFFER_MEMORY_CAP_GIB",
    ),
    "horovod.spark.common.datamodule": ("hora.spark.estimator.data_module: DataModule",),
    "horovod.spark.common.estimator": ("hora.spark.estimator.base: HorovodEstimator HorovodModel",),
    "horovod.spark.common.params": ("hora.spark.estimator.base: EstimatorParams ModelParams",),
    "horovod.spark.common.serialization": (
        "hora.spark.estimator.persistence: HorovodParamsReader=ParamsReader HorovodParamsWriter=ParamsWriter",
    ),
    "horovod.spark.common.util": (
        "hora.config: is_databricks=on_databricks",
        "hora.launch.providers.spark.task: host_hash",
        "hora.spark.estimator.metadata: check_shape_compatibility check_validation clear_training_cache "
        "column_metadata data_type_to_numpy dense_rows_fn get_dataset_properties get_output_cols "
        "get_simple_meta_from_parquet gpu_or_local_rank has_vector_column prepare_data spark_scalar_to_python_type "
        "to_petastorm_fn _get_metadata=column_metadata _get_assigned_gpu_or_local_rank=gpu_or_local_rank "
        "_has_vector_column=has_vector_column",
        "hora.spark.estimator.packing: to_list",
    ),
    "horovod.spark.conf": ("hora.launch.providers.spark.conf: *",),
    "horovod.spark.data_loaders": (
        "hora.data.loader: PytorchAsyncDataLoader=AsyncReaderLoader PytorchDataLoader=ReaderLoader",
    ),
    "horovod.spark.data_loaders.pytorch_data_loaders": (
        "hora.data.loader: PytorchAsyncDataLoader=AsyncReaderLoader "
        "PetastormBatchedDataLoader=BatchedReader PytorchInfiniteAsyncDataLoader=EndlessAsyncReaderLoader "
        "PytorchInfiniteDataLoader=EndlessReaderLoader PytorchInmemAsyncDataLoader=InMemoryAsyncReaderLoader "
        "PytorchInmemDataLoader=InMemoryReaderLoader PytorchDataLoader=ReaderLoader",
    ),
    "horovod.spark.keras.estimator": (
        "hora.spark.keras.estimator: KerasEstimator",
        "hora.spark.keras.model: KerasModel",
    ),
    "horovod.spark.keras.util": ("hora.spark.keras.packing: TFKerasUtil",),
    "horovod.spark.lightning.estimator": (
        *_ESTIMATOR,
        "hora.spark.lightning.estimator: TorchEstimator TorchModel",
        "hora.spark.lightning.package: MIN_PL_VERSION",
    ),
    "horovod.spark.lightning.legacy": ("hora.spark.lightning.module: to_lightning_module",),
    "horovod.spark.lightning.remote": ("hora.spark.estimator.metadata: _prepare_data_fn=dense_rows_fn",),
    "horovod.spark.lightning.util": _PACKING,
    "horovod.spark.runner": ("hora.spark.run: run run_elastic",),
    "horovod.spark.task": ("hora.launch.providers.spark.cluster: get_available_devices=assigned_gpus",),
    "horovod.spark.task.task_info": ("hora.launch.providers.spark.cluster: get_available_devices=assigned_gpus",),
    "horovod.spark.torch.datamodule": (
        "hora.spark.estimator.data_module: NVTabularDataModule ParquetDataModule PetastormDataModule=ParquetDataModule",
    ),
    "horovod.spark.torch.estimator": (
        *_ESTIMATOR,
        "hora.spark.estimator.torch_estimator: TorchEstimator",
        "hora.spark.estimator.torch_model: TorchModel",
    ),
    "horovod.spark.torch.remote": (
        "hora.spark.estimator.metadata: _prepare_data_fn=dense_rows_fn",
        "hora.spark.estimator.objective: _calculate_loss_fn=weighted_loss_fn",
    ),
    "horovod.spark.torch.util": _PACKING,
    "horovod.tensorflow.compression": ("hora.tensorflow.compression: *",),
    "horovod.tensorflow.functions": ("hora.tensorflow.functions: *",),
    "horovod.tensorflow.mpi_ops": (
        "hora.legacy.mpi_ops: HorovodBasics _basics",
        "hora.tensorflow: *",
        "hora.torch.reduce_op: handle_average_backwards_compatibility",
    ),
    "horovod.tensorflow.sync_batch_norm": ("hora.keras.tensorflow_names: SyncBatchNormalization",),
    "horovod.tensorflow.util": ("tensorflow: _executing_eagerly=executing_eagerly",),
    "horovod.torch.compression": (
        "hora.torch.compression: BF16Compressor Compression Compressor FP16Compressor NoneCompressor",
    ),
    "horovod.torch.elastic.sampler": ("hora.torch.elastic.handlers: ElasticSampler",),
    "horovod.torch.elastic.state": (
        "hora.torch.elastic.handlers: ModelStateHandler OptimizerStateHandler SamplerStateHandler "
        "StateHandler get_handler_registry set_handler_registry",
        "hora.torch.elastic.torch_state: TorchState",
    ),
    "horovod.torch.functions": ("hora.torch.functions: *", "hora.torch.optimizer.state: *"),
    "horovod.torch.mpi_ops": (
        "hora.legacy.mpi_ops: HorovodAllgather HorovodAllreduce HorovodAlltoall HorovodBasics HorovodBroadcast "
        "HorovodGroupedAllgather HorovodGroupedAllreduce HorovodGroupedReducescatter HorovodReducescatter MPI _basics",
        "hora.legacy.util: gpu_available num_rank_is_power_2",
        "hora.torch: *",
        "hora.torch.reduce_op: handle_average_backwards_compatibility",
    ),
    "horovod.torch.optimizer": (
        "hora.torch.optimizer.hooks: _DistributedOptimizer",
        "hora.torch.optimizer.distributed: DistributedOptimizer _DistributedAdasumOptimizer=DeltaOptimizer",
    ),
    "horovod.torch.sync_batch_norm": ("hora.torch.sync_batch_norm: SyncBatchNorm _SyncBatchNorm=_Normalise",),
}

# Why there are no such modules of Horovod here.
_REASONS = {
    "ranks and launcher speak over authenticated connections (docs/protocol.md)": "common.service "
    "runner.common.service runner.http.http_client",
    "MXNet is not supported; horovod.torch, horovod.tensorflow and horovod.keras are": "mxnet",
    "it is the function horovod.run(…) since Horovod 0.20; its modules are in horovod.runner": "run",
    "the launcher places ranks itself: horovod.run(…) or horovodrun": "runner.driver",
    "the launcher keeps the workers' states: horovod.run(…, min_num_proc=…)": "runner.elastic.registration",
    "a rank is started by the launcher itself: horovod.run(…) or horovodrun": "runner.run_task runner.task",
    "hosts are looked at when a job starts; there is no cache to manage": "runner.util.cache",
    "ssh commands are made by the launcher: horovodrun -H …": "runner.util.remote",
    "horovod.spark.run places ranks on the tasks that Spark gives them": "spark.driver spark.gloo_run spark.mpi_run",
    "horovod.ray.RayExecutor places ranks on Ray's actors itself": "ray.driver_service",
}
_GONE = {f"horovod.{name}": reason for reason, names in _REASONS.items() for name in names.split()}


class _OldModules(MetaPathFinder, Loader):
    """Finds and creates the modules of the table."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in _MODULES:
            is_package = any(other.startswith(f"{name}.") for other in _MODULES)
            return ModuleSpec(name, self, is_package=is_package)
        reason = next((why for gone, why in _GONE.items() if f"{name}.".startswith(f"{gone}.")), None)
        if reason is not None:
            raise ModuleNotFoundError(f"No module named {name!r} in Hora: {reason}", name=name)
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        row = _MODULES[module.__name__]
        if isinstance(row, str):
            sys.modules[module.__name__] = importlib.import_module(row)
            return
        module.__all__ = []  # type: ignore[attr-defined]
        homes = [entry.partition(": ")[::2] for entry in row]
        module.__doc__ = f"Old name; its contents are in {', '.join(home for home, _ in homes) or 'its modules'}."
        for home, names in homes:
            source = importlib.import_module(home)
            wanted = names.split()
            for name in [*(_public_names(source) if "*" in wanted else ()), *(name for name in wanted if name != "*")]:
                old, _, new = name.partition("=")
                setattr(module, old, getattr(source, new or old))
                if not old.startswith("_"):
                    module.__all__.append(old)


def _public_names(module: ModuleType) -> list[str]:
    names = getattr(module, "__all__", None)
    return list(names) if names is not None else [name for name in vars(module) if not name.startswith("_")]


def install() -> None:
    """Install the import hook, once."""
    if not any(isinstance(finder, _OldModules) for finder in sys.meta_path):
        sys.meta_path.append(_OldModules())
