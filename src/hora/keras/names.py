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
from hora.torch import basics
from hora.torch.basics import *
from hora.torch.functions import allgather_object, broadcast_object
from hora.torch.ops import barrier
from hora.torch.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from hora.torch.reduce_op import Adasum, Average, Max, Min, Product, Sum

__all__ = [
    *basics.__all__,
    "Adasum",
    "Average",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "global_process_set",
    "reducescatter",
    "remove_process_set",
]
