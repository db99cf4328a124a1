"""The actor that a static executor makes one of for each rank."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from hora.launch.environment import set_variables, variables
from hora.launch.providers.ray.actor_process import ActorProcess, node_id, this_process
from hora.ray import ray_logger
from hora.world import keep_secret

__all__ = ["BaseHorovodWorker"]


class BaseHorovodWorker:
    """A rank's process. It lives, with everything that functions did to it, until the executor is shut down."""

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        place = {"HOROVOD_HOSTNAME": self.node_id(), "HOROVOD_RANK": world_rank, "HOROVOD_SIZE": world_size}
        self.update_env_vars(place)

    def node_id(self) -> str:
        """Ray's id of the node, in hexadecimal. Ranks with the same one are on one host."""
        return node_id()

    def hostname(self) -> str:
        return socket.gethostname()

    def place(self) -> ActorProcess:
        """All that the executor has to know, in one answer."""
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

    def settle(self, env_vars: Mapping[str, Any], *executable: Any) -> None:
        """The last step of the start: the environment first, because the executable may call `hvd.init()`."""
        self.update_env_vars(env_vars)
        self.start_executable(*executable)

    def execute(self, func: Callable[[Any], Any]) -> Any:
        return func(self.executable)

    def set_queue(self, queue: Any) -> None:
        """Set the queue of `ray_logger.log`."""
        ray_logger.configure(queue=queue)
