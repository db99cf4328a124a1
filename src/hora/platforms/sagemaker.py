"""SageMaker's variables: the node of a training job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from hora.platforms.node import Node, listed
from hora.platforms.reading import gpus, text


def node(env: Mapping[str, str], hostname: str) -> Node | None:
    """Return this node of the training job."""
    if "SM_HOSTS" not in env:
        return None
    hosts = json.loads(text(env, "SM_HOSTS", "SageMaker"))
    place = listed(hosts, text(env, "SM_CURRENT_HOST", "SageMaker"), "SageMaker")
    return replace(place, slots=gpus(env, "SM_NUM_GPUS"))
