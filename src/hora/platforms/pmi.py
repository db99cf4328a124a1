"""PMI's variables, of MPICH's Hydra and Intel MPI: the world of a rank, the node of one process per node."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from hora.platforms.blocks import world_of_blocks
from hora.platforms.node import Node
from hora.platforms.reading import whole_number
from hora.world import World

_PROXY = "hydra_pmi_proxy"
NAMES = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def detect(env: Mapping[str, str]) -> World | None:
    """Return the world of a rank of Hydra's mpirun or mpiexec."""
    return world_of_blocks(env, "pmi", NAMES, run=_proxy) if "PMI_RANK" in env or "PMI_SIZE" in env else None


def _proxy() -> str:
    """Return a name for the process that has started the ranks of this host; an empty text if none is found.

    MPICH gives its ranks no variable that names their run.
    """
    pid = os.getpid()
    with contextlib.suppress(OSError):  # it is hidden from this process
        while pid > 1:
            program, _, state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")
            parent, started = state.split()[1], state.split()[19]
            if program.endswith(f"({_PROXY}"):
                return f"{_PROXY} {pid} {started}"
            pid = int(parent)
    return ""


def node(env: Mapping[str, str], hostname: str) -> Node | None:
    """Return the node of an mpirun with one process per node. Its address is known only if all share a machine."""
    if "PMI_SIZE" not in env:
        return None
    num_nodes, index = whole_number(env, "PMI_SIZE", "PMI"), whole_number(env, "PMI_RANK", "PMI")
    host = "127.0.0.1" if env.get("MPI_LOCALNRANKS") == str(num_nodes) else ""
    return Node(num_nodes=num_nodes, index=index, host=host, platform="PMI")
