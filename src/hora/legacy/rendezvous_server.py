"""`horovod.runner.http.http_server`: the meeting place of programs that start their ranks themselves (ElasticDL, Orca,
TonY).

The master opens it and says who has which place (`init`, again for every new membership); its workers find it by
Horovod's variables and call `hvd.init()`. Nothing of it is HTTP, and only clients that hold the meeting's secret are
answered. Horovod's variables have no room for one, so there is one more: the workers get `RendezvousServer.secret` as
HORA_SECRET, or master and workers have the same HORA_SECRET_FILE.
"""

from __future__ import annotations

from collections.abc import Sequence

from hora.launch.control.rendezvous import OnlyLines, Rendezvous
from hora.launch.environment import variables
from hora.launch.slots import Slot
from hora.net.secret_file import read_secret_file
from hora.net.wire import new_secret
from hora.world import PLAN_JOB, PLAN_KEY, MeetingPoint

__all__ = ["RendezvousHTTPServer", "RendezvousHandler", "RendezvousServer"]


class RendezvousHandler:
    """The name of what Horovod's server is given by default. There is nothing to handle here."""


class RendezvousHTTPServer:
    """A name for imports."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ValueError("there is no rendezvous over HTTP here: use RendezvousServer, or horovod.run")


class RendezvousServer:
    """`start`, `init` with the places, `stop`. `secret`, from `start` on: what workers need as HORA_SECRET."""

    def __init__(self, verbose: int = 0) -> None:
        self.verbose = verbose
        self.secret = ""
        self._rendezvous: Rendezvous | None = None
        self._plans = 0

    def start(self, handler_cls: type = RendezvousHandler) -> int:
        """Listen, at every address of this machine: the program chooses which of them the workers use."""
        if handler_cls is not RendezvousHandler:
            raise ValueError(f"handler_cls={handler_cls!r}: handlers of requests have no place here; leave it out")
        if self._rendezvous is not None:
            raise ValueError("this RendezvousServer has been started: stop() it first")
        path = variables().get("HORA_SECRET_FILE", "")
        secret = read_secret_file(path) if path else new_secret()
        self.secret = secret.hex()
        self._rendezvous = Rendezvous("0.0.0.0", secret=secret, job=PLAN_JOB, events=OnlyLines())
        return self._rendezvous.port

    def init(self, host_alloc_plan: Sequence[Slot]) -> None:
        """These are the places from now on. Workers that call `hvd.init()` after this meet in them."""
        if self._rendezvous is None:
            raise ValueError("this RendezvousServer listens nowhere: start() it first")
        meeting = MeetingPoint(kind="hora", port=self._rendezvous.port, job=PLAN_JOB)
        self._rendezvous.publish(self._plans, {slot.rank: slot.world(meeting) for slot in host_alloc_plan})
        self._rendezvous.set(PLAN_KEY, str(self._plans).encode())
        self._rendezvous.settle()  # a worker may ask sooner than the meeting's thread looks
        self._plans += 1

    def stop(self) -> None:
        """Nobody meets here any more."""
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None
