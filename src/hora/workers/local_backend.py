"""Workers as processes of this machine: cores, memory and GPUs for each, under the launcher's supervisor.

The supervisor sees to it that no worker outlives the session, whatever happens to that. If the supervisor itself is
killed, its workers have failed, and the next launch starts another. Called by `session`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hora.launch.host.launcher import HostLauncher
from hora.launch.job import LaunchEvents, WorkerSpec
from hora.launch.python import module_command
from hora.launch.slots import place_ranks
from hora.workers.backend import GRACE_S, PlannedWorker, order_file
from hora.workers.capacity import Capacity
from hora.workers.gpu_claims import GpuClaims

__all__ = ["LocalBackend"]

(_SLOT,) = place_ranks(["localhost"])  # a world of its own


class LocalBackend:
    """See `backend.Backend`. `environment` is what workers inherit. Calls are serialised by the session."""

    def __init__(self, capacity: Capacity, environment: Mapping[str, str], events: LaunchEvents) -> None:
        self._capacity, self._environment, self._events = capacity, dict(environment), events
        self._claims = GpuClaims()
        self._launcher = HostLauncher()

    def settle(self, n: int) -> None:
        pass  # what this machine has is known

    def reserve(self, worker: str, request: Mapping[str, Any]) -> None:
        try:
            self._capacity = self._capacity.grant(
                worker,
                cpu=request["cpu"],
                memory_gib=request["memory"],
                num_gpus=request["nvidia_gpu"],
                claim=self._claims.claim,
            )
        finally:
            self._claims.keep(self._capacity.used_gpus())

    def start(self, planned: Sequence[PlannedWorker]) -> None:
        self._launcher.start([self._spec(worker) for worker in planned], self._events)

    def terminate(self, numbers: Iterable[int], *, grace_s: float) -> None:
        self._launcher.terminate(numbers, grace_s=grace_s)

    def release(self, worker: str) -> None:
        self._capacity = self._capacity.release(worker)
        self._claims.keep(self._capacity.used_gpus())

    def clear_up(self, number: int) -> None:
        """End what the worker has left running, as the end of a container would."""
        self._launcher.clear_up(number, grace_s=GRACE_S)

    def close(self) -> None:
        self._launcher.close()
        self._claims.keep(())

    def _spec(self, planned: PlannedWorker) -> WorkerSpec:
        grant = self._capacity.grants[planned.record.id]
        own = {"CUDA_VISIBLE_DEVICES": ",".join(grant.gpus), "HORA_WORKER": str(planned.number)}
        return WorkerSpec(
            worker=planned.number,
            slot=_SLOT,
            argv=module_command(sys.executable, "hora.workers.main"),
            env={**self._environment, **planned.variables, **own, **planned.request["env"]},
            cwd=os.getcwd(),
            private_files=order_file(planned.request, cores=grant.cores),
            grace_s=GRACE_S,
        )
