"""The launcher for Ray: each worker of an elastic job is an actor in the placement group of its slot. See
`job.Launcher`.

Ray starts the processes, reports when they end, even if their node is lost, and shows their output at the driver. It
ends them with the driver.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hora.launch.agent.protocol import Exited
from hora.launch.job import LaunchEvents, WorkerSpec
from hora.launch.limits import END_S
from hora.launch.providers.ray.actor import ActorProcess, RayWorker
from hora.launch.providers.ray.reservations import Reservation, Reservations
from hora.launch.slots import visible_gpus

_KILLED = 137


@dataclass(eq=False)
class _Member:
    """A worker and its actor. `peers`: workers of its host that were started with it."""

    spec: WorkerSpec
    actor: Any
    reservation: Reservation
    peers: list[_Member]
    place: ActorProcess | None = None
    status: int | None = None
    work: Any = field(default=None, repr=False)
    ended: bool = False


class RayLauncher:
    """`call`: a reference to the `Call` that every worker performs. `options`: of its actors, such as their resources.

    `address`: this process's, where every node reaches it. `use_gpu`: workers see the GPUs that Ray gave them.
    """

    def __init__(
        self, reservations: Reservations, *, address: str, call: Any, options: Mapping[str, Any], use_gpu: bool
    ) -> None:
        self.bind_address = self.advertised_address = address
        self._reservations, self._call, self._use_gpu = reservations, call, use_gpu
        self._actor_class, self._options = ray.remote(RayWorker), dict(options)
        self._changed = threading.Condition()
        self._members: dict[int, _Member] = {}
        self._events: LaunchEvents | None = None
        self._happened: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, workers: Sequence[WorkerSpec], events: LaunchEvents) -> None:
        self._events = events
        if self._thread is None:
            self._thread = threading.Thread(target=self._take_note, name="hora-ray-launcher", daemon=True)
            self._thread.start()
        by_host: dict[str, list[_Member]] = {}
        for spec in workers:
            # A new worker's local rank is its slot's number, as at the start of the job.
            reservation = self._reservations.get(spec.slot.hostname, spec.slot.local_rank)
            if reservation is None:
                reason = f"slot {spec.slot.local_rank} of {spec.slot.hostname} is gone"
                events.exited(Exited(worker=spec.worker, code=_KILLED, reason=reason))
                continue
            peers = by_host.setdefault(spec.slot.hostname, [])
            member = _Member(spec=spec, actor=self._create(reservation), reservation=reservation, peers=peers)
            peers.append(member)
            self._reservations.enter(reservation)
            with self._changed:
                self._members[spec.worker] = member
        for peers in by_host.values():
            for member in list(peers):
                self._when_done(member.actor.place.remote(), functools.partial(self._placed, member))

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
        with self._changed:
            left = list(self._members)
        if ray.is_initialized():
            self.terminate(left, grace_s=0.0)
            with self._changed:
                self._changed.wait_for(lambda: all(one.ended for one in self._members.values()), END_S)
        if self._thread is not None:
            self._happened.put(None)
            self._thread.join(END_S)
            self._thread = None

    # ---- in the launcher's thread ---------------------------------------------------------------------------

    def _take_note(self) -> None:
        while (happened := self._happened.get()) is not None:
            happened()

    def _when_done(self, reference: Any, then: Callable[[Any, BaseException | None], None]) -> None:
        """Call `then` with the value or the error, outside Ray's own thread, which must not wait for Ray."""

        def done(future: Any) -> None:
            error = future.exception()
            value = None if error is not None else future.result()
            self._happened.put(lambda: then(value, error))

        reference.future().add_done_callback(done)

    def _placed(self, member: _Member, place: ActorProcess | None, error: BaseException | None) -> None:
        if place is None:
            self._over(member, *_reason(error))
            return
        assert self._events is not None
        self._events.started(member.spec.worker)
        with self._changed:
            member.place = place
            # With GPUs, workers that start together wait for each other, because each needs the GPUs of all.
            waits = self._use_gpu and any(one.place is None and not one.ended for one in member.peers)
            ready = [] if waits else [one for one in member.peers if one.place and one.work is None and not one.ended]
            if not self._use_gpu:
                ready = [member]
            for one in ready:
                one.work = True
        for one in ready:
            env = {**one.spec.env, **self._gpu_variables(one)}
            one.work = one.actor.work.remote(env, one.spec.private_files["HORA_SECRET_FILE"], self._call)
            self._when_done(one.work, functools.partial(self._worked, one))

    def _gpu_variables(self, member: _Member) -> dict[str, str]:
        assert member.place is not None
        if not self._use_gpu:
            return {}
        with self._changed:
            here = [one for one in self._members.values() if one.place and one.place.node == member.place.node]
            living = sorted((one for one in here if not one.ended), key=lambda one: one.spec.slot.local_rank)
            gpus = visible_gpus(member.place.gpus, [one.place.gpus for one in living if one.place])
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}

    def _worked(self, member: _Member, status: int | None, error: BaseException | None) -> None:
        if status is None:
            self._over(member, *_reason(error))
            return
        member.status = status
        # The interpreter runs its exit handlers; `terminate` ends one that hangs.
        self._when_done(member.actor.__ray_terminate__.remote(), lambda *_: self._over(member, status, ""))

    def _over(self, member: _Member, code: int, reason: str) -> None:
        with self._changed:
            if member.ended:
                return
            member.ended = True
            self._changed.notify_all()
        self._reservations.leave(member.reservation)
        ray.kill(member.actor)
        if member.status is not None:
            code, reason = member.status, ""
        elif member.place is not None:
            reason = f"{reason}: {member.place}"
        assert self._events is not None
        self._events.exited(Exited(worker=member.spec.worker, code=code, reason=reason))


def _reason(error: BaseException | None) -> tuple[int, str]:
    """Return an exit status and a reason for a failed call."""
    if isinstance(error, RayActorError):
        lines = [line.strip() for line in str(error).splitlines() if line.startswith("The actor ") or "OOM" in line]
        return _KILLED, " ".join(lines[:1] or ["its Ray actor died"])
    return 1, f"its Ray actor could not run it: {str(error).strip().splitlines()[-1] if error else 'no reason given'}"
