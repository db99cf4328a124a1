"""A process's place in a job: its rank, the size of the world, and where its ranks meet.

It reads no variables: `hora.platforms` does. It opens no connection: the engine does, with the `RendezvousEndpoint`.
"""

from __future__ import annotations

from dataclasses import dataclass

# Rendezvous of a program that starts its ranks itself: its name, and the key of its current plan's number.
PLAN_JOB, PLAN_KEY = "a plan of the program's own", "hora/plan"


@dataclass(frozen=True, kw_only=True)
class RendezvousEndpoint:
    """Rendezvous of a world's ranks.

    `kind` is one of:
    - `hora`: an authenticated rendezvous of a Hora launcher.
    - `tcp`: hosted by rank 0, or by torchrun; authenticated if the user gave a secret file.
    - `none`: a world of one.
    """

    kind: str = "none"
    address: str = ""  # of the launcher or of rank 0
    port: int = 0
    secret_file: str = ""  # the key of this worker, or a secret that all share
    job: str = ""  # its name, part of every handshake
    worker: int = -1  # the number of the worker that owns the key; -1: the secret is shared by all
    host_store: bool = False  # rank 0 hosts the rendezvous; else torchrun does
    more_ports: tuple[int, ...] = ()  # where rank 0 tries next, if the port was not chosen by the user and is taken
    return_s: float = 10.0  # a worker may reconnect within this time
    leaderless_s: float = 0.0  # and to a launcher that is started again within this
    term: int = 0  # of the launcher that started this worker, which obeys none of an earlier term
    relay: str = ""  # the local socket of this node's relay to it

    @property
    def where(self) -> str | tuple[str, int]:
        """The address to connect to: the name of a local socket, or host and port."""
        return self.relay or (self.address, self.port)

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports at which rank 0 may host the rendezvous, in the order in which it tries them."""
        return self.port, *self.more_ports

    @property
    def planned(self) -> bool:
        """Return whether a program assigns the ranks here, plan by plan (`horovod.runner.http.http_server`)."""
        return self.job == PLAN_JOB

    @property
    def endpoint(self) -> str:
        return self.relay or f"{self.address}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class World:
    """A process's place in a job."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    hostname: str = "localhost"
    generation: int = 0
    worker: int = -1  # the process's number in its job, which stays when ranks change (-1: no Hora launcher)
    elastic: bool = False
    launcher: str = "none"
    rendezvous: RendezvousEndpoint = RendezvousEndpoint()

    def __post_init__(self) -> None:
        for rank, size, what in (
            (self.rank, self.size, ""),
            (self.local_rank, self.local_size, "local "),
            (self.cross_rank, self.cross_size, "cross "),
        ):
            if size < 1:
                raise ValueError(
                    f"the {what}size of the world must be at least 1, but it is {size} ({self.launcher} variables)"
                )
            if not 0 <= rank < size:
                raise ValueError(
                    f"the {what}rank must lie in 0..{size - 1}, but it is {rank} with {what}size {size} "
                    f"({self.launcher} variables); check what the launcher set"
                )

    @property
    def number(self) -> int:
        """This process's number in its job; its rank if no launcher has numbered the processes."""
        return self.rank if self.worker < 0 else self.worker
