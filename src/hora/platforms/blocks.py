"""Launchers that place equal blocks of ranks on each host: torchrun, Open MPI, PMI."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

from hora.platforms.meeting import tcp_endpoint
from hora.platforms.reading import integer
from hora.platforms.slurm import run_name
from hora.world import RendezvousEndpoint, World

_OWN_NAMES = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "PMI_JOBID", "I_MPI_HYDRA_UUID")  # of a run of mpirun


def job_name(env: Mapping[str, str], *, one_host: bool) -> str:
    """Return a name that the ranks of a world share with no other world; empty if the variables tell none.

    A Slurm job may run several worlds: each `mpirun` is one, whose own names come first. The ranks of an `mpirun` that
    has only Slurm's have the same step if they are on one host.
    """
    own = next((env[name] for name in _OWN_NAMES if env.get(name)), "")
    return own or run_name(env, with_step=one_host)


def world_of_blocks(
    env: Mapping[str, str],
    platform: str,
    names: tuple[str, ...],
    *,
    address: Callable[[], str] = str,
    run: Callable[[], str] = str,
) -> World:
    """Return the world of a rank.

    Args:
        env: The environment.
        platform: The launcher's name.
        names: The variables of rank, size, local rank and local size.
        address: Returns the host of rank 0, or an empty text if it is not known.
        run: Returns a name that the ranks of this run share on one host; an empty text if there is none.
    """
    rank_name, size_name, local_rank_name, local_size_name = names
    rank, size = integer(env, rank_name), integer(env, size_name)
    local_size = integer(env, local_size_name, size)
    local_rank = integer(env, local_rank_name, rank % max(local_size, 1))
    cross_rank = integer(env, "GROUP_RANK", rank // max(local_size, 1))
    cross_size = max(-(-size // max(local_size, 1)), cross_rank + 1)
    rendezvous = RendezvousEndpoint()
    if size > 1:
        one_host = local_size >= size
        job = (run() if one_host else "") or job_name(env, one_host=one_host)
        rendezvous = tcp_endpoint(env, platform, job=job, one_host=one_host, address=address)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        cross_rank=cross_rank,
        cross_size=cross_size,
        hostname=socket.gethostname(),
        launcher=platform,
        rendezvous=rendezvous,
    )
