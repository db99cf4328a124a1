"""`ElasticRayExecutor`: the first form of elastic executors, which programs of that time use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from hora.legacy import elastic as elastic_driver
from hora.legacy.elastic import ElasticDriver
from hora.legacy.runner import ElasticSettings, Timeout
from hora.ray.elastic import ElasticAdapter, ElasticParams
from hora.ray.ray_logger import Callback, queue_for

__all__ = ["ElasticRayExecutor"]


class ElasticRayExecutor:
    """`start`, then `run`, after which nothing of it is left. New programs say `RayExecutor(min_workers=…)`."""

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
        """Settings for an executor; `kwargs` are further ones of `ElasticSettings`."""
        for old, value, new in (("min_np", min_np, "min_num_proc"), ("max_np", max_np, "max_num_proc")):
            if value is not None:
                warnings.warn(f"{old} is deprecated, say {new}", DeprecationWarning, stacklevel=2)
        return ElasticSettings(
            discovery=None,
            min_num_proc=min_num_proc if min_np is None else min_np,
            max_num_proc=max_num_proc if max_np is None else max_np,
            elastic_timeout=elastic_timeout,
            reset_limit=reset_limit,
            num_proc=min_num_proc if min_np is None else min_np,
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
        )
        self._adapter = ElasticAdapter(
            settings,
            params.min_workers,
            params.max_workers,
            use_gpu=use_gpu,
            cpus_per_worker=cpus_per_slot,
            gpus_per_worker=params.gpus_per_worker,
            override_discovery=override_discovery,
            reset_limit=settings.reset_limit,
            cooldown_range=settings.cooldown_range,
            elastic_timeout=settings.elastic_timeout or elastic_driver.ELASTIC_TIMEOUT_SECS,
        )

    @property
    def driver(self) -> ElasticDriver:
        return self._adapter.driver

    def start(self) -> None:
        """Wait until the cluster has room for as many workers as the job needs."""
        self._adapter.start(extra_env_vars=self.env_vars)

    def run(self, worker_fn: Callable[[], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        """`worker_fn()` on all workers; the values of those that returned, in rank order."""
        try:
            with queue_for(callbacks) as queue:
                return self._adapter.run(worker_fn, queue=queue)
        finally:
            self._adapter.shutdown()
