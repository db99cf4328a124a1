"""Open MPI's variables: the world of a rank, the node of an `mpirun` with one process per node."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hora.platforms.blocks import world_of_blocks
from hora.platforms.node import Node
from hora.platforms.reading import integer, whole_number
from hora.platforms.slurm import nodes_of
from hora.world import World

NAMES = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))


def detect(env: Mapping[str, str]) -> World | None:
    """Return the world of a rank of mpirun."""
    if "OMPI_COMM_WORLD_RANK" not in env and "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    return world_of_blocks(env, "openmpi", NAMES, address=lambda: _first_host(env))


def node(env: Mapping[str, str], hostname: str) -> Node | None:
    """Return the node of an mpirun with one process per node. Its address is known only if all share a machine."""
    if "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    num_nodes, index = (
        whole_number(env, "OMPI_COMM_WORLD_SIZE", "Open MPI"),
        whole_number(env, "OMPI_COMM_WORLD_RANK", "Open MPI"),
    )
    host = "127.0.0.1" if env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(num_nodes) else ""
    return Node(num_nodes=num_nodes, index=index, host=host, platform="Open MPI")


def _first_host(env: Mapping[str, str]) -> str:
    """Return the host of rank 0; an empty string if the variables do not tell, as those of Open MPI 5.

    Open MPI 4 lists the hosts of its daemons, mpirun's own first: `launcher,worker-[1:0-1].job@0(3)`, where each group
    of numbers begins with their width. If more hosts are listed than have ranks, mpirun's is the one without, as in
    Kubeflow's MPI operator.
    """
    listed = env.get("OMPI_MCA_orte_node_regex", "").partition("@")[0]
    text = re.sub(
        r"\[(\d+):([\d,-]+)\]",
        lambda group: "[" + re.sub(r"\d+", lambda n: n[0].zfill(int(group[1])), group[2]) + "]",
        listed,
    )
    hosts = nodes_of(text)
    if not hosts:
        return ""
    first = 1 if len(hosts) > integer(env, "OMPI_MCA_orte_num_nodes", len(hosts)) else 0
    own = env.get("OMPI_MCA_orte_local_daemon_uri", "").partition(";")[0].rpartition(".")[2]
    if env.get("OMPI_COMM_WORLD_RANK") == "0" and own not in ("", str(first)):
        return ""  # only some of the hosts have ranks, and mpirun's is one of them
    return hosts[first]
