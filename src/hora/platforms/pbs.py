"""PBS's variables: the node of a job."""

from __future__ import annotations

from collections.abc import Mapping

from hora.platforms.node import Node, listed


def node(env: Mapping[str, str], hostname: str) -> Node | None:
    """Return this node of the current job."""
    if "PBS_NODEFILE" not in env:
        return None
    path = env["PBS_NODEFILE"]
    try:
        with open(path, encoding="utf-8") as file:
            names = file.read().split()
    except OSError as error:
        raise ValueError(f"cannot read PBS_NODEFILE={path}: {error.strerror}") from None
    return listed(names, hostname, "PBS")
