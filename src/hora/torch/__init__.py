"""The `hvd` interface for PyTorch: `import horovod.torch as hvd` imports these names."""

from hora.errors import HorovodInternalError
from hora.torch import basics, ops, process_sets, reduce_op
from hora.torch.basics import *
from hora.torch.basics import _check_has_gpu
from hora.torch.collective import poll, synchronize
from hora.torch.compression import Compression, ErrorFeedback
from hora.torch.functions import allgather_object, broadcast_object, broadcast_parameters
from hora.torch.ops import *
from hora.torch.optimizer.distributed import DistributedOptimizer, clip_grad_norm_
from hora.torch.optimizer.local_sgd import DESLOC, DiLoCo, LocalSGD
from hora.torch.optimizer.state import broadcast_optimizer_state
from hora.torch.process_sets import *
from hora.torch.reduce_op import *
from hora.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    *basics.__all__,
    *ops.__all__,
    *process_sets.__all__,
    *reduce_op.__all__,
    "Compression",
    "DESLOC",
    "DiLoCo",
    "DistributedOptimizer",
    "ErrorFeedback",
    "HorovodInternalError",
    "LocalSGD",
    "SyncBatchNorm",
    "_check_has_gpu",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "clip_grad_norm_",
    "poll",
    "synchronize",
]
