"""The rendezvous: where the workers of a job meet and report.

`Rendezvous` extends the key-value store: it knows which ranks are lost, publishes worlds generation by generation, and
passes results, errors and log lines to the controller (`RendezvousEvents`). It makes no decisions. To the errors of the
store's answers it adds `removed` and `refused`.

Every worker has its own key (`hora.net.keys`), so the sender is known: it reports only on itself, takes part in
barriers only as its own rank, and gets only the keys of generations in which it has a place.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from hora.logs import printable
from hora.net import requests
from hora.net.key_value_store import NAME_CHARACTERS, Call, KeyValueStore
from hora.net.keys import rank_keys, world_secret
from hora.net.server import Peer
from hora.net.wire import Credentials, Header, worker_key
from hora.platforms.horovod import variables_of
from hora.world import World

_LINE_BYTES, _TELEMETRY_BYTES = 64 * 1024, 1024 * 1024
_KEYS_BYTES = 256 * 1024
_LAUNCHERS_KEYS = "hora/"  # only the launcher sets keys with this prefix
_READING = (requests.Get, requests.Check, requests.Keys)
_WRITING = (requests.Set, requests.Add, requests.Delete, requests.Gather)


class RendezvousEvents:
    """Interface to which the rendezvous reports, in its thread: never block. This class ignores all events."""

    def joined(self, worker: int) -> None:
        """A worker has connected and identified itself."""

    def returned(self, worker: int, result: bytes) -> None:
        """The function returned on this worker."""

    def raised(self, worker: int, report: requests.Raised) -> None:
        """The function raised on this worker."""

    def on_log_line(self, worker: int, text: str) -> None:
        """A worker's line for the terminal where the job was started."""

    def waiting(self, worker: int, generation: int) -> None:
        """The worker waits for a world later than this generation."""

    def lost(self, worker: int) -> None:
        """The worker's connection ended without a closing message."""

    def on_telemetry(self, worker: int, kind: str, data: bytes) -> None:
        """A worker's telemetry (`hora.telemetry`), or its answer to a question."""


class Rendezvous(KeyValueStore):
    """The controller sets values, publishes worlds, reports exits. Workers ignore leaders of an earlier `term`."""

    def __init__(
        self,
        bind_address: str,
        *,
        secret: bytes,
        job: str,
        events: RendezvousEvents,
        term: int = 0,
        port: int = 0,
        key_of: Callable[[int], bytes] | None = None,
    ) -> None:
        """`key_of`: the key of a worker, unless it is the one derived from the secret and its number."""
        self._events = events
        self._stamp: Header = {"term": term} if term else {}
        self._secret = secret
        self._next_worlds: dict[int, Call[requests.NextWorld]] = {}
        self._worlds: dict[int, World] = {}  # of this generation, by worker
        self._heard: dict[int, float] = {}  # worker -> when
        self._named: WeakValueDictionary[tuple[int, str], Peer] = WeakValueDictionary()  # by worker and its own name
        self._notices: list[Header] = []  # of this generation
        self._given_up: set[int] = set()  # workers that are dismissed for good
        self._reporting: dict[int, Peer] = {}  # worker -> the connection of its telemetry

        def credentials(worker: int) -> Credentials:
            key = worker_key(secret, worker) if key_of is None else key_of(worker)
            return Credentials(key, job, worker)

        super().__init__((bind_address, port), credentials, name="hora-rendezvous")

    def notify(self, notice: Header) -> None:
        """Push a notice to every connected worker; each answers a `ping`, see `heard_at`."""
        self._server.call(lambda: self._broadcast(notice))

    def worker_exited(self, worker: int, how: str, *, failed: bool) -> None:
        """A worker's process has ended: release the ranks that wait for it."""
        self._server.call(lambda: self._worker_gone(worker, how, failed))

    def heard_at(self, worker: int) -> float | None:
        """Return when this worker last sent a message."""
        return self._heard.get(worker)

    def reject(self, worker: int, how: str = "", *, failed: bool = False) -> None:
        """Reject this worker from now on, even if it is still alive. `how`: release the ranks that wait for it.

        Only the first call has an effect.
        """
        self._server.call(lambda: self._dismiss(worker, how, failed))

    def query(self, question: Header, worker: int | None = None) -> None:
        """Send a question to one worker, or to all that send telemetry; the answer arrives as `telemetry`."""
        self._server.call(lambda: self._query(question, worker))

    def publish(self, generation: int, worlds: Mapping[int, World]) -> None:
        """Give workers (by number) their places in a new generation; a worker without one is dismissed."""
        self._server.call(lambda: self._publish(generation, dict(worlds)))

    # ---- in the server's thread -------------------------------------------------------------------------

    def _carry_out(self, call: Call[Any]) -> None:
        why = self._objection(call.peer, call.request)
        if why:
            call.answer(error="refused", message=why)
            return
        super()._carry_out(call)
        # A rank of a job of fixed size has its worker's key, although its connection is not that worker's.
        worker = max(call.peer.number, call.peer.speaker)
        if worker >= 0:
            self._heard[worker] = time.monotonic()

    def closed(self, peer: Peer) -> None:
        self._next_worlds = {worker: call for worker, call in self._next_worlds.items() if call.peer is not peer}
        super().closed(peer)
        self._reporting = {worker: other for worker, other in self._reporting.items() if other is not peer}
        if peer.number >= 0:
            self._events.lost(peer.number)

    def _objection(self, peer: Peer, request: requests.Request) -> str:
        """Return why this worker may not do that, or "". The holder of the job's secret (-1) may do anything."""
        worker, writes = peer.speaker, isinstance(request, _WRITING)
        if isinstance(request, _WRITING) and request.key.startswith(_LAUNCHERS_KEYS):
            return f"{request.key!r} is set by the launcher alone"
        if worker < 0 or not (writes or isinstance(request, _READING)):
            return ""
        if worker in self._given_up:
            return f"worker {worker} was given up by the launcher"
        if writes and self._worlds and worker not in self._worlds:
            return f"worker {worker} has no place in generation {self.generation}"
        if isinstance(request, requests.Gather) and request.rank != self._rank_of(worker):
            return f"worker {worker} is not rank {request.rank} of generation {self.generation}"
        return ""

    def _rank_of(self, worker: int) -> int | None:
        """Return its rank in this generation. Before the first generation, numbers are ranks."""
        if not self._worlds:
            return worker
        return self._worlds[worker].rank if worker in self._worlds else None

    def _on_hello(self, call: Call[requests.Hello]) -> None:
        peer, worker = call.peer, call.request.worker
        if peer.speaker >= 0 and worker not in (-1, peer.speaker):
            raise ValueError(f"worker {peer.speaker} wants to speak for worker {worker}")
        if worker in self._given_up or peer.speaker in self._given_up:
            known = worker if peer.speaker < 0 else peer.speaker
            why = f"worker {known} was given up by the launcher: another worker has its place"
            call.answer(error="refused", message=why)
            return
        name = printable(call.request.name[:NAME_CHARACTERS])
        if worker >= 0:
            other = self._named.get((worker, name))
            if other is not None and other is not peer:
                other.number = -1  # it reconnected before the loss was noticed
            self._named[worker, name] = peer
        peer.name, peer.number = name, worker
        call.answer(**self._stamp)
        if worker >= 0:
            self._events.joined(worker)
            for notice in self._notices:  # which it may have missed
                peer.send(notice)

    def _on_keys(self, call: Call[requests.Keys]) -> None:
        """Send a rank the keys of its world over its own encrypted connection."""
        rank, generation, epoch, data = call.request
        speaker = call.peer.speaker
        if generation != self.generation or (speaker >= 0 and rank != self._rank_of(speaker)):
            place = f"rank {rank} of generation {generation}"
            call.answer(error="refused", message=f"this worker is not {place}: it is generation {self.generation} now")
            return
        if len(data) > _KEYS_BYTES:
            raise ValueError(f"keys towards {len(data) // 4} ranks were requested at once")
        towards = struct.unpack(f">{len(data) // 4}I", data)
        call.answer(rank_keys(world_secret(self._secret, f"{generation} {epoch}"), rank, towards))

    def _on_returned(self, call: Call[requests.Returned]) -> None:
        self._events.returned(call.peer.number, call.request.data)
        call.answer()

    def _on_raised(self, call: Call[requests.Raised]) -> None:
        self._events.raised(call.peer.number, call.request)
        call.answer()

    def _on_log_line(self, call: Call[requests.LogLine]) -> None:
        self._events.on_log_line(call.peer.number, call.request.data[:_LINE_BYTES].decode(errors="replace"))

    def _on_telemetry(self, call: Call[requests.Telemetry]) -> None:
        worker = call.peer.speaker if call.peer.speaker >= 0 else call.request.worker
        if worker in self._given_up:
            return
        self._reporting[worker] = call.peer
        if len(call.request.data) <= _TELEMETRY_BYTES:
            self._events.on_telemetry(worker, call.request.kind, call.request.data)

    def _query(self, question: Header, worker: int | None) -> None:
        for number, peer in self._reporting.items():
            if worker is None or number == worker:
                peer.send({"notice": "question", **question})

    def _on_next_world(self, call: Call[requests.NextWorld]) -> None:
        worker, generation = call.peer.number, call.request.generation
        self._park(call, lambda: f"no world after generation {generation} was announced")
        # A new worker (its generation is negative) waits until there is a place for it.
        known = generation >= 0 or worker in self._worlds or worker in self._given_up
        if self.generation > generation and known:
            self._give_world(call, worker)
        else:
            self._next_worlds[worker] = call
            if generation == self.generation and worker in self._worlds:  # it takes part in no barrier any more
                self._release(self._worlds[worker].rank, "waits for the next world")
            self._events.waiting(worker, generation)

    def _release(self, rank: int, how: str) -> None:
        """Release the ranks that wait for this one in a barrier."""
        self._gone[rank] = how
        for key, gather in list(self._gathers.items()):
            if gather.lacks(rank):
                self._fail_gather(key, self._lost_ranks_message())

    def _publish(self, generation: int, worlds: dict[int, World]) -> None:
        self.generation, self._worlds = generation, worlds
        self._gone.clear()
        self._notices.clear()
        self._failed = False
        for worker, call in list(self._next_worlds.items()):
            after = call.request.generation
            if generation > after and (after >= 0 or worker in worlds):
                del self._next_worlds[worker]
                self._give_world(call, worker)

    def _dismiss(self, worker: int, how: str, failed: bool) -> None:
        if worker in self._given_up:
            return
        self._given_up.add(worker)
        if how:
            self._worker_gone(worker, how, failed)
        call = self._next_worlds.pop(worker, None)
        if call is not None:
            self._give_world(call, worker)

    def _give_world(self, call: Call[requests.NextWorld], worker: int) -> None:
        world = None if worker in self._given_up else self._worlds.get(worker)
        if world is None:
            call.answer(error="removed", message=f"generation {self.generation} has no place for this worker")
        else:
            call.answer(world=variables_of(world), **self._stamp)

    def _broadcast(self, notice: Header) -> None:
        notice = {**notice, **self._stamp}
        if "generation" in notice:
            self._notices.append(notice)
        for peer in self._server.peers:
            peer.send(notice)

    def _worker_gone(self, worker: int, how: str, failed: bool) -> None:
        world = self._worlds.get(worker)
        if world is None and self._worlds:
            return  # it has no place in this generation: no rank waits for it
        rank = worker if world is None else world.rank
        self._failed = self._failed or failed
        self._release(rank, how)
        if failed:
            for call in itertools.chain(*self._gets.values()):
                call.answer(error="lost", message=self._lost_ranks_message())
            self._gets.clear()
            self._broadcast({"notice": "lost", "rank": rank, "generation": self.generation, "how": how})
