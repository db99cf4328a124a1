"""Parts of an executor: parameters, and the adapter that they describe. One for each kind of job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Adapter", "BaseParams"]


@dataclass
class BaseParams:
    """Resources of a worker."""

    cpus_per_worker: int = 1
    use_gpu: bool = False
    gpus_per_worker: int | None = None

    def __post_init__(self) -> None:
        if self.gpus_per_worker and not self.use_gpu:
            raise ValueError(
                f"gpus_per_worker is {self.gpus_per_worker}, but use_gpu is not set: say use_gpu=True, or leave it out"
            )
        if self.use_gpu and isinstance(self.gpus_per_worker, int) and self.gpus_per_worker < 1:
            raise ValueError(f"gpus_per_worker must be at least 1 with use_gpu=True, but it is {self.gpus_per_worker}")
        self.gpus_per_worker = self.gpus_per_worker or int(self.use_gpu)

    @property
    def elastic(self) -> bool:
        raise NotImplementedError

    @property
    def adapter(self) -> type[Adapter]:
        raise NotImplementedError


class Adapter(ABC):
    """The part of an executor that uses Ray, an actor under Ray Client. `queue`: of `ray_logger.log`."""

    @abstractmethod
    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Have what it takes to run functions."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        queue: Any = None,
    ) -> list[Any]:
        """`fn(*args, **kwargs)` on all workers."""

    @abstractmethod
    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """The same, without waiting: references to the results."""

    @abstractmethod
    def execute(self, fn: Callable[[Any], Any], queue: Any = None) -> list[Any]:
        """`fn(executable)` on all workers."""

    @abstractmethod
    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """`fn(executable)` on rank 0."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers and give everything back. Idempotent."""
