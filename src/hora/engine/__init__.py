"""The engine: named requests from any thread, agreed on by all ranks, executed in fused batches.

Read in this order: request, plan, agree/agreement, queue, peers, runtime; then transport/ and shm/.
"""

from hora.engine.process import (
    control_connection,
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
    "control_connection",
    "current_runtime",
    "current_world",
    "has_elastic_launcher",
    "init",
    "is_initialized",
    "is_newcomer",
    "restart",
    "shutdown",
]
