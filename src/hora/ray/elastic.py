"""Elastic executors: the workers come and go, and the training goes on with those that are there.

The job is carried out by the controller of all elastic jobs (`launch.control`); Ray reserves the slots and starts the
processes (`launch.ray`). A worker that dies costs that worker: the others keep their processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cloudpickle
import ray

from hora.launch.controller.elastic_policy import Limits
from hora.launch.controller.hosts import ElasticSpec
from hora.launch.controller.loop import run_job
from hora.launch.controller.observer import Watching
from hora.launch.environment import variables
from hora.launch.job import Job
from hora.launch.pickling import pickle_call
from hora.launch.providers.ray.actor import Call, perform
from hora.launch.providers.ray.hosts import RayHosts
from hora.launch.providers.ray.launcher import RayLauncher
from hora.launch.providers.ray.reservations import Reservations
from hora.launch.slots import HostInfo, place_ranks
from hora.legacy import elastic as elastic_driver
from hora.legacy.elastic import ElasticDriver
from hora.ray import ray_logger
from hora.ray.adapter import Adapter, BaseParams
from hora.ray.coordinator import driver_address
from hora.ray.discovery import RayHostDiscovery
from hora.ray.interfaces import nics_to_env_var

__all__ = ["ElasticAdapter", "ElasticParams"]

# A process that fails says little about its node. One that has failed so often is left alone.
_FORGIVEN = 3


@dataclass
class ElasticParams(BaseParams):
    """No fewer workers than `min_workers`, no more than `max_workers`."""

    min_workers: int = 1
    max_workers: int | None = None
    reset_limit: int | None = None
    cooldown_range: tuple[int, int] | None = None
    elastic_timeout: float = 600
    override_discovery: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_workers < 1:
            raise ValueError(f"min_workers must be at least 1, but it is {self.min_workers}")
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(f"max_workers is {self.max_workers}, which is less than min_workers={self.min_workers}")

    @property
    def elastic(self) -> bool:
        return True

    @property
    def adapter(self) -> type[Adapter]:
        return ElasticAdapter


class ElasticAdapter(Adapter):
    """See `Adapter`. `override_discovery=False`: hosts come from `settings.discovery`, not from Ray."""

    def __init__(
        self,
        settings: Any,
        min_workers: int,
        max_workers: int | None = None,
        use_gpu: bool = False,
        cpus_per_worker: int = 1,
        gpus_per_worker: int | None = None,
        override_discovery: bool = True,
        reset_limit: int | None = None,
        cooldown_range: tuple[int, int] | None = None,
        elastic_timeout: float = 600,
    ) -> None:
        self.settings, self.use_gpu = settings, use_gpu
        self.cpus_per_worker, self.gpus_per_worker = cpus_per_worker, (gpus_per_worker or 1) if use_gpu else 0
        self.cooldown_range = cooldown_range
        self.limits = Limits(
            num_proc=min_workers,
            min_num_proc=min_workers,
            max_num_proc=max_workers,
            reset_limit=reset_limit,
            elastic_timeout_s=elastic_timeout,
            stuck_s=max(elastic_timeout / 2, 1.0),
        )
        if override_discovery:
            settings.discovery = RayHostDiscovery(use_gpu, cpus_per_worker, self.gpus_per_worker or 1)
        self.driver = ElasticDriver()
        self._reservations: Reservations | None = None
        self._hosts: RayHosts | None = None
        self._begin_with: list[HostInfo] = []
        self._make_executable: Callable[[], Any] | None = None
        self._env: dict[str, str] = {}

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        if self._reservations is not None:
            raise RuntimeError("the executor runs already: call shutdown() first")
        self._env = {name: str(value) for name, value in (extra_env_vars or {}).items()}
        if executable_cls is not None:
            self._make_executable = partial(executable_cls, *(executable_args or ()), **(executable_kwargs or {}))
        self._reservations = Reservations(
            {"CPU": self.cpus_per_worker, "GPU": self.gpus_per_worker}, self.limits.max_num_proc
        )
        interval_s = lambda: float(elastic_driver.DISCOVER_HOSTS_FREQUENCY_SECS)  # noqa: E731
        self._hosts = RayHosts(self.settings.discovery, self._reservations, interval_s)
        try:
            self._begin_with = self._hosts.wait_for(self.limits.num_proc, self.limits.elastic_timeout_s)
        except BaseException:
            self.shutdown()
            raise

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        queue: Any = None,
    ) -> list[Any]:
        return self._run(Call(function=fn, args=tuple(args or ()), kwargs=dict(kwargs or {})), queue)

    def execute(self, fn: Callable[[Any], Any], queue: Any = None) -> list[Any]:
        return self._run(Call(function=fn), queue, passes_executable=True)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        raise NotImplementedError("an elastic executor has no run_remote(), because its workers come and go: use run()")

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        raise NotImplementedError(
            "an elastic executor has no execute_single(), because its workers come and go: use run()"
        )

    def _run(self, call: Call, queue: Any, *, passes_executable: bool = False) -> list[Any]:
        """The values of the workers of the last generation that returned, in rank order."""
        if self._reservations is None or self._hosts is None:
            raise RuntimeError("the executor does not run: call start() first")
        prepare = None if queue is None else partial(ray_logger.configure, queue)
        call = replace(
            call, prepare=prepare, make_executable=self._make_executable, passes_executable=passes_executable
        )
        launcher = RayLauncher(
            self._reservations,
            address=driver_address(self.settings.nics),
            call=ray.put(call),
            options=self._actor_options(),
            use_gpu=self.use_gpu,
        )
        spec = ElasticSpec(
            limits=self.limits,
            hosts=tuple(self._begin_with),
            script=self._hosts,
            cooldown_range=self.cooldown_range,
            forgiven=_FORGIVEN,
            on_places=self.driver.places,
        )
        try:
            result = run_job(self._job(), launcher, spec)
        finally:
            self.driver.stop()
        return [cloudpickle.loads(value) for value in result.results if value is not None]

    def _job(self) -> Job:
        return Job(
            slots=tuple(place_ranks([host.hostname for host in self._begin_with for _ in range(host.slots)])),
            function=pickle_call(perform),
            env={**nics_to_env_var(self.settings.nics or ()), **self._env, **self.limits.worker_env()},
            start_timeout_s=self.settings.start_timeout.remaining(),
            verbose=bool(self.settings.verbose and self.settings.verbose > 1),
            title="horovod.ray",
            watching=Watching.wanted(variables()),
        )

    def _actor_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"num_cpus": self.cpus_per_worker, "num_gpus": self.gpus_per_worker}
        return options | ({"runtime_env": {"env_vars": self._env}} if self._env else {})

    def shutdown(self) -> None:
        if self._hosts is not None:
            self._hosts.close()
        if self._reservations is not None:
            self._reservations.close()
        self._hosts = self._reservations = None
