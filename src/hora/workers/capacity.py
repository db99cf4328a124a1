"""Capacity of a machine for workers, total and granted. Pure: the session queries it before it starts anything.

Cores are counted as fractions and bound as whole ones; GPUs are never shared. A request that does not fit is rejected
with an explanation. Cores can be shared instead; `fair_share` decides that before anything is granted.
"""

from __future__ import annotations

import errno
import math
import os
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hora.launch.processes import output_of
from hora.memory import total_bytes
from hora.net import sockets


class CapacityError(ValueError):
    """The request does not fit. The message has the requested, the free and the total amount."""


@dataclass(frozen=True, kw_only=True)
class Grant:
    """Resources of one worker."""

    cpu: float
    memory_gib: float
    cores: tuple[int, ...]
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Resources of a machine."""

    cores: tuple[int, ...]
    memory_gib: float
    gpus: tuple[str, ...] = ()  # the ids that CUDA_VISIBLE_DEVICES takes
    grants: Mapping[str, Grant] = field(default_factory=dict)

    def grant(self, worker: str, request: Mapping[str, Any], claim: Callable[[str], str] = lambda gpu: "") -> Capacity:
        """Return the capacity after granting a request to `worker`. Raises CapacityError if it does not fit.

        With `share_cores` other workers may use the cores too. `claim` takes a GPU that is free here and returns its
        other holder, or "". It is called only if everything else fits, and only until there are enough GPUs.
        """
        cpu, memory_gib, num_gpus = request["cpu"], request["memory"], request["nvidia_gpu"]
        for name, value in (("cpu", cpu), ("memory", memory_gib)):
            if not value > 0 or not math.isfinite(value):
                raise CapacityError(f"{name} must be a positive number, but it is {value}")
        if num_gpus < 0:
            raise CapacityError(f"nvidia_gpu must not be negative, but it is {num_gpus}")
        used = list(self.grants.values())
        free_memory = self.memory_gib - sum(grant.memory_gib for grant in used)
        for what, wanted, free, there_is in (
            ("CPU cores", cpu, math.inf if request.get("share_cores") else self.free_cores, len(self.cores)),
            ("GiB of memory", memory_gib, free_memory, self.memory_gib),
            ("GPUs", num_gpus, len(self._free_gpus()), len(self.gpus)),
        ):
            if wanted > free + 1e-9:
                raise CapacityError(f"{wanted:g} {what} were requested, but {free:g} of {there_is:g} are free")
        gpus = self._claimed(num_gpus, claim)
        grant = Grant(cpu=cpu, memory_gib=memory_gib, cores=self._cores(cpu), gpus=gpus)
        return replace(self, grants={**self.grants, worker: grant})

    def fair_share(self, n: int, cpu: float) -> float:
        """Return the cores for each of `n` workers that request `cpu`: at most an equal share, at least one core."""
        return cpu if n * cpu <= self.free_cores + 1e-9 else min(cpu, max(self.free_cores / n, 1.0))

    @property
    def free_cores(self) -> float:
        """Return the number of cores that no worker has; negative if cores are shared."""
        return len(self.cores) - sum(grant.cpu for grant in self.grants.values())

    def release(self, worker: str) -> Capacity:
        """Return the capacity after `worker` has given its grant back."""
        return replace(self, grants={name: grant for name, grant in self.grants.items() if name != worker})

    def _claimed(self, num_gpus: int, claim: Callable[[str], str]) -> tuple[str, ...]:
        gpus: list[str] = []
        others: list[str] = []
        for gpu in self._free_gpus():
            if len(gpus) < num_gpus:
                holder = claim(gpu)
                others += [holder] if holder else []
                gpus += [] if holder else [gpu]
        if len(gpus) < num_gpus:
            raise CapacityError(
                f"{num_gpus} GPUs were requested, but {len(gpus)} of {len(self.gpus)} are free; {len(others)} are in "
                f"use by workers of other sessions ({', '.join(others)})"
            )
        return tuple(gpus)

    def used_gpus(self) -> set[str]:
        return {gpu for grant in self.grants.values() for gpu in grant.gpus}

    def _free_gpus(self) -> list[str]:
        taken = self.used_gpus()
        return [gpu for gpu in self.gpus if gpu not in taken]

    def _cores(self, cpu: float) -> tuple[int, ...]:
        """Return the least used cores, as many whole ones as the worker can fill."""
        load = dict.fromkeys(self.cores, 0.0)
        for grant in self.grants.values():
            for core in grant.cores:
                load[core] += grant.cpu / len(grant.cores)
        ordered = sorted(self.cores, key=lambda core: (load[core], core))
        return tuple(sorted(ordered[: max(1, math.ceil(cpu))]))


def measure(environ: Mapping[str, str]) -> Capacity:
    """Return the capacity of this machine within the limits of its container."""
    return Capacity(cores=tuple(sorted(os.sched_getaffinity(0))), memory_gib=total_bytes() / 2**30, gpus=_gpus(environ))


def _gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(item.strip() for item in visible.split(",") if item.strip() and item.strip() != "-1")
    lines = [line for line in output_of(["nvidia-smi", "-L"], limit_s=20.0).splitlines() if line.startswith("GPU ")]
    return tuple(str(number) for number in range(len(lines)))


class GpuClaims:
    """The GPUs that this session has claimed for its workers, each by a local socket: so all users' sessions see it."""

    def __init__(self) -> None:
        self._held: dict[str, socket.socket] = {}

    def claim(self, gpu: str) -> str:
        """Claim this GPU; return the session that holds it already, or an empty string on success."""
        if gpu in self._held:
            return ""
        try:
            claim = sockets.listen(f"hora-gpu-{gpu}")  # never accepted from: a connection asks only for its holder
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return f"GPU {gpu}: {sockets.holder(f'hora-gpu-{gpu}') or 'a process that does not answer'}"
        self._held[gpu] = claim
        return ""

    def keep(self, gpus: Collection[str]) -> None:
        """Release all claims but these."""
        for gpu in set(self._held).difference(gpus):
            self._held.pop(gpu).close()
