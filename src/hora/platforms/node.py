"""A node of a job that is started by the same command on every node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hora.config import allowed_ports

DEFAULT_PORT = 29500  # of the first node, for the others
_DEFAULT_PORTS = range(DEFAULT_PORT, DEFAULT_PORT + 1)


@dataclass(frozen=True, kw_only=True)
class Node:
    """Node `index` of `num_nodes`."""

    num_nodes: int
    index: int
    host: str  # of the first node, to which the others connect
    port: int = 0  # 0: nothing names one
    slots: int | None = None  # processes on this node; None if unknown
    name: str = ""  # of this node, for messages
    platform: str = "flags"  # what has told it, for messages

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or not 0 <= self.index < self.num_nodes:
            raise ValueError(
                f"node {self.index} of {self.num_nodes} ({self.platform}): the nodes are 0, 1, …; check what names "
                "this one"
            )
        if not 0 <= self.port < 65536:
            raise ValueError(f"the nodes' port must lie in 1..65535, but it is {self.port} ({self.platform})")


def meeting_port(env: Mapping[str, str], *, job: int = 0, ports: range = _DEFAULT_PORTS) -> int:
    """Return the first node's port where nothing names one: the same on all nodes, for most jobs another one.

    It is one of HORA_PORTS, otherwise of `ports`. The one after it may be the rendezvous', so it is not the last.
    """
    allowed = allowed_ports(env)
    ports = allowed[:-1] or allowed or ports
    return ports[job % len(ports)]


def listed(names: list[str], own: str, platform: str) -> Node:
    """Read a list with one name per slot, in which a node may appear several times."""
    nodes = list(dict.fromkeys(names))
    short = [name.partition(".")[0] for name in nodes]
    if own.partition(".")[0] not in short:
        raise ValueError(f"this machine, {own}, is not among the {platform} nodes {', '.join(nodes) or '(none)'}")
    index = short.index(own.partition(".")[0])
    return Node(
        num_nodes=len(nodes), index=index, slots=names.count(nodes[index]), host=nodes[0], name=own, platform=platform
    )
