"""`horovod.runner.gloo_run`: a rank's place and its meeting place as variables, for programs that start their ranks
themselves.

Its launchers are `horovod.run` here, and their names say so.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NoReturn

from hora.launch.slots import Slot

__all__ = [
    "create_run_env_vars",
    "create_slot_env_vars",
    "get_min_start_hosts",
    "gloo_run",
    "gloo_run_elastic",
    "launch_gloo",
    "launch_gloo_elastic",
]


def create_slot_env_vars(slot_info: Slot) -> dict[str, str]:
    """The variables that tell a rank its place."""
    found = {
        "HOROVOD_HOSTNAME": slot_info.hostname,
        "HOROVOD_RANK": slot_info.rank,
        "HOROVOD_SIZE": slot_info.size,
        "HOROVOD_LOCAL_RANK": slot_info.local_rank,
        "HOROVOD_LOCAL_SIZE": slot_info.local_size,
        "HOROVOD_CROSS_RANK": slot_info.cross_rank,
        "HOROVOD_CROSS_SIZE": slot_info.cross_size,
    }
    return {name: str(value) for name, value in found.items()}


def create_run_env_vars(server_ip: str, nics: Collection[str], port: int, elastic: bool = False) -> dict[str, str]:
    """The variables that tell all ranks where they meet, and over which interfaces."""
    variables = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": server_ip,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": sorted(nics)[0] if nics else "",
        "NCCL_SOCKET_IFNAME": ",".join(sorted(nics)),
    }
    return variables | ({"HOROVOD_ELASTIC": "1"} if elastic else {})


def get_min_start_hosts(settings: Any) -> int:
    """Return how many hosts an elastic job needs to begin: one."""
    return 1


def gloo_run(*args: Any, **kwargs: Any) -> NoReturn:
    """Horovod's launcher under the one that users call: an error that names that."""
    raise NotImplementedError(
        "this is not how jobs are started here: use horovod.run(function, num_proc=…) or horovodrun"
    )


gloo_run_elastic = launch_gloo = launch_gloo_elastic = gloo_run
