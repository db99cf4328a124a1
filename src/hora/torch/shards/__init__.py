"""Trainings with sharded parameters (FSDP2, HSDP, ZeRO) that go on from memory when ranks die.

- `ShardedState.attach` takes the objects of a training (`attached`): named tensors, and other values.
- A *commit* is a copy of every rank's tensors, or shards of them, and values. A *vault* (`vault`) is the memory of the
  commits of one world: two slots for each rank, in memory that all ranks of a host share, so a dead rank's slots stay.
  Between hosts a slot has a copy on another host, unless a replica of all its shards is there (`copies`).
- In the next world the survivors report which slots they have. The newest commit of which every shard is there counts
  (`recovery`), and every rank gets the parts that it needs now (`resharding`), as torch.distributed.checkpoint plans.

Read in this order: sharded_state, attached, vault, recovery, resharding, copies.
"""

from __future__ import annotations

from hora.torch.shards.sharded_state import ShardedState

__all__ = ["ShardedState"]
