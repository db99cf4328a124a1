"""Placement of a static executor's actors: in a new placement group, or in the caller's."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hora.launch.environment import set_variables, variables
from hora.launch.providers.ray.actor import ActorProcess, node_id, this_process
from hora.launch.slots import visible_gpus
from hora.platforms.detect import keep_secret
from hora.ray import ray_logger
from hora.ray.adapter import process_options
from hora.ray.datasets import keep_shards

Bundle = Mapping[str, float]


class BaseHorovodWorker:
    """A rank's process. It keeps all its state until the executor is shut down."""

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        place = {"HOROVOD_HOSTNAME": self.node_id(), "HOROVOD_RANK": world_rank, "HOROVOD_SIZE": world_size}
        self.update_env_vars(place)

    def node_id(self) -> str:
        """Return Ray's id of the node, in hexadecimal. Ranks with the same id are on one host."""
        return node_id()

    def hostname(self) -> str:
        return socket.gethostname()

    def place(self) -> ActorProcess:
        """Return everything that the executor needs to know."""
        return this_process()

    def get_gpu_ids(self) -> list[Any]:
        return list(ray.get_gpu_ids())

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        set_variables({name: str(value) for name, value in env_vars.items()})
        keep_secret()

    def env_vars(self) -> dict[str, str]:
        return variables()

    def start_executable(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if executable_cls is not None:
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def complete_start(self, env_vars: Mapping[str, Any], make_executable: Callable[[], Any] | None) -> None:
        """Complete the start: first the environment, because the executable may call `hvd.init()`."""
        self.update_env_vars(env_vars)
        self.start_executable(make_executable)

    def execute(self, func: Callable[[Any], Any]) -> Any:
        return func(self.executable)

    def keep_shards(self, shards: Mapping[str, Any]) -> None:
        """Set the shards of `get_dataset_shard`."""
        keep_shards(shards)

    def set_queue(self, queue: Any) -> None:
        """Set the queue of `ray_logger.log`."""
        ray_logger.configure(queue=queue)


def create_placement_group(
    resources_per_bundle: Bundle, num_bundles: int, pg_timeout: float, pg_strategy: str
) -> tuple[Any, list[dict[str, float]]]:
    """Create a placement group and return it with its bundles. Raises TimeoutError, and removes it, without room."""
    bundles = [dict(resources_per_bundle) for _ in range(num_bundles)]
    group = placement_group(bundles, strategy=pg_strategy)
    granted = False
    try:
        granted = group.wait(pg_timeout)
    finally:
        if not granted:
            remove_placement_group(group)
    if not granted:
        raise TimeoutError(
            f"Ray found no room for the workers within {pg_timeout:g} s (placement_group_timeout_s): "
            f"available are {ray.available_resources()}, requested were {num_bundles} bundles of "
            f"{dict(resources_per_bundle)} ({pg_strategy}). All of the cluster: {ray.cluster_resources()}"
        )
    return group, bundles


class BaseStrategy:
    """`create_workers` creates the actors; `shutdown` releases their resources."""

    def __init__(
        self, num_workers: int, *, settings: Any, use_gpu: bool, cpus_per_worker: int, gpus_per_worker: int | None
    ) -> None:
        self.num_workers, self.settings = num_workers, settings
        self.use_gpu, self.cpus_per_worker = use_gpu, cpus_per_worker
        self.gpus_per_worker = (gpus_per_worker or 1) if use_gpu else 0
        self.placement_group: Any = None
        self.workers: list[Any] = []
        self.places: list[ActorProcess] = []
        self._created_placement_group = False

    def create_workers(
        self, env_vars: Mapping[str, str] | None = None, runtime_env: Mapping[str, Any] | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Return the actors in rank order, and one per host. `env_vars`: set from the start of their processes on."""
        bundles = self._reserve()
        options: dict[str, Any] = {"num_cpus": self.cpus_per_worker, "num_gpus": self.gpus_per_worker}
        options |= process_options(env_vars or {}, runtime_env)
        worker_class = ray.remote(BaseHorovodWorker)
        for rank, bundle in enumerate(bundles):
            where = PlacementGroupSchedulingStrategy(
                self.placement_group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=False
            )
            actor = worker_class.options(scheduling_strategy=where, **options)
            self.workers.append(actor.remote(world_rank=rank, world_size=self.num_workers))
        self.places = self._find_places()
        return self.workers, self.get_node_workers(self.workers)

    def _reserve(self) -> list[int]:
        """Reserve a placement group; returns the bundle of each rank (-1: any)."""
        raise NotImplementedError

    def _find_places(self) -> list[ActorProcess]:
        limit_s = self.settings.placement_group_timeout_s + self.settings.start_timeout.remaining()
        places = [worker.place.remote() for worker in self.workers]
        _, missing = ray.wait(places, num_returns=len(places), timeout=limit_s)
        if missing:
            ranks = [rank for rank, reference in enumerate(places) if reference in missing]
            raise TimeoutError(
                f"ranks {ranks} of {len(places)} have not started within {limit_s:g} s (placement_group_timeout_s and "
                f"timeout_s); Ray has free: {ray.available_resources()}"
            )
        return list(ray.get(places))

    def get_node_workers(self, workers: Sequence[Any]) -> list[Any]:
        """Return one worker per host name."""
        first: dict[str, Any] = {}
        for worker, place in zip(workers, self.places, strict=True):
            first.setdefault(place.hostname, worker)
        return list(first.values())

    def visible_devices(self, rank: int) -> dict[str, str]:
        """Return the variable that shows a rank all GPUs that the job holds on its node."""
        if not self.use_gpu:
            return {}
        own = self.places[rank]
        here = [place.gpus for place in self.places if place.node == own.node]
        return {"CUDA_VISIBLE_DEVICES": ",".join(visible_gpus(own.gpus, here))}

    def shutdown(self) -> None:
        if self._created_placement_group and self.placement_group is not None:
            remove_placement_group(self.placement_group)
            self.placement_group, self._created_placement_group = None, False
        self.workers, self.places = [], []

    def _create_group(self, bundle: Bundle, num_bundles: int, strategy: str) -> None:
        limit_s = self.settings.placement_group_timeout_s
        self.placement_group, _ = create_placement_group(bundle, num_bundles, limit_s, strategy)
        self._created_placement_group = True

    def _per_worker(self, workers: int = 1) -> dict[str, float]:
        return {"CPU": self.cpus_per_worker * workers, "GPU": self.gpus_per_worker * workers}


class PGStrategy(BaseStrategy):
    """One bundle per worker, packed; or any bundles of the caller's group."""

    def __init__(
        self, *, num_workers: int, placement_group: Any = None, force_create_placement_group: bool = False, **rest: Any
    ) -> None:
        super().__init__(num_workers, **rest)
        if not force_create_placement_group:
            self.placement_group = placement_group or get_current_placement_group()

    def _reserve(self) -> list[int]:
        if self.placement_group is None:
            self._create_group(self._per_worker(), self.num_workers, "PACK")
            return list(range(self.num_workers))
        limit_s = self.settings.placement_group_timeout_s
        if not self.placement_group.wait(limit_s):
            raise TimeoutError(
                f"Ray has not granted the placement group within {limit_s:g} s (placement_group_timeout_s); available "
                f"are {ray.available_resources()}, its bundles are {self.placement_group.bundle_specs}"
            )
        need = {name: amount for name, amount in self._per_worker().items() if amount}
        bundles = self.placement_group.bundle_specs
        room = sum(int(min(bundle.get(name, 0) // amount for name, amount in need.items())) for bundle in bundles)
        if need and room < self.num_workers:
            raise ValueError(
                f"the placement group that was given, or that this runs in, has room for {room} workers of {need}, but "
                f"{self.num_workers} are requested; its bundles are {bundles}. Enlarge it, or pass "
                "use_current_placement_group=False"
            )
        return [-1] * self.num_workers


class ColocatedStrategy(BaseStrategy):
    """The same number of workers on each of several hosts; the ranks of a host are consecutive."""

    def __init__(self, *, num_hosts: int, num_workers_per_host: int, **rest: Any) -> None:
        super().__init__(num_hosts * num_workers_per_host, **rest)
        self.num_hosts, self.num_workers_per_host = num_hosts, num_workers_per_host

    def _reserve(self) -> list[int]:
        self._create_group(self._per_worker(self.num_workers_per_host), self.num_hosts, "STRICT_SPREAD")
        return [host for host in range(self.num_hosts) for _ in range(self.num_workers_per_host)]
