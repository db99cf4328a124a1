"""Ports: how many of those that the user allows (`HORA_PORTS`) a job needs on a host. `net.sockets` takes them."""

from __future__ import annotations

from collections.abc import Mapping

from hora.config import EngineConfig, allowed_ports
from hora.net.sockets import spelled


def check_ports(
    ranks: Mapping[str, int], environ: Mapping[str, str], *, has_agents: bool = False, has_page: bool = False
) -> None:
    """Raise ValueError if HORA_PORTS has too few ports for a host of this job.

    Args:
        ranks: How many ranks each host runs.
        environ: The environment of the ranks.
        has_agents: Whether agents connect to the launcher.
        has_page: Whether the job has a live page.
    """
    allowed = allowed_ports(environ)
    if not allowed or not ranks:
        return
    config = EngineConfig.from_env(environ)
    busiest, num_ranks = max(ranks.items(), key=lambda item: item[1])
    if len(ranks) == 1 and (num_ranks == 1 or (config.transport == "auto" and config.native)):
        num_ranks = 0  # they share memory
    parts = {
        "the launcher's rendezvous": 1,
        "its connections to agents": int(has_agents),
        "its live page": int(has_page),
        "a store of torch's": 1,
        f"the ranks on {busiest}": num_ranks,
    }
    needed = sum(parts.values())
    if len(allowed) < needed:
        listed = ", ".join(f"{count} for {name}" for name, count in parts.items() if count)
        raise ValueError(
            f"--ports or HORA_PORTS: this job needs {needed} ports on a host ({listed}), but {spelled(allowed)} are "
            f"only {len(allowed)}"
        )
