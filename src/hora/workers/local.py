"""Workers as processes of this machine: cores, memory and GPUs for each, under the launcher's supervisor.

The supervisor sees to it that no worker outlives the session, whatever happens to that. If somebody ends the supervisor
itself, its workers have failed, and the next launch starts another. Called by `session`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hora.launch.host.connection import Host, local_supervisor_command
from hora.launch.job import LaunchEvents, WorkerSpec
from hora.launch.slots import place_ranks
from hora.workers.backend import GRACE_S, Launched, order_bytes
from hora.workers.capacity import Capacity
from hora.workers.gpu_claims import GpuClaims

__all__ = ["LocalWorkers"]

_CLOSE_SLACK_S = 15.0
(_SLOT,) = place_ranks(["localhost"])  # a world of its own


class LocalWorkers:
    """See `backend.Backend`. `environment` is what workers inherit. Calls are serialised by the session."""

    def __init__(self, capacity: Capacity, environment: Mapping[str, str], events: LaunchEvents) -> None:
        self._capacity, self._environment, self._events = capacity, dict(environment), events
        self._claims = GpuClaims()
        self._hosts: list[Host] = []  # the last one is in use

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

    def start(self, launched: Sequence[Launched]) -> None:
        if not self._hosts or self._hosts[-1].ended:
            self._hosts.append(Host("localhost", local_supervisor_command(), self._events))
        self._hosts[-1].start([self._spec(worker) for worker in launched])

    def terminate(self, numbers: Iterable[int], *, grace_s: float) -> None:
        if self._hosts:
            self._hosts[-1].terminate(numbers, grace_s=grace_s)

    def release(self, worker: str) -> None:
        self._capacity = self._capacity.release(worker)
        self._claims.keep(self._capacity.used_gpus())

    def clear_up(self, number: int) -> None:
        """End what the worker has left running, as the end of a container would."""
        if self._hosts:
            self._hosts[-1].clear_up(number, grace_s=GRACE_S)

    def close(self) -> None:
        hosts, self._hosts = self._hosts, []
        for host in hosts:
            host.finish(grace_s=GRACE_S)
        for host in hosts:
            host.wait(GRACE_S + _CLOSE_SLACK_S)
        self._claims.keep(())

    def _spec(self, launched: Launched) -> WorkerSpec:
        grant = self._capacity.grants[launched.record.id]
        own = {"CUDA_VISIBLE_DEVICES": ",".join(grant.gpus), "HORA_WORKER": str(launched.number)}
        return WorkerSpec(
            worker=launched.number,
            slot=_SLOT,
            argv=(sys.executable, "-m", "hora.workers.main"),
            env={**self._environment, **launched.variables, **own, **launched.request["env"]},
            cwd=os.getcwd(),
            secret=order_bytes(launched.request, cores=grant.cores),
            grace_s=GRACE_S,
        )
