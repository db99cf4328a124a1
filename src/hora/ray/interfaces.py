"""`horovod.ray.utils`: network interfaces, in the terms of programs that drive the parts of an executor themselves.

Hora's ranks find their way by the addresses that Ray's nodes have, so nothing is probed.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import ray

from hora.net.address import interface_address, is_local

__all__ = ["detect_nics", "map_blocking", "nics_to_env_var"]

T = TypeVar("T")


def detect_nics(settings: Any, all_host_names: Collection[str], node_workers: Sequence[Any] | None = None) -> list[str]:
    """The interfaces that the ranks shall use; empty where the nodes' addresses tell already.

    On one machine those that have 127.0.0.1, as far as `settings.nics` allows; ValueError if it allows none of them.
    """
    if node_workers is not None and len(node_workers) != len(all_host_names):
        raise ValueError(
            f"detect_nics needs one worker of each host, but it got {len(node_workers)} workers for "
            f"{len(all_host_names)} hosts: {sorted(all_host_names)}"
        )
    wanted = settings.nics
    if not all(is_local(name) for name in all_host_names):
        return sorted(wanted or ())
    loopback = [name for _, name in socket.if_nameindex() if _has_loopback_address(name)]
    usable = [name for name in loopback if not wanted or name in wanted]
    if not usable:
        raise ValueError(f"all ranks are on this machine, whose loopback is {loopback}, but nics allows only {wanted}")
    return usable


def _has_loopback_address(nic: str) -> bool:
    with contextlib.suppress(ValueError):
        return interface_address([nic]) == "127.0.0.1"
    return False


def nics_to_env_var(nics: Iterable[str]) -> dict[str, str]:
    """The variables that name the interfaces, for gloo and for NCCL."""
    names = list(nics)
    return {"HOROVOD_GLOO_IFACE": names[0], "NCCL_SOCKET_IFNAME": ",".join(names)} if names else {}


def map_blocking(fn: Callable[[T], Any], collection: Iterable[T]) -> list[Any]:
    """Call a remote function for each, and wait for all of the answers."""
    return list(ray.get([fn(one) for one in collection]))
