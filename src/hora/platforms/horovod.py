"""Hora's own variables and Horovod's: the world of a rank, and the variables that rebuild a world in a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hora.platforms import open_mpi, torchrun
from hora.platforms.blocks import job_name
from hora.platforms.meeting import tcp_endpoint
from hora.platforms.reading import integer
from hora.world import PLAN_JOB, RendezvousEndpoint, World

_PLACE = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
NAMES = tuple(f"HOROVOD_{name.upper()}" for name in _PLACE)


def detect(env: Mapping[str, str]) -> World | None:
    """Return the world of a rank that Hora has started, or another program that sets Horovod's variables."""
    if "HOROVOD_RANK" not in env and "HOROVOD_SIZE" not in env:
        return None
    rank, size = integer(env, "HOROVOD_RANK"), integer(env, "HOROVOD_SIZE")
    rendezvous = RendezvousEndpoint()
    if env.get("HORA_SECRET_FILE") and "HORA_JOB" in env:
        rendezvous = replace(
            _launcher_endpoint(env, env["HORA_JOB"]),
            worker=integer(env, "HORA_WORKER", -1),
            return_s=integer(env, "HORA_LAUNCHER_TIMEOUT", 10),
            leaderless_s=integer(env, "HORA_LEADERLESS_S", 0),
            term=integer(env, "HORA_TERM", 0),
            relay=env.get("HORA_RELAY", ""),
        )
    elif "HOROVOD_GLOO_RENDEZVOUS_PORT" in env and "MASTER_ADDR" not in env:
        if size > 1 or env.get("HORA_SECRET_FILE"):
            rendezvous = _launcher_endpoint(env, PLAN_JOB)
    elif size > 1:
        one_host = integer(env, "HOROVOD_LOCAL_SIZE", size) >= size
        rendezvous = tcp_endpoint(env, "horovod", job=job_name(env, one_host=one_host), one_host=one_host)
    defaults = zip(_PLACE, NAMES, (rank, size, rank, size, 0, 1), strict=True)
    return World(
        **{field: integer(env, name, default) for field, name, default in defaults},
        hostname=env.get("HOROVOD_HOSTNAME", "localhost"),
        generation=integer(env, "HORA_GENERATION", 0),
        worker=integer(env, "HORA_WORKER", -1),
        elastic=integer(env, "HOROVOD_ELASTIC", 0) > 0 and not rendezvous.planned,  # the program itself changes ranks
        launcher="hora" if rendezvous.kind == "hora" else "horovod",
        rendezvous=rendezvous,
    )


def _launcher_endpoint(env: Mapping[str, str], job: str) -> RendezvousEndpoint:
    if not env.get("HORA_SECRET_FILE"):
        raise ValueError(
            "HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT name a rendezvous, but there is no secret to authenticate "
            "with: give the workers HORA_SECRET (the `secret` of the RendezvousServer), or set HORA_SECRET_FILE to "
            "the same file for the process that starts the RendezvousServer and for the workers; or start the job "
            "with horovodrun"
        )
    return RendezvousEndpoint(
        kind="hora",
        address=env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", ""),
        port=integer(env, "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        secret_file=env["HORA_SECRET_FILE"],
        job=job,
    )


def variables_of(world: World) -> dict[str, str]:
    """Return the variables from which `detect` rebuilds a world in a worker, without the secret itself.

    Among them are those that programs and wrapper scripts read below torchrun and Open MPI's mpirun, but none that
    would make an MPI library believe that mpirun has started it.
    """
    place = [str(getattr(world, name)) for name in _PLACE]
    env = dict(zip(NAMES, place, strict=True)) | {
        "HOROVOD_HOSTNAME": world.hostname,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HORA_GENERATION": str(world.generation),
    }
    for names in (torchrun.NAMES, open_mpi.NAMES):
        env |= dict(zip(names, place, strict=False))
    env |= {"OMPI_COMM_WORLD_NODE_RANK": str(world.local_rank), "OMPI_UNIVERSE_SIZE": str(world.size)}
    if world.worker >= 0:
        env["HORA_WORKER"] = str(world.worker)
    if world.elastic:
        env["HOROVOD_ELASTIC"] = "1"
    if world.rendezvous.kind == "hora":
        env["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = world.rendezvous.address
        env["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(world.rendezvous.port)
        env["HORA_JOB"] = world.rendezvous.job
        env["HORA_SECRET_FILE"] = world.rendezvous.secret_file
        env["HORA_LEADERLESS_S"] = str(int(world.rendezvous.leaderless_s))
        env["HORA_TERM"] = str(world.rendezvous.term)
        env["HORA_RELAY"] = world.rendezvous.relay  # also if empty: this process may run inside another job
    return env
