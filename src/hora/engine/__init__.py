"""The engine: takes named requests from any thread, negotiates them with all ranks, and executes fused batches.

- A *request* (`request`) is one collective of one rank: a name, tensors, and what all members must agree on, its
  *signature*. A *process set* (`process_sets`) is the ranks that take part, its *members*, numbered from 0.
- *Negotiation* (`negotiation/`) finds out which requests every member has announced. `plan`, a pure function, orders
  them and fuses small ones into *batches*, equally on every rank.
- A *transport* (`transport/`) moves the data of a batch: shared memory, connections between hosts, NCCL.
- A *queue* (`queue`) is a set's requests on their way; the thread that waits, or one in the background, *drives* it
  (`progress`). A *repeated call* (`repeated`) and a *schedule* of gradient buckets (`schedule`) skip the negotiation.
- The *runtime* (`runtime`) is this process's part of a world, from `init` to `shutdown` (`process`). Ranks meet by
  `bootstrap`; the *control tree* (`control_tree`) then connects them for everything but tensors.

Read in this order: request, plan, negotiation/base, queue, bootstrap, runtime; then transport/ and shm/.
"""

from hora.engine.process import (
    admit_later,
    control_connection,
    current_place,
    current_runtime,
    current_world,
    has_elastic_launcher,
    init,
    is_initialized,
    is_newcomer,
    restart,
    shutdown,
)
from hora.engine.request import Kind, ReduceOp
from hora.engine.runtime import Runtime

__all__ = [
    "Kind",
    "ReduceOp",
    "Runtime",
    "admit_later",
    "control_connection",
    "current_place",
    "current_runtime",
    "current_world",
    "has_elastic_launcher",
    "init",
    "is_initialized",
    "is_newcomer",
    "restart",
    "shutdown",
]
