"""Elastic training: the survivors of a lost rank continue, and newcomers join them.

- A *state* (`State`, `TorchState`) is what all ranks must have in common: model, optimizers, samplers, numbers.
- `state.commit()` keeps a copy in memory, the last *commit*; `restore` returns to it, `sync` sends rank 0's state to
  all ranks. With `per_step=True` no copy is needed: a step is applied on all ranks or on none, and ranks that missed
  the last step copy it from one that has it.
- `run` wraps a training function in the *elastic loop* (`loop`): HorovodInternalError (a rank was lost) restores and
  syncs, HostsUpdatedInterrupt (ranks were added or removed, after a commit) only syncs; then the function is called
  again, in a new world.
- A *handler* (`handlers`) knows how to copy, restore and send one kind of value. An `ElasticSampler` deals the rows of
  an epoch that are left to the ranks that are left.
- A *durable commit* (`durable`) is a commit on disk, for the loss of every rank: `TorchState.persist`.
"""

from hora.torch.elastic.handlers import ElasticSampler
from hora.torch.elastic.loop import run, run_fn
from hora.torch.elastic.state import ObjectState, State, notification_manager
from hora.torch.elastic.torch_state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "notification_manager", "run", "run_fn"]
