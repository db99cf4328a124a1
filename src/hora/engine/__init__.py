"""The engine: takes named requests from any thread, negotiates them with all ranks, and executes fused batches.

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
