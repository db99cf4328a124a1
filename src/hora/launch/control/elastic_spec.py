"""What makes a job elastic, apart from what every `Job` has. Made by `start` and the Spark side, carried out by `elastic`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hora.config import EngineConfig
from hora.launch.control.discovery import HostWatch
from hora.launch.control.elastic_policy import Limits
from hora.launch.slots import HostInfo

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
        """The limits, with the silence that the user allows a rank: the workers read the same variables.

        ValueError if these make no sense.
        """
        config = EngineConfig.from_env(
            {name: value for name, value in env.items() if name.startswith("HOROVOD_STALL_")}
        )
        asked = config.stall_shutdown_s > 0 and not config.stall_check_disable
        return replace(self.limits, stall_shutdown_s=config.stall_shutdown_s if asked else None)
