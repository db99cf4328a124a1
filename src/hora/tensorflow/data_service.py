"""`tf.data` service for a training: separate processes, started as another job, that prepare the data.

    horovodrun -np 4 python -m horovod.tensorflow.data.compute_worker /shared/service.json
    horovodrun -np 2 python train.py     # reads the file and sends its datasets there

Rank 0 of the compute job keeps a table of dispatchers and workers (`KeyValueStore`), with its address and key in the
file. Its traffic is authenticated. The servers of `tf.data` are TensorFlow's and have no authentication: whoever
reaches one reads and writes files as its user. In a job of one host nothing but this host reaches them. Between hosts
they listen on all addresses, which HORA_STRICT=1 rejects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

import hora.torch as hvd
from hora import engine
from hora.config import accept_risk
from hora.errors import AuthenticationError
from hora.files import replaced
from hora.net.client import ControlClient
from hora.net.key_value_store import KeyValueStore
from hora.net.sockets import source_address
from hora.net.wire import Credentials, new_secret
from hora.world import RendezvousEndpoint

log = logging.getLogger("hora")

_PURPOSE = "the tf.data service"
_PAUSE_S = 0.2
_SHUTDOWN_SLICE_S = 30.0
_SIDES = ("compute", "training")


@dataclasses.dataclass(frozen=True)
class TfDataServiceConfig:
    """Description of a data service.

    Args:
        dispatcher_side: "compute" or "training", which runs the dispatchers.
        addresses: Of the table, by network interface.
        timeout: Seconds that each part waits for the others.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Mapping[str, Sequence[tuple[str, int]]]
    key: bytes = dataclasses.field(repr=False)
    timeout: int = 60

    def __post_init__(self) -> None:
        if self.dispatcher_side not in _SIDES:
            raise ValueError(f"dispatcher_side must be one of {', '.join(_SIDES)}, but it is {self.dispatcher_side!r}")
        for name in ("dispatchers", "workers_per_dispatcher"):
            if getattr(self, name) < 1:
                raise ValueError(f"the number of {name} must be larger than 0, but it is {getattr(self, name)}")

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """Connect to the table. Raises ConnectionError with the addresses that were tried."""
        return ComputeClient(self)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"key": self.key.hex()}

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        places = {nic: [(str(host), int(port)) for host, port in found] for nic, found in config["addresses"].items()}
        return TfDataServiceConfig(**{**config, "addresses": places, "key": bytes.fromhex(config["key"])})

    def write(self, filename: str) -> None:
        """Write the file atomically, readable only by this user: it holds the key."""
        path = Path(filename)
        with replaced(path, unfinished=f".{path.name}.{os.getpid()}", mode=0o600) as file:
            file.write(json.dumps(self.to_dict()).encode())

    @staticmethod
    def read(filename: str, wait_for_file_creation: bool = False, timeout: float = 600.0) -> TfDataServiceConfig:
        """Read the file; optionally wait up to `timeout` seconds until it exists. Raises TimeoutError."""
        path, deadline = Path(filename), time.monotonic() + timeout
        while wait_for_file_creation and not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no compute worker has written {path} for {timeout:g} s; start them with `horovodrun … python -m "
                    f"horovod.tensorflow.data.compute_worker {path}`"
                )
            time.sleep(_PAUSE_S)
        return TfDataServiceConfig.from_dict(json.loads(path.read_text()))


class ComputeClient:
    """A connection to the table of dispatchers and workers."""

    def __init__(self, config: TfDataServiceConfig) -> None:
        self._config = config
        credentials, problems = Credentials(config.key, _PURPOSE), []
        for host, port in [place for places in config.addresses.values() for place in places]:
            endpoint = RendezvousEndpoint(kind="tcp", address=host, port=port, job=_PURPOSE)
            try:
                self._client = ControlClient.connect(
                    endpoint, name="a tf.data client", timeout_s=config.timeout, credentials=credentials
                )
                return
            except (OSError, AuthenticationError) as error:
                problems.append(str(error))
        raise ConnectionError(f"cannot reach the tf.data service: {'; '.join(problems)}; do its compute workers run?")

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Register the address of a dispatcher."""
        self._client.set(f"dispatcher/{self._checked(dispatcher_id)}", dispatcher_address.encode())

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        """Wait for the address of a dispatcher and return it. Raises TimeoutError."""
        return self._client.get(f"dispatcher/{self._checked(dispatcher_id)}", timeout_s=timeout).decode()

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Register a worker of a dispatcher."""
        self._client.set(f"worker/{self._checked(dispatcher_id)}/{worker_id}", b"1")

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        """Wait until all workers of a dispatcher are registered. Raises TimeoutError."""
        deadline, each = time.monotonic() + timeout, self._config.workers_per_dispatcher
        first = self._checked(dispatcher_id) * each
        for worker in range(first, first + each):
            left_s = max(deadline - time.monotonic(), 0.001)
            self._client.get(f"worker/{dispatcher_id}/{worker}", timeout_s=left_s)

    def shutdown(self) -> None:
        """End the compute workers."""
        self._client.set("shutdown", b"1")

    def wait_for_shutdown(self) -> None:
        """Wait until the service is shut down, or rank 0 of the compute job is gone."""
        while True:
            try:
                self._client.get("shutdown", timeout_s=_SHUTDOWN_SLICE_S)
                return
            except TimeoutError:
                continue  # idle: a service runs as long as it is needed
            except ConnectionError:
                return

    def close(self) -> None:
        self._client.close()

    def _checked(self, dispatcher_id: int) -> int:
        if not 0 <= dispatcher_id < self._config.dispatchers:
            raise IndexError(f"Dispatcher id must be within [0..{self._config.dispatchers - 1}]: {dispatcher_id}")
        return dispatcher_id


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Yield the address of this rank's dispatcher, for `tf.data.experimental.service.distribute`."""
    client, server = compute_config.compute_client(), None
    several = compute_config.dispatchers > 1
    try:
        if compute_config.dispatcher_side == "training" and (several or rank == 0):
            _accept_reach()
            server = _started(tf.data.experimental.service.DispatchServer)
            client.register_dispatcher(rank, _reachable(server.target))
        mine = rank if several else 0
        address = client.wait_for_dispatcher_registration(mine, compute_config.timeout)
        client.wait_for_dispatcher_worker_registration(mine, compute_config.timeout)
        yield address
    finally:
        client.close()
        _stop(server)


def send_to_data_service(
    dataset: Any,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> Any:
    """Return the dataset as the service's workers prepare it.

    Args:
        dataset: A `tf.data.Dataset`, the same on every rank.
        compute_config: Where the service is, from its file.
        rank: This process's rank.
        size: The number of ranks; needed with `round_robin`.
        processing_mode: How the service's workers divide the dataset, as in `tf.data.experimental.service`.
        reuse_dataset: Whether all ranks share the elements; otherwise each gets all.
        round_robin: With `reuse_dataset`: the ranks get elements in turns.
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError(
            "send_to_data_service needs dispatchers on the compute side; with --dispatcher-side training use the "
            "context manager tf_data_service"
        )
    in_turns = reuse_dataset and round_robin
    with tf_data_service(compute_config, rank) as address:
        return dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode=processing_mode,
                service=address,
                job_name="job" if reuse_dataset else None,
                consumer_index=rank if in_turns else None,
                num_consumers=size if in_turns else None,
            )
        )


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Run a worker of the data service, and on some ranks a dispatcher, until the service is shut down."""
    hvd.init()
    index, each = hvd.rank(), compute_config.workers_per_dispatcher
    dispatcher_id, timeout = index // each, compute_config.timeout
    client = compute_config.compute_client()
    dispatcher = worker = None
    try:
        if compute_config.dispatcher_side == "compute" and index % each == 0:
            dispatcher = _started(tf.data.experimental.service.DispatchServer)
            client.register_dispatcher(dispatcher_id, _reachable(dispatcher.target))
        address = client.wait_for_dispatcher_registration(dispatcher_id, timeout)
        options = tf.data.experimental.service.WorkerConfig(
            dispatcher_address=address.partition("://")[2],
            worker_address=f"{_own_address()}:%port%",
            heartbeat_interval_ms=1000,
            dispatcher_timeout_ms=timeout * 1000,
        )
        worker = _started(lambda: tf.data.experimental.service.WorkerServer(options))
        client.register_worker_for_dispatcher(dispatcher_id, index)
        log.info("worker %d serves dispatcher %d at %s", index, dispatcher_id, address)
        client.wait_for_shutdown()
    finally:
        client.close()
        _stop(worker)
        _stop(dispatcher)


def serve(configfile: str, dispatchers: int = 1, dispatcher_side: str = "compute", timeout: int = 60) -> None:
    """Run this rank of a compute job; rank 0 keeps the table and writes the file."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    if dispatchers < 1 or size % dispatchers:
        raise ValueError(
            f"the number of processes ({size}) must be a multiple of the number of dispatchers ({dispatchers})"
        )
    _accept_reach()
    table = config = None
    try:
        if rank == 0:
            key = new_secret()
            listening = "127.0.0.1" if _is_one_host() else "0.0.0.0"
            table = KeyValueStore((listening, 0), Credentials(key, _PURPOSE), name="hora-data-service")
            places = {"all": [(_own_address(), table.port)]}
            config = TfDataServiceConfig(dispatchers, size // dispatchers, dispatcher_side, places, key, timeout)
            config.write(configfile)
        compute_worker_fn(hvd.broadcast_object(config, name="TfDataServiceConfig"))
        hvd.barrier()  # the others know of the shutdown
    finally:
        if table is not None:
            table.close()


def _own_address() -> str:
    """Return the address at which other hosts reach this one; loopback if there are none."""
    runtime = engine.current_runtime()
    address = runtime.world.rendezvous.address
    if _is_one_host() or not address:
        return "127.0.0.1"
    return source_address(address)


def _is_one_host() -> bool:
    return len(engine.current_runtime().sharing) == 1


def _accept_reach() -> None:
    """Warn that the servers of a job on several hosts are open; raises ValueError with HORA_STRICT=1."""
    if not _is_one_host():
        accept_risk(
            "the servers of tf.data listen on all addresses of these hosts and have no authentication: whoever reaches "
            "them reads and writes files as you. Keep them on a private network, or run the compute workers on one "
            "host, with the training",
            warn=hvd.rank() == 0,
        )


def _started(start: Callable[[], Any]) -> Any:
    """Start a server of TensorFlow; in a job of one host it accepts nothing from other hosts.

    TensorFlow has no setting for the address on which a server listens.
    """
    before = {found.getsockname()[1] for found in _listening()}
    server = start()
    if _is_one_host():
        try:
            for found in _listening():
                if found.getsockname()[1] not in before:
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
        except OSError as error:  # Linux before 5.7
            _stop(server)
            accept_risk(f"a server of tf.data would accept other hosts: this kernel does not confine it ({error})")
            server = start()
    return server


def _listening() -> Iterator[socket.socket]:
    """Yield the sockets of this process that listen on a port, each while it is used."""
    for name in os.listdir("/proc/self/fd"):
        try:
            copied = os.dup(int(name))
        except OSError:  # closed since
            continue
        try:
            found = socket.socket(fileno=copied)
        except OSError:
            os.close(copied)
            continue
        with found:
            inet = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
            if inet and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield found


def _reachable(target: str) -> str:
    """Return a dispatcher's target for other hosts: TensorFlow reports localhost."""
    return target.replace("localhost", _own_address())


def _stop(server: Any) -> None:
    if server is not None:
        server._stop()  # TensorFlow has no public method
        server.join()
