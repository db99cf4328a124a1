"""A rank's place as variables, under the old name. Re-exports only."""

from hora.horovod.gloo_run import (
    create_run_env_vars,
    create_slot_env_vars,
    gloo_run,
    gloo_run_elastic,
    launch_gloo,
    launch_gloo_elastic,
)
from hora.horovod.gloo_run import get_min_start_hosts as _get_min_start_hosts
from hora.horovod.rendezvous_server import RendezvousServer
from hora.launch.slots import get_host_assignments, parse_hosts

__all__ = [
    "RendezvousServer",
    "create_run_env_vars",
    "create_slot_env_vars",
    "get_host_assignments",
    "gloo_run",
    "gloo_run_elastic",
    "launch_gloo",
    "launch_gloo_elastic",
    "parse_hosts",
]
