"""Interface of an executor's adapter and its parameters; one implementation per kind of job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import ray

from hora.config import allowed_ports
from hora.legacy.runner import get_local_intfs
from hora.net.sockets import interface_address, is_local, spelled


@dataclass
class BaseParams:
    """Resources of a worker."""

    elastic: ClassVar[bool]

    cpus_per_worker: int = 1
    use_gpu: bool = False
    gpus_per_worker: int | None = None

    def __post_init__(self) -> None:
        if self.gpus_per_worker and not self.use_gpu:
            raise ValueError(
                f"gpus_per_worker is {self.gpus_per_worker}, but use_gpu is not set: pass use_gpu=True, or leave it out"
            )
        if self.use_gpu and isinstance(self.gpus_per_worker, int) and self.gpus_per_worker < 1:
            raise ValueError(f"gpus_per_worker must be at least 1 with use_gpu=True, but it is {self.gpus_per_worker}")
        self.gpus_per_worker = self.gpus_per_worker or int(self.use_gpu)

    @property
    def per_worker(self) -> dict[str, Any]:
        """Return the fields of this class, for a placement strategy."""
        return {field.name: getattr(self, field.name) for field in fields(BaseParams)}


class Adapter(ABC):
    """The part of an executor that uses Ray; an actor under Ray Client. Functions get the worker's executable."""

    @abstractmethod
    def start(
        self,
        make_executable: Callable[[], Any] | None,
        env: Mapping[str, str],
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        """Acquire everything needed to run functions. `env`: variables of the workers, from their start on.

        `runtime_env`: of the workers' processes, as Ray knows it.
        """

    @abstractmethod
    def execute(
        self, fn: Callable[[Any], Any], queue: Any = None, datasets: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call `fn(executable)` on all workers. `queue`: of `ray_logger.log`. `datasets`: to be split among them."""

    @abstractmethod
    def run_remote(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Do the same without waiting; returns references to the results."""

    @abstractmethod
    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call `fn(executable)` on rank 0."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers and release all resources. Idempotent."""


T = TypeVar("T")


def process_options(env: Mapping[str, str], runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options of an actor whose process has these variables and this runtime environment."""
    own = dict(runtime_env or {})
    if env:
        own["env_vars"] = {**own.get("env_vars", {}), **{name: str(value) for name, value in env.items()}}
    return {"runtime_env": own} if own else {}


def driver_ports() -> dict[str, str]:
    """Return the variable with the ports at which the driver, and so also its workers, may listen."""
    ports = allowed_ports()
    return {"HORA_PORTS": spelled(ports)} if ports else {}


def detect_nics(settings: Any, all_host_names: Collection[str], node_workers: Sequence[Any] | None = None) -> list[str]:
    """Return the interfaces for the ranks; empty if the nodes' addresses are enough.

    On one machine, returns those with 127.0.0.1 that `settings.nics` allows; raises ValueError if it allows none.
    """
    if node_workers is not None and len(node_workers) != len(all_host_names):
        raise ValueError(
            f"detect_nics needs one worker of each host, but it got {len(node_workers)} workers for "
            f"{len(all_host_names)} hosts: {sorted(all_host_names)}"
        )
    wanted = settings.nics
    if not all(is_local(name) for name in all_host_names):
        return sorted(wanted or ())
    loopback = [name for name in sorted(get_local_intfs()) if interface_address([name]) == "127.0.0.1"]
    usable = [name for name in loopback if not wanted or name in wanted]
    if not usable:
        raise ValueError(f"all ranks are on this machine, whose loopback is {loopback}, but nics allows only {wanted}")
    return usable


def nics_to_env_var(nics: Iterable[str]) -> dict[str, str]:
    """Return the variables that select the interfaces for gloo and NCCL."""
    names = list(nics)
    return {"HOROVOD_GLOO_IFACE": names[0], "NCCL_SOCKET_IFNAME": ",".join(names)} if names else {}


def map_blocking(fn: Callable[[T], Any], collection: Iterable[T]) -> list[Any]:
    """Call a remote function for each item and wait for all results."""
    return list(ray.get([fn(one) for one in collection]))
