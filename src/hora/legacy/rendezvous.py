"""Rendezvous for programs that start their ranks themselves (ElasticDL, Orca, TonY).

It implements `horovod.runner.http.http_server` and `horovod.runner.gloo_run`. The master starts a `RendezvousServer`
and publishes the ranks with `init`, once per membership. Workers find it by Horovod's variables and call `hvd.init()`.
It does not speak HTTP, and answers only clients that hold its secret. Horovod has no variable for a secret, so workers
get `RendezvousServer.secret` as HORA_SECRET, or master and workers share a HORA_SECRET_FILE.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from hora.launch.environment import variables
from hora.launch.job import Observation
from hora.launch.slots import Slot
from hora.net.keys import read_secret_file
from hora.net.rendezvous import Rendezvous
from hora.net.wire import new_secret
from hora.world import PLAN_JOB, PLAN_KEY, RendezvousEndpoint


def create_slot_env_vars(slot_info: Slot) -> dict[str, str]:
    """Return the variables of a rank's place."""
    names = ("hostname", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    return {f"HOROVOD_{name.upper()}": str(getattr(slot_info, name)) for name in names}


def create_run_env_vars(server_ip: str, nics: Collection[str], port: int, elastic: bool = False) -> dict[str, str]:
    """Return the variables of the rendezvous and its interfaces, for all ranks."""
    variables = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": server_ip,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": sorted(nics)[0] if nics else "",
        "NCCL_SOCKET_IFNAME": ",".join(sorted(nics)),
    }
    return variables | ({"HOROVOD_ELASTIC": "1"} if elastic else {})


def get_min_start_hosts(settings: Any) -> int:
    """Return the number of hosts that an elastic job needs to start: one."""
    return 1


def gloo_run(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise NotImplementedError with the function to use instead."""
    raise NotImplementedError("Hora does not start jobs this way: use horovod.run(function, num_proc=…) or horovodrun")


gloo_run_elastic = launch_gloo = launch_gloo_elastic = gloo_run


class RendezvousHandler:
    """Default handler class of Horovod's server; unused here."""


class RendezvousHTTPServer:
    """Exists only for imports."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ValueError("there is no rendezvous over HTTP here: use RendezvousServer, or horovod.run")


class RendezvousServer:
    """`start`, `init` with the slots, `stop`. `secret`, set by `start`, is the workers' HORA_SECRET."""

    def __init__(self, verbose: int = 0) -> None:
        self.verbose = verbose
        self.secret = ""
        self._rendezvous: Rendezvous | None = None
        self._plans = 0

    def start(self, handler_cls: type = RendezvousHandler) -> int:
        """Listen on every address of this machine: the program chooses which one the workers use."""
        if handler_cls is not RendezvousHandler:
            raise ValueError(f"handler_cls={handler_cls!r}: request handlers are not supported; leave it out")
        if self._rendezvous is not None:
            raise ValueError("this RendezvousServer is already running: stop() it first")
        path = variables().get("HORA_SECRET_FILE", "")
        secret = read_secret_file(path) if path else new_secret()
        self.secret = secret.hex()
        events = Observation()
        self._rendezvous = events.rendezvous = Rendezvous("0.0.0.0", secret=secret, job=PLAN_JOB, events=events)
        return self._rendezvous.port

    def init(self, host_alloc_plan: Sequence[Slot]) -> None:
        """Publish the slots. Workers that call `hvd.init()` after this use them."""
        if self._rendezvous is None:
            raise ValueError("this RendezvousServer is not running: start() it first")
        endpoint = RendezvousEndpoint(kind="hora", port=self._rendezvous.port, job=PLAN_JOB)
        self._rendezvous.publish(self._plans, {slot.rank: slot.world(endpoint) for slot in host_alloc_plan})
        self._rendezvous.set(PLAN_KEY, str(self._plans).encode())
        self._rendezvous.flush()  # a worker may ask before the rendezvous's thread has stored it
        self._plans += 1

    def stop(self) -> None:
        """Close the rendezvous."""
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None
