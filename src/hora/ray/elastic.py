"""Elastic executors: workers join and leave, and the training continues with the remaining ones.

The controller of all elastic jobs runs the job; Ray reserves the slots and starts the processes. A worker's death costs
only that worker: the others keep their processes.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from hora.launch.controller.hosts import ElasticSpec
from hora.launch.controller.loop import run_job
from hora.launch.controller.policy import Limits
from hora.launch.environment import variables
from hora.launch.job import Job, Watching
from hora.launch.pickling import pickle_call
from hora.launch.providers.ray.actor import perform
from hora.launch.providers.ray.launcher import RayLauncher
from hora.launch.providers.ray.reservations import RayHosts
from hora.launch.run import renamed
from hora.launch.slots import HostInfo, place_ranks
from hora.legacy import elastic as elastic_driver
from hora.legacy.elastic import ElasticDriver, HostDiscovery
from hora.legacy.runner import ElasticSettings, Timeout
from hora.ray import ray_logger
from hora.ray.adapter import Adapter, BaseParams, driver_ports, nics_to_env_var, process_options
from hora.ray.coordinator import driver_address
from hora.ray.ray_logger import Callback, queue_for

_log = logging.getLogger("hora.ray")
# A failed process says little about its node, but after this many failures the node is not used any more.
_FORGIVEN = 3


class RayHostDiscovery(HostDiscovery):
    """The nodes that are alive and not draining, by address."""

    def __init__(self, use_gpu: bool = False, cpus_per_worker: int = 1, gpus_per_worker: int = 1) -> None:
        self.use_gpu, self.cpus_per_worker, self.gpus_per_worker = use_gpu, cpus_per_worker, gpus_per_worker

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        found: dict[str, int] = {}
        leaving = _draining_nodes()
        for node in ray.nodes():
            if not node["alive"] or node.get("NodeID") in leaving:
                continue
            resources, address = node["Resources"], node["NodeManagerAddress"]
            slots = resources.get("CPU", 0) // self.cpus_per_worker
            if self.use_gpu:
                slots = min(slots, resources.get("GPU", 0) // self.gpus_per_worker)
            if slots > 0:
                found[address] = found.get(address, 0) + int(slots)
        return found


class RaySlotDiscovery(RayHostDiscovery):
    """The same, with the arguments' older names."""

    def __init__(self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int = 1) -> None:
        super().__init__(use_gpu, cpus_per_slot, gpus_per_slot)


def _draining_nodes() -> set[str]:
    """Return the nodes whose preemption the cloud has announced to Ray."""
    if not ray.is_initialized() or ray.util.client.ray.is_connected():
        return set()
    from ray._private.state import state  # there is no public API

    return set(state.get_draining_nodes())


class TestDiscovery(RayHostDiscovery):
    """Removes and restores nodes at random, to test a training function."""

    __test__ = False  # it is not a pytest test

    def __init__(
        self,
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus_per_worker: int = 1,
        gpus_per_worker: int = 1,
        verbose: bool = True,
        _graceful: bool = True,
    ) -> None:
        super().__init__(use_gpu, cpus_per_worker, gpus_per_worker)
        self._min_hosts, self._max_hosts, self._change_frequency_s = min_hosts, max_hosts, change_frequency_s
        self._verbose, self._graceful = verbose, _graceful
        self._removed: set[str] = set()
        self._changed_at = time.monotonic()

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        found = super().find_available_hosts_and_slots()
        if time.monotonic() - self._changed_at > self._change_frequency_s:
            self._changed_at = time.monotonic()
            self._change(found)
        kept = [host for host in found if host not in self._removed][: self._max_hosts]
        return {host: found[host] for host in kept}

    def _change(self, found: dict[str, int]) -> None:
        shown = [host for host in found if host not in self._removed]
        removed = [host for host in found if host in self._removed]
        may = {"take": len(shown) > self._min_hosts, "give": bool(removed) and len(shown) < self._max_hosts}
        choice = random.choice([name for name, allowed in may.items() if allowed] or [""])
        if choice == "take":
            host = random.choice(shown)
            self._removed.add(host)
            if not self._graceful:
                _end_workers_on(host)
        elif choice == "give":
            host = random.choice(removed)
            self._removed.discard(host)
        if choice and self._verbose:
            _log.warning("the discovery %ss %s; it now has %s", choice, host, sorted(set(found) - self._removed))


def _end_workers_on(host: str) -> None:
    """Kill this job's actors on a node, like a machine that fails without notice."""
    nodes = {node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == host}
    job = ray.get_runtime_context().get_job_id()
    driver: Any = ray._private.worker.global_worker
    for actor, facts in ray._private.state.actors().items():
        if facts["State"] == "ALIVE" and facts["JobID"] == job and facts["Address"]["NodeID"] in nodes:
            driver.core_worker.kill_actor(ray.ActorID.from_hex(actor), True)


@dataclass
class ElasticParams(BaseParams):
    """Between `min_workers` and `max_workers` workers."""

    elastic = True
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
    def adapter(self) -> type[Adapter]:
        return ElasticAdapter


class ElasticAdapter(Adapter):
    """See `Adapter`. With `override_discovery=False` hosts come from `settings.discovery`, not from Ray."""

    def __init__(self, settings: Any, params: ElasticParams) -> None:
        self.settings, self.params = settings, params
        self.limits = Limits(
            num_proc=params.min_workers,
            min_num_proc=params.min_workers,
            max_num_proc=params.max_workers,
            reset_limit=params.reset_limit,
            elastic_timeout_s=params.elastic_timeout,
            stuck_s=max(params.elastic_timeout / 2, 1.0),
        )
        if params.override_discovery:
            settings.discovery = RayHostDiscovery(params.use_gpu, params.cpus_per_worker, params.gpus_per_worker or 1)
        self.driver = ElasticDriver()
        self._hosts: RayHosts | None = None
        self._begin_with: list[HostInfo] = []
        self._make_executable: Callable[[], Any] | None = None
        self._env: dict[str, str] = {}
        self._runtime_env: Mapping[str, Any] | None = None

    def start(
        self,
        make_executable: Callable[[], Any] | None,
        env: Mapping[str, str],
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        if self._hosts is not None:
            raise RuntimeError("the executor is already running: call shutdown() first")
        self._make_executable, self._env, self._runtime_env = make_executable, dict(env), runtime_env
        resources = {"CPU": self.params.cpus_per_worker, "GPU": self.params.gpus_per_worker or 0}
        interval_s = lambda: float(elastic_driver.DISCOVER_HOSTS_FREQUENCY_SECS)  # noqa: E731
        most = self.limits.max_num_proc
        self._hosts = RayHosts(self.settings.discovery, interval_s, resources=resources, most=most)
        try:
            self._begin_with = self._hosts.wait_for(self.limits.num_proc, self.limits.elastic_timeout_s)
        except BaseException:
            self.shutdown()
            raise

    def run_remote(self, fn: Callable[[Any], Any]) -> list[Any]:
        raise NotImplementedError("an elastic executor has no run_remote(), because its workers change: use run()")

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        raise NotImplementedError("an elastic executor has no execute_single(), because its workers change: use run()")

    def execute(
        self, fn: Callable[[Any], Any], queue: Any = None, datasets: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Return the values of the last generation's workers, in rank order."""
        if datasets:
            raise ValueError(
                "the workers of an elastic executor change, but a dataset is split once: use num_workers instead of "
                "min_workers, or read the data in the function, each rank its part"
            )
        if self._hosts is None:
            raise RuntimeError("the executor is not running: call start() first")
        make_executable = self._make_executable

        def call() -> Any:
            ray_logger.configure(queue)
            return fn(None if make_executable is None else make_executable())

        per_worker = {"num_cpus": self.params.cpus_per_worker, "num_gpus": self.params.gpus_per_worker}
        launcher = RayLauncher(
            self._hosts,
            address=driver_address(self.settings.nics),
            call=ray.put(call),
            options={**per_worker, **process_options(self._env, self._runtime_env)},
            use_gpu=self.params.use_gpu,
        )
        spec = ElasticSpec(
            limits=self.limits,
            hosts=tuple(self._begin_with),
            script=self._hosts,
            cooldown_range=self.params.cooldown_range,
            forgiven=_FORGIVEN,
            on_places=self.driver.places,
        )
        job = Job(
            slots=tuple(place_ranks([host.hostname for host in self._begin_with for _ in range(host.slots)])),
            function=pickle_call(perform),
            env={
                **nics_to_env_var(self.settings.nics or ()),
                **driver_ports(),
                **self._env,
                **self.limits.worker_env(),
            },
            start_timeout_s=self.settings.start_timeout.remaining(),
            verbose=bool(self.settings.verbose and self.settings.verbose > 1),
            title="horovod.ray",
            watching=Watching.wanted(variables()),
        )
        try:
            return run_job(job, launcher, spec).values()
        finally:
            self.driver.stop()

    def shutdown(self) -> None:
        hosts, self._hosts = self._hosts, None
        if hosts is not None:
            hosts.close()
            hosts.release()


class ElasticRayExecutor:
    """`start`, then `run`, which releases everything. New programs use `RayExecutor(min_workers=…)`.

    Args:
        settings: What `create_settings` returned.
        use_gpu: Give GPUs to the ranks.
        cpus_per_slot: Cores of each rank.
        gpus_per_slot: GPUs of each rank.
        env_vars: Environment variables of the ranks, a dict.
        override_discovery: Ask the Ray cluster which hosts there are.
    """

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: int = 30,
        ssh_identity_file: str | None = None,
        nics: Collection[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> ElasticSettings:
        """Return settings for an executor.

        Args:
            min_num_proc: Smallest number of workers.
            max_num_proc: Largest number; by default the cluster's slots.
            reset_limit: Largest number of membership changes; by default unlimited.
            elastic_timeout: Seconds to wait for enough slots after a change.
            timeout_s: Time limit for the workers to start and meet.
            ssh_identity_file: Without effect: Ray uses no ssh.
            nics: Network interfaces to use; by default those that reach the driver.
            min_np: Old name of `min_num_proc`.
            max_np: Old name of `max_num_proc`.
            **kwargs: Further settings of `ElasticSettings`.
        """
        fewest = renamed("min_np", min_np, "min_num_proc", min_num_proc)
        return ElasticSettings(
            discovery=None,
            min_num_proc=fewest,
            max_num_proc=renamed("max_np", max_np, "max_num_proc", max_num_proc),
            elastic_timeout=elastic_timeout,
            reset_limit=reset_limit,
            num_proc=fewest,
            ssh_identity_file=ssh_identity_file,
            nics=nics,
            start_timeout=Timeout(timeout_s, message="Timed out waiting for {activity}. Raise timeout_s."),
            **kwargs,
        )

    def __init__(
        self,
        settings: Any,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        self.settings, self.env_vars = settings, dict(env_vars or {})
        params = ElasticParams(
            min_workers=settings.min_num_proc or 1,
            max_workers=settings.max_num_proc,
            cpus_per_worker=cpus_per_slot,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_slot,
            override_discovery=override_discovery,
            reset_limit=settings.reset_limit,
            cooldown_range=settings.cooldown_range,
            elastic_timeout=settings.elastic_timeout or elastic_driver.ELASTIC_TIMEOUT_SECS,
        )
        self._adapter = ElasticAdapter(settings, params)

    @property
    def driver(self) -> ElasticDriver:
        return self._adapter.driver

    def start(self) -> None:
        """Wait until the cluster has room for as many workers as the job needs."""
        self._adapter.start(None, {name: str(value) for name, value in self.env_vars.items()})

    def run(self, worker_fn: Callable[[], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        """Call `worker_fn()` on all workers; returns the values in rank order."""
        try:
            with queue_for(callbacks) as queue:
                return self._adapter.execute(lambda _: worker_fn(), queue)
        finally:
            self._adapter.shutdown()
