"""`RayExecutor`: runs functions on the workers of a Ray cluster, with a fixed or an elastic number of workers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import ray

from hora.legacy.runner import Timeout, make_secret_key
from hora.ray.datasets import named
from hora.ray.elastic import ElasticParams
from hora.ray.ray_logger import Callback, queue_for
from hora.ray.static import StaticParams

_OLD_NAMES = {
    "num_slots": "num_workers_per_host",
    "cpus_per_slot": "cpus_per_worker",
    "gpus_per_slot": "gpus_per_worker",
}


@dataclass
class MiniSettings:
    """Settings of a `RayExecutor`.

    Args:
        nics: Network interfaces to use.
        key: Not used: other programs expect it, but every job has a fresh secret.
        timeout_s: For the start.
        placement_group_timeout_s: For Ray to find room.
    """

    nics: Collection[str] | None = None
    verbose: int = 1
    key: bytes = field(default_factory=make_secret_key, repr=False)
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    timeout_s: int = 300
    placement_group_timeout_s: int = 100
    elastic: bool = False

    @property
    def start_timeout(self) -> Timeout:
        """A time limit that starts now."""
        return Timeout(
            self.timeout_s,
            message="Timed out waiting for {activity}. Check that the nodes can reach one another, or raise timeout_s.",
        )


class RayExecutor:
    """`start`, then `run` functions, then `shutdown`; or use it as a context manager, which starts nothing by itself.

    With `num_workers`, or `num_hosts` and `num_workers_per_host`, the size is fixed: processes and their state last
    from `start` to `shutdown`. With `min_workers` the job is elastic, and every `run` starts new processes.

    Args:
        settings: What `create_settings` returned.
        num_workers: How many workers, of a fixed number.
        num_hosts: Instead: on how many hosts.
        num_workers_per_host: With `num_hosts`: how many on each.
        cpus_per_worker: Cores of each rank.
        use_gpu: Give GPUs to the ranks.
        gpus_per_worker: GPUs of each rank.
        use_current_placement_group: Inside a Ray task with a placement group: use its resources.
        placement_group: Yours, in whose bundles the workers run; it is not removed.
        min_workers: Elastic: go on as long as there are this many.
        max_workers: Elastic: never more than this.
        reset_limit: Elastic: how many times the job may go on with other ranks before it gives up.
        cooldown_range: Elastic: (shortest, longest) seconds for which a host that failed is left alone.
        elastic_timeout: Elastic: seconds to wait for enough hosts after one was lost.
        override_discovery: Ask the Ray cluster which hosts there are.
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: int = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: int = 100,
        nics: Collection[str] | None = None,
        verbose: int = 1,
    ) -> MiniSettings:
        """Return settings for an executor.

        Args:
            timeout_s: Time limit for the workers to start and meet.
            ssh_identity_file: Without effect: Ray uses no ssh.
            ssh_str: Without effect, too.
            placement_group_timeout_s: Time limit for the cluster to have the resources.
            nics: Network interfaces to use; by default those that reach the driver.
            verbose: 2 shows the launcher's own messages.
        """
        if ssh_str is not None:
            warnings.warn("ssh_str has no effect: nothing uses ssh on Ray, and no key is written", stacklevel=2)
        return MiniSettings(
            nics=nics,
            verbose=verbose,
            ssh_identity_file=ssh_identity_file,
            timeout_s=timeout_s,
            placement_group_timeout_s=placement_group_timeout_s,
        )

    def __init__(
        self,
        settings: Any,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int | None = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: tuple[int, int] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
        placement_group: Any = None,
        **old_names: Any,
    ) -> None:
        given = {**locals(), **_renamed(old_names)}
        self.adapter: Any = None
        self._is_remote = False
        if max_workers is not None and not (min_workers and min_workers > 0):
            raise ValueError(
                f"max_workers={max_workers} needs min_workers, which must be positive: it is {min_workers}"
            )
        if min_workers and num_workers:
            raise ValueError(
                "Both `min_workers` and `num_workers` provided. Use min_workers for an elastic job, num_workers for "
                "one of a fixed size"
            )
        if min_workers and placement_group is not None:
            raise ValueError(
                "an elastic executor reserves a placement group for each of its slots: leave out placement_group, or "
                "use num_workers instead of min_workers"
            )
        kind: type[ElasticParams | StaticParams] = StaticParams if min_workers is None else ElasticParams
        # Their fields have the names of the arguments.
        self.params: ElasticParams | StaticParams = kind(**{one.name: given[one.name] for one in fields(kind)})
        self.settings = settings
        self.settings.elastic = self.params.elastic

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        """Acquire the cluster's resources and, with a fixed size, start the workers, each with its `executable_cls(…)`.

        Args:
            executable_cls: A class of which each worker keeps an instance, for `execute`.
            executable_args: Its positional arguments.
            executable_kwargs: Its keyword arguments.
            extra_env_vars: For the workers, from the start of their processes on.
            runtime_env: Of these processes, as for Ray's actors (`env_vars`, `pip`, …).
        """
        if runtime_env is not None and not isinstance(runtime_env, Mapping):
            raise ValueError(f"runtime_env must be a dict, as for Ray's actors, but it is {runtime_env!r}")
        if self.adapter is not None:
            raise RuntimeError("the executor is already running: call shutdown() first")
        self._is_remote = bool(ray.util.client.ray.is_connected())
        make: Any = self.params.adapter
        if self._is_remote:
            # Without a core: it only waits for the workers, which may need them all.
            make = ray.remote(num_cpus=0)(make).remote
        self.adapter = make(self.settings, self.params)
        try:
            make_executable = None
            if executable_cls is not None:
                make_executable = partial(executable_cls, *(executable_args or ()), **(executable_kwargs or {}))
            env = {name: str(value) for name, value in (extra_env_vars or {}).items()}
            self._call("start", make_executable, env, runtime_env)
        except BaseException:
            self.shutdown()
            raise

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
        *,
        datasets: Any = None,
    ) -> list[Any]:
        """Call a function on all workers; returns its values in rank order.

        Args:
            fn: The function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            callbacks: They get what the workers log with `ray_logger`.
            datasets: A Ray dataset, or a dict of some by name. The function gets its rank's shard from
                `get_dataset_shard`.
        """
        self._must_run()
        found = named(datasets)
        with queue_for(callbacks) as queue:
            return list(self._call("execute", _with_arguments(fn, args, kwargs), queue, found))

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Do the same without waiting; returns references to the values, in rank order."""
        return list(self._call("run_remote", _with_arguments(fn, args, kwargs)))

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        """Call `fn(executable)` on all workers; returns their values in rank order."""
        self._must_run()
        with queue_for(callbacks) as queue:
            return list(self._call("execute", fn, queue))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call `fn(executable)` on rank 0 and return its value."""
        return self._call("execute_single", fn)

    def shutdown(self) -> None:
        """End the workers and release all resources. Idempotent; `start` may follow."""
        adapter, self.adapter = self.adapter, None
        if adapter is None or not ray.is_initialized():
            return
        if self._is_remote:
            with contextlib.suppress(ray.exceptions.RayActorError):
                ray.get(adapter.shutdown.remote())
            ray.kill(adapter)
        else:
            adapter.shutdown()

    def _must_run(self) -> None:
        if self.adapter is None:
            raise RuntimeError("the executor is not running: call start() first")

    def _call(self, method: str, *arguments: Any) -> Any:
        self._must_run()
        if self._is_remote:
            return ray.get(getattr(self.adapter, method).remote(*arguments))
        return getattr(self.adapter, method)(*arguments)

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at interpreter exit anything may be gone, and Ray cleans up
            self.shutdown()


def _with_arguments(
    fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> Callable[[Any], Any]:
    """Return a function of the executable, which it does not use."""
    return lambda _: fn(*(args or ()), **(kwargs or {}))


def _renamed(old_names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the current names of arguments with old names."""
    unknown = sorted(set(old_names) - set(_OLD_NAMES))
    if unknown:
        raise TypeError(f"RayExecutor() got an unexpected keyword argument {unknown[0]!r}")
    for name in old_names:
        warnings.warn(f"{name} is deprecated, use {_OLD_NAMES[name]}", DeprecationWarning, stacklevel=3)
    return {_OLD_NAMES[name]: value for name, value in old_names.items()}
