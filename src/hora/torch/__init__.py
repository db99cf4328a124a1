"""The `hvd` interface for PyTorch: `import horovod.torch as hvd` imports these names."""

from hora.errors import HorovodInternalError
from hora.torch.basics import *
from hora.torch.basics import _check_has_gpu
from hora.torch.collective import poll, synchronize
from hora.torch.compression import Compression, ErrorFeedback
from hora.torch.functions import allgather_object, broadcast_object, broadcast_parameters
from hora.torch.ops import *
from hora.torch.optimizer.distributed import DistributedOptimizer, clip_grad_norm_
from hora.torch.optimizer.local_sgd import DESLOC, DiLoCo, LocalSGD
from hora.torch.optimizer.state import broadcast_optimizer_state
from hora.torch.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from hora.torch.reduce_op import Adasum, Average, Max, Min, Product, Sum
from hora.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "DistributedOptimizer",
    "Adasum",
    "Average",
    "Compression",
    "DESLOC",
    "DiLoCo",
    "ErrorFeedback",
    "HorovodInternalError",
    "LocalSGD",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "_check_has_gpu",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "clip_grad_norm_",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
