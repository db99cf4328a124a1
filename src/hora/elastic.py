"""Elastic training without `hvd`: `protect` for a loop over DDP, `run` with a state for a function.

The same names as in `horovod.torch.elastic`, and `protect`, for programs that use torch.distributed alone.
"""

from __future__ import annotations

from hora.torch.elastic import ElasticSampler, ObjectState, State, TorchState, run
from hora.torch.protection import protect

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "protect", "run"]
