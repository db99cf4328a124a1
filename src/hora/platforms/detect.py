"""The platform that has started this process: its world, and its node.

The only module of this package that reads and writes the environment of this process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hora.platforms import horovod, kubeflow, lsf, open_mpi, pbs, pmi, sagemaker, skypilot, slurm, torchrun
from hora.platforms.node import Node
from hora.world import World

_WORLDS = (horovod.detect, torchrun.detect, open_mpi.detect, pmi.detect, slurm.detect)  # in order of precedence
_NODES = (*(kubeflow.node, skypilot.node, open_mpi.node, pmi.node, slurm.node, lsf.node, pbs.node, sagemaker.node),)


def detect_world(environ: Mapping[str, str] | None = None) -> World:
    """Return the world of this process, or of one with another environment; without variables a world of one.

    Raises:
        ValueError: A variable is invalid, or its partner is missing; the message names it.
    """
    if environ is None:
        keep_secret()
    env = os.environ if environ is None else environ
    return next((found for detect in _WORLDS if (found := detect(env)) is not None), World())


def detect_node(environ: Mapping[str, str], hostname: str) -> Node | None:
    """Return the node of a job whose command runs once on every node; None if no platform tells it.

    Args:
        environ: The environment of the command.
        hostname: This machine's name, which lists of hosts contain.
    """
    return next((found for node in _NODES if (found := node(environ, hostname)) is not None), None)


def export(world: World) -> None:
    """Set this process's environment to a world, for code that reads the variables itself."""
    os.environ.update(horovod.variables_of(world))


def keep_secret() -> None:
    """Move the job's secret from this process's environment to a file in memory.

    Ray Train sets variables in running processes, so it can pass the secret only by value.
    """
    secret = os.environ.pop("HORA_SECRET", None)
    if secret is not None:
        descriptor = os.memfd_create("hora-secret", os.MFD_CLOEXEC)
        os.write(descriptor, bytes.fromhex(secret))
        os.environ["HORA_SECRET_FILE"] = f"/proc/{os.getpid()}/fd/{descriptor}"


def user_secret_file() -> str:
    """Return the file with the secret that the user gave to the ranks; empty if there is none."""
    return os.environ.get("HORA_SECRET_FILE", "")


def master_address() -> str:
    """Return the host of rank 0 according to the launcher; empty if unknown."""
    return os.environ.get("MASTER_ADDR", "")


def place_variables() -> tuple[tuple[str, str] | None, ...]:
    """Return the first rank and the first size variable that Horovod, Open MPI or PMI have set, with their values."""
    both = zip(horovod.NAMES[:2], open_mpi.NAMES, pmi.NAMES, strict=False)
    return tuple(next(((name, os.environ[name]) for name in names if name in os.environ), None) for names in both)
