"""Elastic training without `hvd`: `protect` for a loop over DDP, `run` with a state for a function, such as FSDP2's.

The same names as in `horovod.torch.elastic`, and `protect`, for programs that use torch.distributed alone.
"""

from __future__ import annotations

from hora.torch.elastic import ElasticSampler, ObjectState, State, TorchState, run
from hora.torch.protection import protect
from hora.torch.shards import ShardedState

__all__ = ["ElasticSampler", "ObjectState", "ShardedState", "State", "TorchState", "protect", "run"]
