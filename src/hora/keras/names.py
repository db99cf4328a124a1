"""Names that `horovod.keras` and `horovod.tensorflow.keras` import from the other interfaces."""

from hora.errors import HorovodInternalError
from hora.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from hora.keras.values import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    reducescatter,
)
from hora.torch import basics, process_sets, reduce_op
from hora.torch.basics import *
from hora.torch.functions import allgather_object, broadcast_object
from hora.torch.ops import barrier
from hora.torch.process_sets import *
from hora.torch.reduce_op import *

__all__ = [
    *basics.__all__,
    *process_sets.__all__,
    *reduce_op.__all__,
    "DistributedOptimizer",
    "HorovodInternalError",
    "PartialDistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "reducescatter",
]
