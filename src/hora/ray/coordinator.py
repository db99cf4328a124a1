"""Rendezvous of a static executor's ranks, which can be observed.

Ray Train's `HorovodTrainer` also uses it; it only sets the variables from here in its own actors.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ray

from hora.launch.environment import variables
from hora.launch.job import Observation, Watching
from hora.launch.slots import Slot, place_ranks
from hora.net.rendezvous import Rendezvous
from hora.net.sockets import interface_address
from hora.net.wire import new_secret
from hora.world import RendezvousEndpoint


def driver_address(nics: Any) -> str:
    """Return this machine's address for the other nodes: on one of these interfaces, or the one that Ray uses."""
    return interface_address(nics) if nics else str(ray.util.get_node_ip_address())


class Coordinator:
    """`register` every rank in order; the two dicts then give each rank its place and the rendezvous.

    `end(why)` ends the workers, for the live page; without it they are released from waiting for each other.
    """

    def __init__(self, settings: Any, end: Callable[[str], None] | None = None) -> None:
        self.settings = settings
        self._end = end
        self.nics = settings.nics
        self.rendezvous: Rendezvous | None = None
        self.global_rendezv_port: int | None = None
        self.node_id_by_rank: dict[int, str] = {}
        self._hostnames: dict[int, str] = {}
        self._observation: Observation

    @property
    def world_size(self) -> int:
        return len(self.node_id_by_rank)

    @property
    def hostnames(self) -> set[str]:
        return set(self._hostnames.values())

    @property
    def node_id_string(self) -> str:
        """`id:count,id:count`"""
        nodes = list(self.node_id_by_rank.values())
        return ",".join(f"{node}:{nodes.count(node)}" for node in dict.fromkeys(nodes))

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        """Register the next rank. Ranks with the same node id are on the same host."""
        self._hostnames[world_rank] = hostname
        self.node_id_by_rank[world_rank] = node_id

    def finalize_registration(self) -> dict[int, dict[str, int]]:
        """Return each rank's place among the ranks of its node, and among those with the same local rank."""
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
        """Open the rendezvous; returns the variables with which ranks find it and authenticate.

        One of them is the secret: `hvd.init()` removes it from the environment.
        """
        self.close()
        address, job, secret = driver_address(self.nics), secrets.token_hex(8), new_secret()
        self._observation = Observation()
        self.rendezvous = Rendezvous(address, secret=secret, job=job, events=self._observation)
        self._observation.rendezvous = self.rendezvous
        self.global_rendezv_port = self.rendezvous.port
        self._close = weakref.finalize(self, self.rendezvous.close)
        self._endpoint = RendezvousEndpoint(kind="hora", address=address, port=self.rendezvous.port, job=job)
        watching = Watching.wanted(variables())
        size = len(self.node_id_by_rank)
        self._observation.observe(watching, self, job, title="horovod.ray", platform="Ray", num_ranks=size)
        self.begin_anew()
        return {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.rendezvous.port),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HORA_JOB": job,
            "HORA_SECRET": secret.hex(),
            **self._observation.reporting,
        }

    def begin_anew(self) -> None:
        """Forget lost ranks: assume that all ranks are present."""
        assert self.rendezvous is not None
        worlds = {slot.rank: slot.world(self._endpoint) for slot in self._slots()}
        # Users know hosts by name, not by Ray's node ids.
        named = {rank: replace(world, hostname=self._hostnames[rank]) for rank, world in worlds.items()}
        self._observation.tell_world(0, named)
        self.rendezvous.publish(0, worlds)

    def lost(self, rank: int, how: str) -> None:
        """Report a lost rank, so that the other ranks stop waiting for it."""
        if self.rendezvous is not None:
            self._observation.tell("note", "exited", rank, code=1, reason=how)
            self.rendezvous.worker_exited(rank, how, failed=True)

    def close(self, outcome: str = "done", text: str = "") -> None:
        """Close the rendezvous; the page shows that the job is `done`, `failed` or `stopped`, and why."""
        if self.rendezvous is not None:
            self._observation.tell("ended", outcome, text)
            self._observation.observer = None
            self._close()
            self.rendezvous = None

    # ---- what the page may do, from other threads --------------------------------------------------------------

    def query(self, question: Mapping[str, Any], worker: int | None = None) -> None:
        if self.rendezvous is not None:
            self.rendezvous.query(dict(question), worker)

    def stop(self, why: str) -> None:
        if self._end is not None:
            self._end(why)
        else:
            for rank in self.node_id_by_rank:
                self.lost(rank, f"was stopped: {why}")

    def remove(self, worker: int, why: str) -> None:
        raise ValueError(f"rank {worker} cannot be removed: a job of a fixed size ends with any of its ranks ({why})")
