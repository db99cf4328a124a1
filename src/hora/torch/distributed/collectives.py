"""`Collectives`: the methods of a process group, under the names by which torch's versions call them.

The implementation for both of torch's shapes: a whole group, or a backend for a device. Operations that the engine
lacks are composed: a gather is an alltoall in which one member receives, and bitwise reductions fold a gathered result.
"""

from __future__ import annotations

from hora.torch.distributed.allgather import Allgather
from hora.torch.distributed.allreduce import Allreduce
from hora.torch.distributed.alltoall import Alltoall
from hora.torch.distributed.barrier import Barrier
from hora.torch.distributed.broadcast import Broadcast
from hora.torch.distributed.reduce_scatter import ReduceScatter


class Collectives(Allreduce, ReduceScatter, Allgather, Broadcast, Alltoall, Barrier):
    """Every call of a process group. Those with older names are at the end."""

    _allgather_base = Allgather.all_gather_single
    _reduce_scatter_base = ReduceScatter.reduce_scatter_single
    allgather_into_tensor_coalesced = Allgather.all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = ReduceScatter.reduce_scatter_single_coalesced
    alltoall_base = Alltoall.all_to_all_single
