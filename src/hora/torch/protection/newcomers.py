"""The state that a newcomer gets from a member between two steps: everything that its own start cannot know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hora.torch.distributed.group import HoraProcessGroup
from hora.torch.elastic.handlers import ElasticSampler
from hora.torch.protection.models import ProtectedModel
from hora.torch.protection.parcels import send, send_value


class Belongings:
    """The state of a training: models, optimizers, schedulers and samplers."""

    def __init__(
        self,
        models: Sequence[DistributedDataParallel],
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
        samplers: Sequence[ElasticSampler],
    ) -> None:
        self._models, self._optimizers, self._others = models, optimizers, [*schedulers]
        self.samplers = samplers
        self._rows = [(sampler.epoch, 0) for sampler in samplers]  # the epoch, and what this rank has used of it

    def use(self, num_rows: int) -> None:
        """Count the rows of a training pass."""
        self._rows = [
            (sampler.epoch, num_rows + (rows if epoch == sampler.epoch else 0))
            for sampler, (epoch, rows) in zip(self.samplers, self._rows, strict=True)
        ]

    def _used(self) -> list[int]:
        pairs = zip(self.samplers, self._rows, strict=True)
        return [rows if epoch == sampler.epoch else 0 for sampler, (epoch, rows) in pairs]

    def exchange(self, among: HoraProcessGroup, models: Sequence[ProtectedModel], *, root: int) -> list[int]:
        """Make this rank's state the root's (collective among the two, or more, ranks of the group). Returns how many
        rows of each sampler's epoch the root has used.
        """
        teaches = among.rank() == root
        for ddp in self._models:
            state: dict[str, Any] = ddp.module.state_dict()
            send(among, [tensor for tensor in state.values() if isinstance(tensor, torch.Tensor)], root)
        mine = [one.state_dict() for one in (*self._optimizers, *self._others)] if teaches else None
        layouts = [(model.num_passes, model.buckets()) for model in models] if teaches else None
        states, passes, used = send_value(among, (mine, layouts, self._used()), root)
        if not teaches:
            for one, its in zip((*self._optimizers, *self._others), states, strict=True):
                one.load_state_dict(its)
            for model, (num_passes, buckets) in zip(models, passes, strict=True):
                model.num_passes = num_passes
                model.adopt_buckets(buckets)
            self._rows = [(sampler.epoch, rows) for sampler, rows in zip(self.samplers, used, strict=True)]
        return list(used)
