"""LSF's variables: the hosts of a job, and which one this is."""

from __future__ import annotations

from collections.abc import Mapping

from hora.platforms.node import Node, listed


def in_job(env: Mapping[str, str]) -> bool:
    """Return whether this process belongs to an LSF job."""
    return bool(env.get("LSB_JOBID"))


def hosts(env: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return the hosts of the current job and their slots, without the launch node that jsrun's machines put first."""
    words = env.get("LSB_MCPU_HOSTS", "").split()  # hostA 4 hostB 4
    if not all(word.isdecimal() for word in words[1::2]):
        raise ValueError(f"LSB_MCPU_HOSTS must be hosts, each with its slots, but it is {' '.join(words)[:200]!r}")
    found = [(name, int(slots)) for name, slots in zip(words[::2], words[1::2], strict=False)]
    launch_node = len(found) > 1 and found[0][1] == 1 and all(slots > 1 for _, slots in found[1:])
    return found[launch_node or "CSM_ALLOCATION_ID" in env :]


def node(env: Mapping[str, str], hostname: str) -> Node | None:
    """Return this node of the current job."""
    if "LSB_MCPU_HOSTS" not in env:
        return None
    return listed([name for name, slots in hosts(env) for _ in range(slots)], hostname, "LSF")
