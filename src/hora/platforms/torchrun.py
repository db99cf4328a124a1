"""torchrun's variables: the world of a worker."""

from __future__ import annotations

from collections.abc import Mapping

from hora.platforms.blocks import world_of_blocks
from hora.world import World

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def detect(env: Mapping[str, str]) -> World | None:
    """Return the world of a worker of torchrun."""
    return world_of_blocks(env, "torchrun", NAMES) if "RANK" in env or "WORLD_SIZE" in env else None
