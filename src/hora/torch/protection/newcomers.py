"""The state that a newcomer gets from a member between two steps: everything that its own start cannot know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hora.torch.distributed.group import HoraProcessGroup
from hora.torch.protection.models import ProtectedModel
from hora.torch.protection.parcels import send, send_value


class Belongings:
    """The state of a training: models, optimizers, schedulers and samplers."""

    def __init__(
        self,
        models: Sequence[DistributedDataParallel],
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
        samplers: Sequence[Any],
    ) -> None:
        self._models, self._optimizers, self._others = models, optimizers, [*schedulers, *samplers]

    def exchange(self, among: HoraProcessGroup, models: Sequence[ProtectedModel], *, root: int) -> None:
        """Make this rank's state the root's (collective among the two, or more, ranks of the group)."""
        teaches = among.rank() == root
        for ddp in self._models:
            state: dict[str, Any] = ddp.module.state_dict()
            send(among, [tensor for tensor in state.values() if isinstance(tensor, torch.Tensor)], root)
        mine = [one.state_dict() for one in (*self._optimizers, *self._others)] if teaches else None
        states, passes = send_value(
            among, (mine, [(m.num_passes, m.buckets()) for m in models] if teaches else None), root
        )
        if teaches:
            return
        for one, state in zip((*self._optimizers, *self._others), states, strict=True):
            one.load_state_dict(state)
        for model, (num_passes, buckets) in zip(models, passes, strict=True):
            model.num_passes = num_passes
            model.adopt_buckets(buckets)
