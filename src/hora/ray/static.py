"""Executors of a fixed size: one actor per rank, alive from `start` to `shutdown`.

Ray transports calls, results and exceptions. The rendezvous notifies ranks of a lost one, so none waits for it: all
return within seconds of a death.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError

from hora.errors import HorovodInternalError, JobFailedError
from hora.launch.job import STOPPED
from hora.launch.ports import check_ports
from hora.ray.adapter import Adapter, BaseParams, driver_ports, nics_to_env_var
from hora.ray.coordinator import Coordinator
from hora.ray.datasets import check_free_cores, split
from hora.ray.strategy import BaseStrategy, ColocatedStrategy, PGStrategy

# Grace periods for the others to end: after a rank has raised, and after they were notified of the loss.
_GRACE_S, _LIMIT_S = 2.0, 10.0

logger = logging.getLogger("hora.ray")


@dataclass
class StaticParams(BaseParams):
    """Either `num_workers`, or `num_hosts` with the same number of workers on each."""

    elastic = False
    num_workers: int | None = None
    num_hosts: int | None = None
    num_workers_per_host: int | None = 1
    use_current_placement_group: bool = True
    placement_group: Any = None  # the user's own

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_workers and self.num_hosts:
            raise ValueError(
                f"num_workers={self.num_workers} and num_hosts={self.num_hosts} are both given: pass one of them"
            )
        if not self.num_workers and not self.num_hosts:
            raise ValueError("neither num_workers nor num_hosts is given: pass one of them, or min_workers")

    @property
    def adapter(self) -> type[Adapter]:
        return StaticAdapter


class StaticAdapter(Adapter):
    """See `Adapter`."""

    def __init__(self, settings: Any, params: StaticParams) -> None:
        self.settings, self.params = settings, params
        self.workers: list[Any] = []
        self.strategy: BaseStrategy | None = None
        self.coordinator: Coordinator | None = None
        self._broken = ""  # why the executor cannot continue, such as a dead worker
        self._stop_reason = ""

    def start(
        self,
        make_executable: Callable[[], Any] | None,
        env: Mapping[str, str],
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        if self.strategy is not None:
            raise RuntimeError("the executor is already running: call shutdown() first")
        try:
            self.strategy = self._choose_strategy()
            self.workers, _ = self.strategy.create_workers(env, runtime_env)
            envs, executable = self._meet(self.strategy, env), ray.put(make_executable)
            self._outcomes(
                [worker.complete_start.remote(own, executable) for worker, own in zip(self.workers, envs, strict=True)]
            )
        except BaseException:
            self.shutdown()
            raise

    def _choose_strategy(self) -> BaseStrategy:
        params = self.params
        per_host = params.num_workers_per_host or 1
        inherits = params.use_current_placement_group and ray.util.get_current_placement_group() is not None
        if params.num_workers or params.placement_group is not None or inherits:
            return PGStrategy(
                settings=self.settings,
                num_workers=params.num_workers or (params.num_hosts or 1) * per_host,
                placement_group=params.placement_group,
                force_create_placement_group=params.placement_group is None and not params.use_current_placement_group,
                **params.per_worker,
            )
        assert params.num_hosts
        return ColocatedStrategy(
            settings=self.settings, num_hosts=params.num_hosts, num_workers_per_host=per_host, **params.per_worker
        )

    def _meet(self, strategy: BaseStrategy, extra: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the variables of each rank: its devices, its place, the rendezvous, and the user's."""
        coordinator = self.coordinator = Coordinator(self.settings, end=self._stop)
        for rank, place in enumerate(strategy.places):
            coordinator.register(place.hostname, place.node, rank)
        one_node = len(set(coordinator.node_id_by_rank.values())) == 1
        interfaces = nics_to_env_var(self.settings.nics or (["lo"] if one_node else []))
        env = {**interfaces, **driver_ports(), **extra}
        check_ports(Counter(place.node for place in strategy.places), env)
        shared = {**env, **coordinator.establish_rendezvous(), **extra}
        return [
            {**strategy.visible_devices(rank), **place, **shared}
            for rank, place in coordinator.finalize_registration().items()
        ]

    def run_remote(self, fn: Callable[[Any], Any]) -> list[Any]:
        references = self._submit(fn, self._living())
        for rank, worker in enumerate(self.workers):
            # It follows the call, so it reports a death during the call without fetching the result.
            worker.node_id.remote().future().add_done_callback(partial(self._ended, rank))
        return references

    def execute(
        self, fn: Callable[[Any], Any], queue: Any = None, datasets: Mapping[str, Any] | None = None
    ) -> list[Any]:
        workers = self._living()
        assert self.strategy is not None
        if datasets:
            check_free_cores(len(workers), self.params.cpus_per_worker)
        shards = split(datasets, [place.node for place in self.strategy.places]) if datasets else []
        for worker in workers if queue is not None else ():
            worker.set_queue.remote(queue)
        for worker, own in zip(workers, shards, strict=False):
            worker.keep_shards.remote(own)
        try:
            return self._outcomes(self._submit(fn, workers))
        finally:
            for worker in self.workers if queue is not None else ():
                worker.set_queue.remote(None)
            for worker in self.workers if shards else ():
                worker.keep_shards.remote({})

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        return self._outcomes(self._submit(fn, self._living()[:1]))[0]

    def _living(self) -> list[Any]:
        if not self.workers:
            raise RuntimeError("the executor is not running: call start() first")
        if self._broken:
            raise RuntimeError(f"the executor cannot continue: {self._broken}; call shutdown(), then start() again")
        return self.workers

    def _submit(self, fn: Callable[[Any], Any], workers: Sequence[Any]) -> list[Any]:
        call = ray.put(fn)  # pickled once
        return [worker.execute.remote(call) for worker in workers]

    def _ended(self, rank: int, future: Any) -> None:
        if isinstance(future.exception(), RayActorError):
            self._tell_of({rank: future.exception()})

    # ---- outcomes -------------------------------------------------------------------------------------------

    def _outcomes(self, references: Sequence[Any]) -> list[Any]:
        """Return the values of all ranks, or raise the error of the first failed one. No rank keeps waiting for it."""
        ranks = {reference: rank for rank, reference in enumerate(references)}
        values: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        left, limit, notified = list(references), None, False
        while left:
            wait_s = None if limit is None else max(limit - time.monotonic(), 0.0)
            ready, left = ray.wait(left, timeout=wait_s)
            for reference in ready:
                try:
                    values[ranks[reference]] = ray.get(reference)
                except Exception as error:  # raised by the function
                    errors[ranks[reference]] = error
            if errors and limit is None:
                limit = time.monotonic() + _GRACE_S
            died = any(isinstance(error, RayActorError) for error in errors.values())
            if errors and not notified and (died or (limit is not None and time.monotonic() >= limit)):
                notified, limit = True, time.monotonic() + _LIMIT_S
                self._tell_of(errors)
            elif not ready and notified:
                break
        if errors:
            self._fail(errors)
        return [values[rank] for rank in range(len(references))]

    def _tell_of(self, errors: Mapping[int, Exception]) -> None:
        if self.coordinator is not None:
            for rank, error in errors.items():
                died = isinstance(error, RayActorError)
                self.coordinator.lost(rank, "died" if died else f"raised {type(error).__name__}")

    def _fail(self, errors: Mapping[int, Exception]) -> None:
        """Raise the first error, unless it only reports another rank."""
        if self._stop_reason:
            self._close_meeting("stopped", self._stop_reason)
            raise JobFailedError(self._broken, exit_code=STOPPED)
        dead = {rank: error for rank, error in errors.items() if isinstance(error, RayActorError)}
        if dead:
            rank, error = next(iter(dead.items()))
            where = self.strategy.places[rank] if self.strategy is not None and self.strategy.places else "unknown"
            self._broken = f"rank {rank} died: {where}"
            self._end_workers()
            self._close_meeting("failed", self._broken)
            raise JobFailedError(f"{self._broken}\n{error}", rank=rank) from error
        if self.coordinator is not None:
            self.coordinator.begin_anew()
        causes = [error for error in errors.values() if not isinstance(error, HorovodInternalError)]
        raise (causes or list(errors.values()))[0]

    def _stop(self, why: str) -> None:
        """End the job from the page, on the page's thread: a caller that waits for the workers sees them die."""
        self._stop_reason, self._broken = why, f"the job was stopped: {why}"
        self._end_workers()

    def _end_workers(self) -> None:
        assert self.strategy is not None
        for worker in self.strategy.workers:  # also those of an incomplete start
            with contextlib.suppress(Exception):  # it is gone already
                ray.kill(worker)

    def shutdown(self) -> None:
        if self.strategy is not None and ray.is_initialized():  # otherwise Ray has ended everything already
            self._end_workers()
            self.strategy.shutdown()
        self._close_meeting("stopped" if self._stop_reason else "done", self._stop_reason)
        self.workers, self.strategy = [], None
        self._broken = self._stop_reason = ""

    def _close_meeting(self, outcome: str, text: str) -> None:
        coordinator, self.coordinator = self.coordinator, None
        if coordinator is not None:
            coordinator.close(outcome, text)
