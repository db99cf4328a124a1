"""Kubeflow Trainer's variables: the node of a pod."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping

from hora.platforms.node import Node
from hora.platforms.reading import text, whole_number


def node(env: Mapping[str, str], hostname: str) -> Node | None:
    """Return the node of this pod."""
    if "PET_NNODES" not in env:
        return None
    wanted = env.get("PET_NPROC_PER_NODE", "auto")
    num_cores, num_gpus = len(os.sched_getaffinity(0)), _count_gpus(env)
    by_word = {"cpu": num_cores, "gpu": num_gpus, "auto": num_gpus or num_cores}
    if wanted not in by_word and not wanted.isdecimal():
        raise ValueError(f"PET_NPROC_PER_NODE must be a number, auto, gpu or cpu, but it is {wanted!r}")
    return Node(
        num_nodes=whole_number(env, "PET_NNODES", "Kubeflow"),
        index=whole_number(env, "PET_NODE_RANK", "Kubeflow"),
        slots=by_word[wanted] if wanted in by_word else int(wanted),
        host=text(env, "PET_MASTER_ADDR", "Kubeflow"),
        port=whole_number(env, "PET_MASTER_PORT", "Kubeflow") if "PET_MASTER_PORT" in env else 0,
        platform="Kubeflow",
    )


def _count_gpus(env: Mapping[str, str]) -> int:
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([item for item in visible.split(",") if item.strip() and item.strip() != "-1"])
    return len(glob.glob("/dev/nvidia[0-9]*"))
