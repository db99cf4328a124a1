"""The launcher for Ray: each worker of an elastic job is an actor in the placement group of its slot. See
`job.Launcher`.

Ray starts the processes, reports when they end, even if their node is lost, and shows their output at the driver. It
ends them with the driver. A thread of each worker waits for them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hora.launch.agent.protocol import Exited
from hora.launch.job import LaunchEvents, WorkerSpec
from hora.launch.limits import CONNECT_S, END_S
from hora.launch.providers.ray.actor import ActorProcess, RayWorker
from hora.launch.providers.ray.reservations import RayHosts, Reservation
from hora.launch.slots import visible_gpus

_KILLED = 137


@dataclass(eq=False)
class _Member:
    """A worker and its actor."""

    spec: WorkerSpec
    actor: Any
    reservation: Reservation
    peers: list[_Member]  # workers of its host that were started with it
    place: ActorProcess | None = None
    ended: bool = False


class RayLauncher:
    """`call`: a reference to the function that every worker calls. `options`: of its actors, such as their resources.

    `address`: this process's, where every node reaches it. `use_gpu`: workers see the GPUs that Ray gave them.
    """

    def __init__(self, hosts: RayHosts, *, address: str, call: Any, options: Mapping[str, Any], use_gpu: bool) -> None:
        self.bind_address = self.advertised_address = address
        self._hosts, self._call, self._use_gpu = hosts, call, use_gpu
        self._actor_class, self._options = ray.remote(RayWorker), dict(options)
        self._changed = threading.Condition()
        self._members: dict[int, _Member] = {}

    def start(self, workers: Sequence[WorkerSpec], events: LaunchEvents) -> None:
        by_host: dict[str, list[_Member]] = {}
        for spec in workers:
            # A new worker's local rank is its slot's number, as at the start of the job.
            reservation = self._hosts.enter(spec.slot.hostname, spec.slot.local_rank)
            if reservation is None:
                reason = f"slot {spec.slot.local_rank} of {spec.slot.hostname} is gone"
                events.exited(Exited(worker=spec.worker, code=_KILLED, reason=reason))
                continue
            peers = by_host.setdefault(spec.slot.hostname, [])
            member = _Member(spec=spec, actor=self._create(reservation), reservation=reservation, peers=peers)
            peers.append(member)
            with self._changed:
                self._members[spec.worker] = member
        for member in (member for peers in by_host.values() for member in peers):
            name = f"hora-ray-worker {member.spec.worker}"
            threading.Thread(target=self._run, args=(member, events), name=name, daemon=True).start()

    def _create(self, reservation: Reservation) -> Any:
        strategy = PlacementGroupSchedulingStrategy(
            reservation.group, placement_group_bundle_index=0, placement_group_capture_child_tasks=False
        )
        return self._actor_class.options(scheduling_strategy=strategy, **self._options).remote()

    def terminate(self, workers: Iterable[int], *, grace_s: float) -> None:
        """Kill at once: Ray has no SIGTERM, and a worker that stops at a commit exits by itself."""
        with self._changed:
            chosen = [self._members[worker] for worker in workers if worker in self._members]
        for member in chosen:
            if not member.ended:
                ray.kill(member.actor)

    def close(self) -> None:
        if ray.is_initialized():
            self.terminate(list(self._members), grace_s=0.0)
            with self._changed:
                self._changed.wait_for(lambda: all(one.ended for one in self._members.values()), END_S)

    # ---- in a thread of each worker -------------------------------------------------------------------------

    def _run(self, member: _Member, events: LaunchEvents) -> None:
        """Run a worker to its end."""
        try:
            place = ray.get(member.actor.place.remote())
            with self._changed:
                member.place = place
                self._changed.notify_all()
            events.started(member.spec.worker)
            env = {**member.spec.env, **self._gpu_variables(member, place)}
            secret = member.spec.private_files["HORA_SECRET_FILE"]
            code, reason = ray.get(member.actor.work.remote(env, secret, self._call)), ""
            # The interpreter runs its exit handlers; `terminate` ends one that hangs.
            with contextlib.suppress(Exception):
                ray.get(member.actor.__ray_terminate__.remote())
        except Exception as error:  # Ray's, or one that the actor raised
            code, reason = _reason(error)
            if member.place is not None:
                reason = f"{reason}: {member.place}"
        with self._changed:
            member.ended = True
            self._changed.notify_all()
        self._hosts.leave(member.reservation)
        ray.kill(member.actor)
        events.exited(Exited(worker=member.spec.worker, code=code, reason=reason))

    def _gpu_variables(self, member: _Member, place: ActorProcess) -> dict[str, str]:
        if not self._use_gpu:
            return {}
        with self._changed:
            # Workers that start together wait for each other, because each needs the GPUs of all.
            self._changed.wait_for(lambda: all(one.place or one.ended for one in member.peers), CONNECT_S)
            here = [one for one in self._members.values() if one.place and one.place.node == place.node]
            living = sorted((one for one in here if not one.ended), key=lambda one: one.spec.slot.local_rank)
            gpus = visible_gpus(place.gpus, [one.place.gpus for one in living if one.place])
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def _reason(error: Exception) -> tuple[int, str]:
    """Return an exit status and a reason for a failed call."""
    if isinstance(error, RayActorError):
        lines = [line.strip() for line in str(error).splitlines() if line.startswith("The actor ") or "OOM" in line]
        return _KILLED, " ".join(lines[:1] or ["its Ray actor died"])
    return 1, f"its Ray actor could not run it: {(str(error).strip() or repr(error)).splitlines()[-1]}"
