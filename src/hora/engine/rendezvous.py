"""The rendezvous: where the ranks of a world exchange first data, before they are connected.

It uses the `RendezvousEndpoint` of the launcher (`hora.world`): Hora's authenticated rendezvous, or under torchrun and
other launchers a store of rank 0, which is open to anyone unless the user gave the ranks a secret. It carries only what
ranks need to find one another: the names of ranks on the same host, and the address of a rank's parent. Everything for
all ranks goes through the control tree (`ControlTree.gather`), so that the rendezvous sends a number of bytes that is
linear in the number of ranks, not quadratic. `open_rendezvous` connects once per process; a reinitialized runtime
reuses the connection. Nothing received through it is unpickled.

Ranks started by torch.distributed first use the store that it passes to its backends (`world_of_store`):

    arrivals   each rank counts itself, so that a second initialization of the same ranks uses other keys
    host       each rank publishes its host
    place      rank 0 publishes the address and secret of its store, and which ranks share hosts

From then on they meet at rank 0's store, as under any foreign launcher, and torch's store is not used again. A reader
of torch's store can join the job; with `HORA_SECRET_FILE` it needs that secret, too.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hora.config import EngineConfig, accept_risk
from hora.engine.rank_tree import FANOUT
from hora.errors import AuthenticationError, HorovodInternalError
from hora.net.client import ControlClient, RankGroup
from hora.net.key_value_store import KeyValueStore, grouped
from hora.net.keys import RankKeys, read_secret_file, world_secret
from hora.net.sockets import interface_address, listen, listening_address, source_address
from hora.net.wire import Credentials, derived_secret
from hora.platforms.detect import master_address, user_secret_file
from hora.world import RendezvousEndpoint, World

_PAUSE_S = 0.1
_OURS = 1 + secrets.randbits(62)  # this process's number
_ANSWER_S = 5.0  # for a handshake, where there are more ports to try
_STORE_ERRORS = (RuntimeError, dist.DistError, TimeoutError)
_SLICE_S = 0.5  # the longest wait of one request at the server between liveness checks


class RendezvousClient:
    """Client of a Hora launcher's rendezvous, which has our keys, or of rank 0's store, for ranks with `secret`."""

    def __init__(self, client: ControlClient, secret: bytes | None = None) -> None:
        self.client = client
        self._secret = secret

    def keys(self, world: World, epoch: str, *, limit_s: float) -> RankKeys:
        """Return this rank's keys in its world; `epoch` names this initialization."""
        secret = self._secret
        if secret is not None:
            return RankKeys.derived(world_secret(secret, epoch), world.rank)

        def get(ranks: Sequence[int]) -> bytes:
            return self.client.rank_keys(world, epoch, ranks, timeout_s=limit_s)

        return RankKeys(world.rank, get, at_once=[0] if world.rank else [])

    def gather(self, key: str, group: str, value: bytes, *, rank: int, size: int, limit_s: float) -> RankGroup:
        """Return the values of this group's ranks, once all have come. HorovodInternalError names missing ranks."""
        try:
            return self.client.gather(key, value, rank=rank, size=size, timeout_s=limit_s, group=group, fanout=FANOUT)
        except TimeoutError as error:
            raise HorovodInternalError(f"{error} (limit: HOROVOD_GLOO_TIMEOUT_SECONDS={limit_s:g})") from error
        except ConnectionError as error:
            if self._secret is None:
                raise  # the launcher is gone, and this process ends with it
            raise HorovodInternalError(
                f"the ranks cannot meet: rank 0, which hosts the rendezvous, is gone ({error})"
            ) from error


_open: dict[RendezvousEndpoint, RendezvousClient] = {}


def open_rendezvous(world: World, *, limit_s: float) -> RendezvousClient:
    """Return the rendezvous of this world: a new one, or that of an earlier initialization."""
    point = world.rendezvous
    if point in _open:
        return _open[point]
    if point.kind == "hora":
        # An elastic worker requests its next place over this connection, so the connection is that worker's.
        worker, credentials = world.worker if world.elastic else -1, None
        if point.planned and not point.secret_file.startswith("/proc/"):  # a file that the user gave to both ends
            credentials = Credentials(read_secret_file(point.secret_file), point.job, point.worker)
        name = f"rank {world.rank}"
        rendezvous = RendezvousClient(
            ControlClient.connect(point, name=name, timeout_s=limit_s, worker=worker, credentials=credentials)
        )
    else:
        if not point.secret_file:
            accept_risk(
                f"the ranks meet without a secret at {point.endpoint}: anyone who reaches it, such as another user "
                "of this machine, can end this job or send it wrong values. Set HORA_SECRET_FILE to a file that all "
                "ranks can read and nobody else (umask 077; openssl rand -hex 32 > FILE), or start the job with "
                "horovodrun",
                warn=world.rank == 0,
            )
        rendezvous = meet_at_rank_0(beside_torch(world), limit_s)
    _open[point] = rendezvous
    return rendezvous


def beside_torch(world: World) -> World:
    """Return the same world, with a rendezvous at torch's existing store if there is one.

    If torch's process group was created from the same variables, as Ray Train does, its store is already at the
    endpoint, and rank 0 opens none.
    """
    if not world.rendezvous.host_store or not dist.is_initialized():
        return world
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    there = isinstance(store, TCPStore) and store.port == world.rendezvous.port
    return replace(world, rendezvous=replace(world.rendezvous, host_store=False)) if there else world


def control_client(world: World) -> ControlClient | None:
    """Return the control connection of this world, if a Hora launcher runs it and it is open."""
    rendezvous = _open.get(world.rendezvous) if world.rendezvous.kind == "hora" else None
    return None if rendezvous is None else rendezvous.client


stores: dict[RendezvousEndpoint, KeyValueStore] = {}  # of rank 0, until the end of its process


def meet_at_rank_0(world: World, limit_s: float) -> RendezvousClient:
    """Return the rendezvous at rank 0's store: at the address that the launcher named, or beside torchrun's store."""
    point, deadline = world.rendezvous, time.monotonic() + limit_s
    secret = read_secret_file(point.secret_file) if point.secret_file else b""  # shared by all ranks
    if world.rank == 0 and point not in stores:
        stores[point] = _open_store(world, secret)
    if not point.host_store:
        store = stores[point] if world.rank == 0 else None
        point = replace(point, port=_published_port(point, store, limit_s))
    return _join(point, secret, world.rank, deadline)


def close_store(point: RendezvousEndpoint) -> None:
    """Close this rank's connection to the store at this endpoint, and the store if it is rank 0's."""
    rendezvous, store = _open.pop(point, None), stores.pop(point, None)
    if rendezvous is not None:
        rendezvous.client.close()
    if store is not None:
        store.close()


def _open_store(world: World, secret: bytes) -> KeyValueStore:
    point = world.rendezvous
    address = listening_address(point.address, one_host=world.local_size >= world.size)
    ports = point.ports if point.host_store else (0,)
    for port in ports:
        try:
            return _new_store((address, port), secret, point.job)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == ports[-1]:
                tried = ", ".join(map(str, ports))
                raise HorovodInternalError(
                    f"rank 0 cannot listen at {address}:{tried} ({error.strerror}): set MASTER_PORT to a free port"
                ) from error
    raise AssertionError("there is always a port to try")


def _credentials(secret: bytes, job: str) -> Credentials:
    return Credentials(derived_secret(secret, "the meeting"), job)


def _new_store(where: tuple[str, int], secret: bytes, job: str) -> KeyValueStore:
    store = KeyValueStore(where, _credentials(secret, job), name="hora-rendezvous")
    store.set("salt", secrets.token_bytes(32))
    return store


def _join(point: RendezvousEndpoint, secret: bytes, rank: int, deadline: float) -> RendezvousClient:
    """Connect to rank 0's store, as soon as it exists: at the first of its ports where this rank's own rank 0 answers.

    Another world's answers under another name. One of the same name whose rank of this number has come already belongs
    to another program of the same step, which is about to end.
    """
    credentials, waiting_s = _credentials(secret, point.job), deadline - time.monotonic()
    problem: OSError = ConnectionError("nobody answers")
    for turn in itertools.count():
        here = replace(point, port=point.ports[turn % len(point.ports)])
        left_s = max(deadline - time.monotonic(), 0.001)
        try:
            limit_s = min(left_s, _ANSWER_S) if point.more_ports else left_s
            client = ControlClient.connect(here, name=f"rank {rank}", timeout_s=limit_s, credentials=credentials)
            # A multiple of our number: every arrival was ours, perhaps in a start that failed halfway.
            if client.add(f"arrivals of rank {rank}", _OURS) % _OURS == 0:
                # The user may use one file for many jobs: derive a secret for this one.
                salt = client.get("salt", timeout_s=left_s)
                return RendezvousClient(client, derived_secret(secret, f"the job {point.job} {salt.hex()}"))
            client.close()
            problem = ConnectionError(f"the program there has its rank {rank} already; is it about to end?")
        except (AuthenticationError, TimeoutError) as error:
            if not point.more_ports:
                raise HorovodInternalError(
                    f"cannot meet rank 0 at {point.endpoint} (MASTER_ADDR, MASTER_PORT): {error}; "
                    "do all ranks have the same HORA_SECRET_FILE, and is the port no other job's?"
                ) from error
            problem = error
        except ConnectionError as error:
            if not point.more_ports:  # an error of a port without a listener says least
                problem = error
        if left_s <= _PAUSE_S:
            raise HorovodInternalError(
                f"cannot reach rank 0 at {point.endpoint} (MASTER_ADDR, MASTER_PORT) within {waiting_s:g} s: {problem}"
            ) from problem
        if (turn + 1) % len(point.ports) == 0:
            time.sleep(_PAUSE_S)
    raise AssertionError("the loop above ends by itself")


_torch_stores = itertools.count()  # that this process has opened, as often as the other ranks
_control_stores: dict[int, list[ControlStore]] = {}  # by generation: torch does not keep their Python half


def open_torch_store(world: World, *, limit_s: float) -> Store:
    """Return a store for torch's groups.

    It is at the rendezvous of a Hora launcher, or hosted by rank 0 for other launchers' ranks. Where the user chose no
    port, rank 0's has a free one, published through the ranks' rendezvous.
    """
    point, limit = world.rendezvous, timedelta(seconds=limit_s)
    if point.kind == "hora":
        client = open_rendezvous(world, limit_s=limit_s).client
        opened = _control_stores.setdefault(world.generation, [])  # as often on each rank: values stay
        opened.append(ControlStore(client, prefix=f"torch/{world.generation}.{len(opened)}", timeout_s=limit_s))
        return opened[-1]
    if not point.more_ports:
        address = point.address or "127.0.0.1"
        return TCPStore(address, point.port, world.size, world.rank == 0, limit, multi_tenant=True)
    key, client = f"torch store {next(_torch_stores)}", open_rendezvous(world, limit_s=limit_s).client
    if world.rank == 0:
        listener = listen((listening_address(point.address, one_host=world.local_size >= world.size), 0))
        port, descriptor = listener.getsockname()[1], listener.detach()
        store = TCPStore(
            point.address, port, world.size, True, limit, wait_for_workers=False, master_listen_fd=descriptor
        )
        client.set(key, str(store.port).encode())
        return store
    return TCPStore(point.address, int(client.get(key, timeout_s=limit_s)), world.size, False, limit)


def _published_port(point: RendezvousEndpoint, store: KeyValueStore | None, limit_s: float) -> int:
    """Return the port of rank 0's store, exchanged through torchrun's store.

    It is not secret: with a forged port the ranks connect to a server that cannot authenticate.
    """
    try:
        timeout = timedelta(seconds=limit_s)
        opened = TCPStore(point.address, point.port, is_master=False, wait_for_workers=False, timeout=timeout)
        torchrun = PrefixStore(f"hora/{point.job}", opened)
        if store is not None:
            torchrun.set("table", str(store.port))
    except _STORE_ERRORS as error:
        raise HorovodInternalError(
            f"cannot reach the rendezvous at {point.endpoint} (MASTER_ADDR, MASTER_PORT): {error}"
        ) from error
    text = _get(torchrun, "table", limit_s, "rank 0 to call hvd.init() (limit: HOROVOD_GLOO_TIMEOUT_SECONDS)")
    if not text.isdigit() or not 0 < int(text[:6]) < 2**16:
        raise HorovodInternalError(f"the port of rank 0's rendezvous is not a number, but {text[:20]!r}")
    return int(text)


def _get(store: Store, key: str, limit_s: float, what: str) -> bytes:
    try:
        store.wait([key], timedelta(seconds=limit_s))
        return bytes(store.get(key))
    except _STORE_ERRORS as error:
        raise HorovodInternalError(f"waited {limit_s:g} s for {what}: {error}") from error


# Ranks started by torch.distributed.


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
    point = RendezvousEndpoint(kind="tcp", address=place["address"], port=place["port"], job=place["job"])
    _open[point] = _join(point, _secret(place["secret"], warn=rank == 0), rank, time.monotonic() + limit_s)
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


class MeetingPlace:
    """A store of this process at which others meet it, with the handle by which they reach it."""

    def __init__(self, config: EngineConfig) -> None:
        secret, job, towards = secrets.token_bytes(32), secrets.token_hex(16), master_address() or "127.0.0.1"
        address = interface_address([config.interface]) if config.interface else source_address(towards)
        self._store = KeyValueStore((address, 0), _credentials(secret, job), name="hora-meeting")
        self.handle = json.dumps([time.time(), address, self._store.port, job, secret.hex()])

    def close(self) -> None:
        self._store.close()


def open_meeting(handle: str, name: str, *, limit_s: float) -> tuple[Store, Callable[[], None]]:
    """Return a part of the store that a handle names, and a function that leaves it."""
    _, address, port, job, secret = json.loads(handle)
    point = RendezvousEndpoint(kind="tcp", address=address, port=port, job=job)
    credentials = _credentials(bytes.fromhex(secret), job)
    client = ControlClient.connect(point, name=name, timeout_s=limit_s, credentials=credentials)
    return ControlStore(client, prefix=name, timeout_s=limit_s), client.close


def age(handle: str) -> float:
    """Return when the process of this handle opened its meeting place."""
    return float(json.loads(handle)[0])


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
    hosts = grouped(found)
    secret, job = secrets.token_bytes(32), secrets.token_hex(16)
    address = "127.0.0.1" if len(hosts) == 1 else _address(store, config)
    where = listening_address(address, one_host=len(hosts) == 1), 0
    opened = _new_store(where, _secret(secret.hex(), warn=False), job)
    stores[RendezvousEndpoint(kind="tcp", address=address, port=opened.port, job=job)] = opened
    place = {
        "address": address,
        "port": opened.port,
        "secret": secret.hex(),
        "job": job,
        "number": secrets.randbits(31),
        "hosts": hosts,
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


def host_fingerprint() -> str:
    """Return a text that is equal for processes that may share a host; attaching to each other's memory proves it."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


# Stores for torch.


class ControlStore(Store):
    """A torch store at an authenticated rendezvous, for NCCL's addresses and for torch's groups.

    It replaces an open TCPStore. Torch calls the methods, also from its own threads. Keys are under `prefix`. Waits end
    after `timeout_s`, or when `check_alive` raises.
    """

    timeout: timedelta  # of torch's class, with `set_timeout`

    def __init__(
        self, client: ControlClient, *, prefix: str, timeout_s: float, check_alive: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self._client = client
        self._prefix = prefix
        self._check_alive = check_alive
        self._clones: list[ControlStore] = []

    def clone(self) -> ControlStore:
        limit_s = self.timeout.total_seconds()
        copy = ControlStore(self._client, prefix=self._prefix, timeout_s=limit_s, check_alive=self._check_alive)
        self._clones.append(copy)
        return copy

    def set(self, key: str, value: str | bytes) -> None:
        self._client.set(self._key(key), _bytes(value))

    def get(self, key: str) -> bytes:
        return self._get(key, self.timeout.total_seconds())

    def add(self, key: str, amount: int) -> int:
        return self._client.add(self._key(key), amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._client.check([self._key(key) for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout).total_seconds()
        for key in keys:
            self._get(key, max(deadline - time.monotonic(), 0.001))

    def delete_key(self, key: str) -> bool:
        return self._client.delete(self._key(key))

    deleteKey = delete_key  # noqa: N815 - C++ calls it by this name

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set `key` if its value is `expected` (empty: or the key is missing); returns the value afterwards."""
        lock = f"{key}/lock"
        deadline = time.monotonic() + self.timeout.total_seconds()
        # `add` is the server's only atomic read-modify-write: the rank that counts to one holds the lock, and its
        # release wakes the next.
        turn = self.add(f"{lock}/turns", 1)
        if turn > 1:
            self._get(f"{lock}/{turn - 1}", max(deadline - time.monotonic(), 0.001))
            self.delete_key(f"{lock}/{turn - 1}")
        try:
            current = self.get(key) if self.check([key]) else b""
            if current == _bytes(expected):
                current = _bytes(desired)
                self.set(key, current)
            return current
        finally:
            self.set(f"{lock}/{turn}", b"released")

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _get(self, key: str, limit_s: float) -> bytes:
        deadline = time.monotonic() + limit_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                return self._client.get(self._key(key), timeout_s=max(min(left_s, _SLICE_S), 0.001))
            except TimeoutError:
                self._check_alive()
                if left_s <= _SLICE_S:
                    raise TimeoutError(f"waited {limit_s:g} s for the key {self._key(key)!r}") from None


def _bytes(value: str | bytes) -> bytes:
    # Values may be binary; Python callers also pass strings.
    return value.encode() if isinstance(value, str) else bytes(value)
