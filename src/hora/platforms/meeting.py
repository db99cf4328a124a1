"""The meeting point of ranks whose platform has no rendezvous for them: rank 0's host, or torchrun's store."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import partial

from hora.config import allowed_ports
from hora.platforms.reading import integer
from hora.world import RendezvousEndpoint

_PORTS = range(20000, 32000)  # below those that Linux gives to outgoing connections
_PORTS_TO_TRY = 8


def tcp_endpoint(
    env: Mapping[str, str], platform: str, *, job: str, one_host: bool, address: Callable[[], str] = str, name: str = ""
) -> RendezvousEndpoint:
    """Return where the ranks of a world of several meet.

    Args:
        env: The environment, whose `MASTER_ADDR` and `MASTER_PORT` come first.
        platform: Its name, for messages.
        job: A name that the ranks of this world share with no other world; empty if the variables tell none.
        one_host: Whether all ranks are on this host.
        address: Returns the host of rank 0, or an empty text if the platform's variables do not tell it.
        name: What torchrun's run is called in the store, if not by its own variable.

    Raises:
        ValueError: The variables do not say where rank 0 is.
    """
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    tcp = partial(RendezvousEndpoint, kind="tcp", secret_file=env.get("HORA_SECRET_FILE", ""))
    if host and port:
        # torchrun's agent already runs a store there. It outlives, with its values, the ranks that the agent restarts.
        # Other launchers expect rank 0 to open it.
        host_store = env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() != "true"
        run = f"{name or env.get('TORCHELASTIC_RUN_ID', platform)}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return tcp(address=host, port=integer(env, "MASTER_PORT"), job=run, host_store=host_store)
    found = "" if not job else "127.0.0.1" if one_host else address()
    if not found:
        raise ValueError(
            f"the {platform} variables describe a world of several ranks but not where they meet: set MASTER_ADDR and "
            "MASTER_PORT to a host and a free port of rank 0, or start the job with horovodrun"
        )
    first, *more = _derived_ports(job, allowed_ports(env) or _PORTS)
    return tcp(address=found, port=first, more_ports=tuple(more), job=job, host_store=True)


def _derived_ports(job: str, ports: range) -> list[int]:
    """Return where rank 0 tries to listen, the same on all ranks of a job and others for other jobs."""
    first = zlib.crc32(job.encode())
    return [ports[(first + turn) % len(ports)] for turn in range(min(_PORTS_TO_TRY, len(ports)))]
