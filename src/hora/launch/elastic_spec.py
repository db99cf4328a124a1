"""What makes a job elastic, apart from what every `Job` has. Made by `start` and the Spark side, carried out by `elastic`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hora.launch.discovery import HostWatch
from hora.launch.elastic_policy import Limits
from hora.launch.hosts import HostInfo

__all__ = ["ElasticSpec"]


@dataclass(frozen=True, kw_only=True)
class ElasticSpec:
    """`hosts`: where workers may run; `script` tells of changes.

    `local_only`: the launcher starts workers on this machine only.
    """

    limits: Limits
    hosts: tuple[HostInfo, ...] = ()
    script: HostWatch | None = None
    local_only: bool = False
    cooldown_range: tuple[int, int] | None = None

    def limits_for(self, env: Mapping[str, str]) -> Limits:
        """The limits, with the silence that the user allows a rank: the workers read the same variables."""
        disabled = env.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0")
        seconds = float(env.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") or 0)
        return replace(self.limits, stall_shutdown_s=None if disabled or seconds <= 0 else seconds)
