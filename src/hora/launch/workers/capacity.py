"""What a machine can give to workers, and what it has given. Pure: the session asks before it starts anything.

Cores are counted as fractions and bound as whole ones; GPUs are never shared. What does not fit is refused in words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Capacity", "Grant", "Refused"]


class Refused(ValueError):  # noqa: N818 - an answer, not a crash
    """The request does not fit. The text says what was asked for, what is free and what there is."""


@dataclass(frozen=True, kw_only=True)
class Grant:
    """What one worker may use."""

    cpu: float
    memory_gib: float
    cores: tuple[int, ...]
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What there is. `gpus` are the ids that CUDA_VISIBLE_DEVICES takes."""

    cores: tuple[int, ...]
    memory_gib: float
    gpus: tuple[str, ...] = ()
    grants: Mapping[str, Grant] = field(default_factory=dict)

    def grant(self, worker: str, *, cpu: float, memory_gib: float, num_gpus: int) -> Capacity:
        """A capacity that has given this much to `worker`; raises Refused."""
        for name, value in (("cpu", cpu), ("memory", memory_gib)):
            if not value > 0 or not math.isfinite(value):
                raise Refused(f"{name} must be a positive number, but it is {value}")
        if num_gpus < 0:
            raise Refused(f"nvidia_gpu must not be negative, but it is {num_gpus}")
        used = list(self.grants.values())
        free_cpu = len(self.cores) - sum(grant.cpu for grant in used)
        free_memory = self.memory_gib - sum(grant.memory_gib for grant in used)
        free_gpus = self._free_gpus(used)
        for what, wanted, free, there_is in (
            ("CPU cores", cpu, free_cpu, len(self.cores)),
            ("GiB of memory", memory_gib, free_memory, self.memory_gib),
            ("GPUs", num_gpus, len(free_gpus), len(self.gpus)),
        ):
            if wanted > free + 1e-9:
                raise Refused(f"{wanted:g} {what} were asked for, but {free:g} of {there_is:g} are free")
        grant = Grant(cpu=cpu, memory_gib=memory_gib, cores=self._cores(cpu), gpus=tuple(free_gpus[:num_gpus]))
        return Capacity(
            cores=self.cores, memory_gib=self.memory_gib, gpus=self.gpus, grants={**self.grants, worker: grant}
        )

    def release(self, worker: str) -> Capacity:
        """A capacity that has what `worker` had."""
        left = {name: grant for name, grant in self.grants.items() if name != worker}
        return Capacity(cores=self.cores, memory_gib=self.memory_gib, gpus=self.gpus, grants=left)

    def _free_gpus(self, used: Sequence[Grant]) -> list[str]:
        taken = {gpu for grant in used for gpu in grant.gpus}
        return [gpu for gpu in self.gpus if gpu not in taken]

    def _cores(self, cpu: float) -> tuple[int, ...]:
        """The least used cores, as many whole ones as the worker may fill."""
        load = dict.fromkeys(self.cores, 0.0)
        for grant in self.grants.values():
            for core in grant.cores:
                load[core] += grant.cpu / len(grant.cores)
        ordered = sorted(self.cores, key=lambda core: (load[core], core))
        return tuple(sorted(ordered[: max(1, math.ceil(cpu))]))
