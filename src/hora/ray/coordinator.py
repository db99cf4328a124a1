"""Where the ranks of a static executor meet. Also driven by Ray Train's `HorovodTrainer`, which only sets the variables
that it gets here in its own actors."""

from __future__ import annotations

import secrets
import weakref
from typing import Any

import ray

from hora.launch.control.rendezvous import OnlyLines, Rendezvous
from hora.launch.slots import Slot, place_ranks
from hora.net.address import interface_address
from hora.net.wire import new_secret
from hora.world import MeetingPoint

__all__ = ["Coordinator", "driver_address"]


def driver_address(nics: Any) -> str:
    """This machine's address that the other nodes reach: on one of these interfaces, or the one that Ray uses."""
    return interface_address(nics) if nics else str(ray.util.get_node_ip_address())


class Coordinator:
    """`register` every rank, in their order; the two dicts then tell each its place, and all of them where they meet."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.nics = settings.nics
        self.rendezvous: Rendezvous | None = None
        self.global_rendezv_port: int | None = None
        self.node_id_by_rank: dict[int, str] = {}
        self._hostnames: set[str] = set()

    @property
    def world_size(self) -> int:
        return len(self.node_id_by_rank)

    @property
    def hostnames(self) -> set[str]:
        return self._hostnames

    @property
    def node_id_string(self) -> str:
        """`id:count,id:count`"""
        nodes = list(self.node_id_by_rank.values())
        return ",".join(f"{node}:{nodes.count(node)}" for node in dict.fromkeys(nodes))

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        """The next rank. Its node's id decides which ranks are on the same host."""
        self._hostnames.add(hostname)
        self.node_id_by_rank[world_rank] = node_id

    def finalize_registration(self) -> dict[int, dict[str, int]]:
        """Each rank's place among those of its node, and among those with the same local rank."""
        return {
            slot.rank: {
                "HOROVOD_CROSS_RANK": slot.cross_rank,
                "HOROVOD_CROSS_SIZE": slot.cross_size,
                "HOROVOD_LOCAL_RANK": slot.local_rank,
                "HOROVOD_LOCAL_SIZE": slot.local_size,
            }
            for slot in self._slots()
        }

    def _slots(self) -> list[Slot]:
        return place_ranks([node for _, node in sorted(self.node_id_by_rank.items())])

    def establish_rendezvous(self) -> dict[str, str]:
        """Open the meeting place; returns the variables with which every rank finds it and is let in.

        One of them is the meeting's secret: `hvd.init()` takes it out of the environment.
        """
        self.close()
        address, job, secret = driver_address(self.nics), secrets.token_hex(8), new_secret()
        self.rendezvous = Rendezvous(address, secret=secret, job=job, events=OnlyLines())
        self.global_rendezv_port = self.rendezvous.port
        self._close = weakref.finalize(self, self.rendezvous.close)
        self._meeting = MeetingPoint(kind="hora", address=address, port=self.rendezvous.port, job=job)
        self.begin_anew()
        return {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.rendezvous.port),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HORA_JOB": job,
            "HORA_SECRET": secret.hex(),
        }

    def begin_anew(self) -> None:
        """All ranks are there, as far as is known: what was said of lost ones is forgotten."""
        assert self.rendezvous is not None
        self.rendezvous.publish(0, {slot.rank: slot.world(self._meeting) for slot in self._slots()})

    def lost(self, rank: int, how: str) -> None:
        """The other ranks need not wait for this one any longer."""
        if self.rendezvous is not None:
            self.rendezvous.worker_exited(rank, how, failed=True)

    def close(self) -> None:
        """Nobody meets here any more."""
        if self.rendezvous is not None:
            self._close()
            self.rendezvous = None
