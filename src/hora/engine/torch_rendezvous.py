"""Rendezvous of ranks started by torch.distributed, through the store that it passes to its backends.

    arrivals   each rank counts itself, so that a second initialization of the same ranks uses other keys
    host       each rank publishes its host
    place      rank 0 publishes the address and secret of its store, and which ranks share hosts

From then on the ranks meet at rank 0's store (`rendezvous`), as under any foreign launcher, and torch's store is not
used again. A reader of torch's store can join the job; with `HORA_SECRET_FILE` it needs that secret, too.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hora.config import EngineConfig, accept_risk
from hora.engine.bootstrap import host_fingerprint
from hora.engine.rendezvous import join_store, open_store_at
from hora.errors import HorovodInternalError
from hora.net.keys import read_secret_file
from hora.net.sockets import interface_address
from hora.net.wire import derived_secret
from hora.world import RendezvousEndpoint, World, master_address, user_secret_file

__all__ = ["agree_on_number", "world_of_store"]

_STORE_ERRORS = (RuntimeError, dist.DistError, TimeoutError)


def world_of_store(store: Store, rank: int, size: int, *, config: EngineConfig, limit_s: float) -> World:
    """Return this rank's world among the ranks that share this store, once all have arrived (collective)."""
    if size == 1:
        return World(launcher="torch", hostname=socket.gethostname())
    ours = _store_of_this_time(store, size)
    ours.set(f"host/{rank}", f"{host_fingerprint()} {socket.gethostname()}")
    if rank == 0:
        place = _open_place(ours, store, size, config, limit_s)
    else:
        place = json.loads(_get(ours, "place", limit_s, "rank 0 to publish the rendezvous"))
    secret = _secret(place["secret"], warn=rank == 0)
    point = RendezvousEndpoint(kind="tcp", address=place["address"], port=place["port"], job=place["job"])
    join_store(point, secret, rank, limit_s=limit_s)
    hosts: list[list[int]] = place["hosts"]
    (mine,) = (index for index, host in enumerate(hosts) if rank in host)
    local_rank = hosts[mine].index(rank)
    with_such_a_rank = [index for index, host in enumerate(hosts) if len(host) > local_rank]
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=len(hosts[mine]),
        cross_rank=with_such_a_rank.index(mine),
        cross_size=len(with_such_a_rank),
        hostname=socket.gethostname(),
        generation=place["number"],
        launcher="torch",
        rendezvous=point,
    )


def agree_on_number(store: Store, member: int, size: int, number: int, *, limit_s: float) -> int:
    """Return the number that member 0 assigns to a group of `size` members, all of which call this."""
    ours = _store_of_this_time(store, size)
    if member == 0:
        ours.set("number", str(number))
        return number
    return int(_get(ours, "number", limit_s, "the first member to number the group"))


def _store_of_this_time(store: Store, size: int) -> Store:
    """Return the part of a store for the ranks that arrive now: torch reuses names in a second initialization."""
    arrival = store.add("hora/arrivals", 1)
    return PrefixStore(f"hora/{(arrival - 1) // size}", store)


def _open_place(ours: Store, store: Store, size: int, config: EngineConfig, limit_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + limit_s
    found: list[str] = []
    for rank in range(size):
        left_s = max(deadline - time.monotonic(), 0.001)
        try:
            ours.wait([f"host/{rank}"], timedelta(seconds=left_s))
        except _STORE_ERRORS as error:
            missing = [other for other in range(rank, size) if not ours.check([f"host/{other}"])]
            raise HorovodInternalError(
                f"waited {limit_s:g} s for rank(s) {missing} to call init_process_group (limit: its timeout)"
            ) from error
        found.append(ours.get(f"host/{rank}").decode())
    hosts: dict[str, list[int]] = {}
    for rank, host in enumerate(found):
        hosts.setdefault(host, []).append(rank)
    secret, job = secrets.token_bytes(32), secrets.token_hex(16)
    address = "127.0.0.1" if len(hosts) == 1 else _address(store, config)
    port = open_store_at(address, _secret(secret.hex(), warn=False), job, one_host=len(hosts) == 1)
    place = {
        "address": address,
        "port": port,
        "secret": secret.hex(),
        "job": job,
        "number": secrets.randbits(31),
        "hosts": list(hosts.values()),
    }
    ours.set("place", json.dumps(place))
    return place


def _address(store: Store, config: EngineConfig) -> str:
    """Return the address at which ranks of other hosts reach this one, which is rank 0."""
    if config.interface:
        return interface_address([config.interface])
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    named = store.host if isinstance(store, TCPStore) else master_address()
    if named:
        return str(named)
    raise HorovodInternalError(
        "the ranks are on several hosts and nothing names an address of rank 0's host: set MASTER_ADDR, or "
        "HOROVOD_GLOO_IFACE to a network interface"
    )


def _secret(of_store: str, *, warn: bool) -> bytes:
    file = user_secret_file()
    if not file:
        accept_risk(
            "the ranks of torch.distributed meet through its store without a secret: a process that reaches the store "
            "can join this job. Set HORA_SECRET_FILE to a file that all ranks can read and nobody else, or start the "
            "job with hora run",
            warn=warn,
        )
    return derived_secret(read_secret_file(file) if file else b"", f"a store with {of_store}")


def _get(store: Store, key: str, limit_s: float, what: str) -> bytes:
    try:
        store.wait([key], timedelta(seconds=limit_s))
        return bytes(store.get(key))
    except _STORE_ERRORS as error:
        raise HorovodInternalError(f"waited {limit_s:g} s for {what}: {error}") from error
