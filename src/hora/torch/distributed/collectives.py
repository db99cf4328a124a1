"""`Collectives`: the methods of a process group, under torch's newest names for them.

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
    """Every call of a process group."""
