"""SkyPilot's variables: the node of a task."""

from __future__ import annotations

from collections.abc import Mapping

from hora.platforms.node import Node
from hora.platforms.reading import gpus, text, whole_number


def node(env: Mapping[str, str], hostname: str) -> Node | None:
    """Return the node of this task."""
    if "SKYPILOT_NODE_RANK" not in env:
        return None
    return Node(
        num_nodes=whole_number(env, "SKYPILOT_NUM_NODES", "SkyPilot"),
        index=whole_number(env, "SKYPILOT_NODE_RANK", "SkyPilot"),
        slots=gpus(env, "SKYPILOT_NUM_GPUS_PER_NODE"),
        host=text(env, "SKYPILOT_NODE_IPS", "SkyPilot").split()[0],
        platform="SkyPilot",
    )
