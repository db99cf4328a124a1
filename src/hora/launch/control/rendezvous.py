"""The rendezvous: where the workers of a job meet and report. The server side of `hora.net.client`.

It keeps the job's key-value table, completes all-gathers, knows which ranks are lost, hands out worlds
generation by generation, and passes results, errors and log lines on to the controller
(`RendezvousEvents`). It starts nothing and decides nothing. All state belongs to the server's thread;
public methods may be called from anywhere.

A request is answered with `{"re": id}` on success and `{"re": id, "error": kind, "message": text}`
otherwise, where kind is `timeout`, `lost`, `mismatch`, `removed` or `refused`. A request that must wait is parked
until what it waits for happens, its time limit passes, its peer goes, or a rank it depends on is lost.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from hora.net.server import Peer, Server, Timer
from hora.net.wire import Credentials, Header
from hora.world import World

__all__ = ["ErrorReport", "Rendezvous", "RendezvousEvents"]

_TOLD = 16  # ranks that a message names
# What a worker says ends up in the headers of messages to others, which have room for so much.
_KEY_CHARACTERS, _NAME_CHARACTERS, _LINE_BYTES = 4096, 200, 64 * 1024
_TELEMETRY_BYTES = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """An exception as its worker described it. `consequence`: it only says that another rank was lost.

    `pickled` is the cloudpickled exception (empty where it could not be pickled).
    """

    type_name: str
    message: str
    traceback: str
    consequence: bool = False
    pickled: bytes = field(default=b"", repr=False)

    @property
    def headline(self) -> str:
        return f"{self.type_name}: {self.message}".partition("\n")[0][:200]


class RendezvousEvents(Protocol):
    """Where the rendezvous reports. Called in its thread: implementations only take note."""

    def joined(self, worker: int) -> None:
        """A worker has connected and identified itself."""

    def returned(self, worker: int, result: bytes) -> None:
        """The function returned on this worker."""

    def raised(self, worker: int, report: ErrorReport) -> None:
        """The function raised on this worker."""

    def said(self, worker: int, text: str) -> None:
        """A line that a worker wants to be shown where the job was started."""

    def waiting(self, worker: int, generation: int) -> None:
        """The worker waits for a world later than this generation."""

    def lost(self, worker: int) -> None:
        """The worker's connection ended without a good-bye."""

    def told(self, worker: int, kind: str, data: bytes) -> None:
        """A worker's telemetry (`hora.telemetry`), or its answer to a question."""


@dataclass
class _Parked:
    """A request that waits for its answer."""

    peer: Peer
    request: int
    describe: Callable[[], str]
    payload: bytes = b""
    timer: Timer | None = None
    answered: bool = False

    def answer(self, header: Header, payload: bytes = b"") -> None:
        """Answer once; later attempts (a time limit that passes, say) do nothing."""
        if not self.answered:
            self.answered = True
            if self.timer is not None:
                self.timer.cancel()
            self.peer.send({"re": self.request} | header, payload)


@dataclass
class _Gather:
    size: int
    parked: dict[int, _Parked] = field(default_factory=dict)  # by rank

    @property
    def complete(self) -> bool:
        return len(self.parked) == self.size

    def lacks(self, rank: int) -> bool:
        return 0 <= rank < self.size and rank not in self.parked

    def missing(self) -> str:
        """The ranks that have not come: not all of them, should there be thousands."""
        missing = (rank for rank in range(self.size) if rank not in self.parked)
        first = list(itertools.islice(missing, _TOLD))
        rest = self.size - len(self.parked) - len(first)
        return f"ranks {first} are missing" + (f", and {rest} others" if rest else "")


@dataclass
class _Worlds:
    generation: int = -1
    by_worker: dict[int, World] = field(default_factory=dict)


class Rendezvous:
    """The server. `set` what workers will `get`, publish worlds, and tell it when workers' processes end."""

    def __init__(self, bind_address: str, *, secret: bytes, job: str, events: RendezvousEvents) -> None:
        self._events = events
        self._table: dict[str, bytes] = {}
        self._gets: dict[str, list[_Parked]] = {}
        self._gathers: dict[str, _Gather] = {}
        self._next_worlds: dict[int, tuple[_Parked, int]] = {}
        self._worlds = _Worlds()
        self._gone: dict[int, str] = {}  # rank of the current generation -> how it went
        self._failed = False  # one of them went badly
        self._heard: dict[int, float] = {}  # worker -> when
        self._given_up: set[int] = set()  # workers that have no place ever again, should they turn up
        self._reporting: dict[int, Peer] = {}  # worker -> the connection over which it tells how it does
        self._ranks: dict[Peer, tuple[int, int]] = {}  # generation and rank for which a peer spoke last
        self._server = Server(self, name="hora-rendezvous")
        self.port = self._server.listen((bind_address, 0))
        self._server.start(Credentials(secret, job))

    def set(self, key: str, value: bytes) -> None:
        self._server.call(lambda: self._store(key, value))

    def notify(self, notice: Header) -> None:
        """Push a notice to every connected worker."""
        self._server.call(lambda: self._broadcast(notice))

    def worker_exited(self, worker: int, how: str, *, failed: bool) -> None:
        """A worker's process has ended: ranks that wait for it need not wait any longer."""
        self._server.call(lambda: self._worker_gone(worker, how, failed))

    def ping(self) -> None:
        """Ask every connected worker for a sign of life; `heard_at` tells of it."""
        self._server.call(lambda: self._broadcast({"notice": "ping"}))

    def heard_at(self, worker: int) -> float | None:
        """When a message of this worker came last."""
        return self._heard.get(worker)

    def give_up(self, worker: int) -> None:
        """Have nothing to do with this worker any more, should it still be alive somewhere."""
        self._server.call(lambda: self._dismiss(worker))

    def ask(self, question: Header, worker: int | None = None) -> None:
        """Put a question to one worker, or to all that tell how they do; the answer comes as `told`."""
        self._server.call(lambda: self._ask(question, worker))

    def publish(self, generation: int, worlds: Mapping[int, World]) -> None:
        """Give workers (by number) their places in a new generation; a worker without one is told to leave."""
        self._server.call(lambda: self._publish(generation, dict(worlds)))

    def close(self) -> None:
        self._server.close()

    # ---- in the server's thread -------------------------------------------------------------------------

    def message(self, peer: Peer, header: Header, payload: bytes) -> None:
        operation = _OPERATIONS.get(str(header["op"]))
        if operation is None:
            raise ValueError(f"unknown operation {header['op']!r}")
        operation(self, peer, header, payload)
        if peer.number >= 0:
            self._heard[peer.number] = time.monotonic()

    def closed(self, peer: Peer) -> None:
        for parked in self._gets.values():
            parked[:] = [one for one in parked if one.peer is not peer]
        for worker, (one, _) in list(self._next_worlds.items()):
            if one.peer is peer:
                del self._next_worlds[worker]
        # News of a rank of an earlier generation says nothing about today's bearer of its number.
        generation, rank = self._ranks.pop(peer, (None, -1))
        for key, gather in list(self._gathers.items()):
            if generation == self._worlds.generation and gather.lacks(rank):
                self._fail_gather(key, f"rank {rank} closed its connection without a good-bye")
            elif any(one.peer is peer for one in gather.parked.values()):
                self._fail_gather(key, f"{peer.name} closed its connection without a good-bye")
        self._reporting = {worker: other for worker, other in self._reporting.items() if other is not peer}
        if peer.number >= 0:
            self._events.lost(peer.number)

    def _hello(self, peer: Peer, header: Header, payload: bytes) -> None:
        peer.name, peer.number = str(header["name"])[:_NAME_CHARACTERS], int(header["worker"])
        if peer.number in self._given_up:
            message = f"worker {peer.number} was given up by the launcher and its place is somebody else's"
            peer.number = -1
            peer.send({"re": header["id"], "error": "refused", "message": message})
            return
        self._answer(peer, header["id"])
        if peer.number >= 0:
            self._events.joined(peer.number)

    def _pong(self, peer: Peer, header: Header, payload: bytes) -> None:
        """Taken note of already."""

    def _bye(self, peer: Peer, header: Header, payload: bytes) -> None:
        # A worker that says good-bye is no loss: forget which it was, so that the end of its connection is no news.
        peer.number = -1
        self._ranks.pop(peer, None)
        self._answer(peer, header["id"])

    def _set(self, peer: Peer, header: Header, payload: bytes) -> None:
        self._store(_key(header), payload)
        self._answer(peer, header["id"])

    def _get(self, peer: Peer, header: Header, payload: bytes) -> None:
        key = _key(header)
        if key in self._table:
            self._answer(peer, header["id"], self._table[key])
            return
        parked = self._park(peer, header, lambda: f"nobody has set {key!r}")
        if self._failed:
            parked.answer({"error": "lost", "message": self._obituary()})
        else:
            self._gets.setdefault(key, []).append(parked)

    def _add(self, peer: Peer, header: Header, payload: bytes) -> None:
        key = _key(header)
        total = int(self._table.get(key, b"0")) + int(header["amount"])
        self._store(key, str(total).encode())
        self._answer(peer, header["id"], str(total).encode())

    def _delete(self, peer: Peer, header: Header, payload: bytes) -> None:
        existed = self._table.pop(_key(header), None) is not None
        self._answer(peer, header["id"], b"1" if existed else b"0")

    def _check(self, peer: Peer, header: Header, payload: bytes) -> None:
        present = all(str(key) in self._table for key in header["keys"])
        self._answer(peer, header["id"], b"1" if present else b"0")

    def _gather(self, peer: Peer, header: Header, payload: bytes) -> None:
        key, rank, size = _key(header), int(header["rank"]), int(header["size"])
        gather = self._gathers.setdefault(key, _Gather(size))
        if gather.size != size or not 0 <= rank < size or rank in gather.parked:
            # The ranks that wait already would wait in vain: all of them hear of the disagreement.
            why = f"rank {rank} of {size} does not fit: it meets ranks {sorted(gather.parked)} of {gather.size}"
            self._park(peer, header, str).answer({"error": "mismatch", "message": f"all-gather {key!r}: {why}"})
            self._fail_gather(key, why)
            return
        self._ranks[peer] = (self._worlds.generation, rank)
        gather.parked[rank] = self._park(peer, header, gather.missing, payload)
        if gather.complete:
            del self._gathers[key]
            self._complete(gather)
        elif any(gather.lacks(gone) for gone in self._gone):
            self._fail_gather(key, self._obituary())

    def _complete(self, gather: _Gather) -> None:
        values = [gather.parked[rank].payload for rank in range(gather.size)]
        joined, lengths = b"".join(values), [len(value) for value in values]
        for parked in gather.parked.values():
            parked.answer({"lengths": lengths}, joined)

    def _returned(self, peer: Peer, header: Header, payload: bytes) -> None:
        self._events.returned(peer.number, payload)
        self._answer(peer, header["id"])

    def _raised(self, peer: Peer, header: Header, payload: bytes) -> None:
        report = ErrorReport(
            type_name=str(header["type"]),
            message=str(header["message"]),
            traceback=str(header["traceback"]),
            consequence=bool(header["consequence"]),
            pickled=payload,
        )
        self._events.raised(peer.number, report)
        self._answer(peer, header["id"])

    def _said(self, peer: Peer, header: Header, payload: bytes) -> None:
        self._events.said(peer.number, payload[:_LINE_BYTES].decode(errors="replace"))

    def _told(self, peer: Peer, header: Header, payload: bytes) -> None:
        worker = peer.number if peer.number >= 0 else int(header["worker"])
        self._reporting[worker] = peer
        if len(payload) <= _TELEMETRY_BYTES:
            self._events.told(worker, str(header["kind"]), payload)

    def _ask(self, question: Header, worker: int | None) -> None:
        for number, peer in self._reporting.items():
            if worker is None or number == worker:
                peer.send({"notice": "question", **question})

    def _next_world(self, peer: Peer, header: Header, payload: bytes) -> None:
        generation = int(header["generation"])
        parked = self._park(peer, header, lambda: f"no world after generation {generation} was announced")
        worker = peer.number
        # A newcomer (its generation is negative) waits until there is a place for it.
        known = generation >= 0 or worker in self._worlds.by_worker or worker in self._given_up
        if self._worlds.generation > generation and known:
            self._give_world(parked, peer.number)
        else:
            self._next_worlds[peer.number] = (parked, generation)
            self._events.waiting(peer.number, generation)

    def _publish(self, generation: int, worlds: dict[int, World]) -> None:
        self._worlds = _Worlds(generation, worlds)
        self._gone.clear()
        self._failed = False
        for worker, (parked, after) in list(self._next_worlds.items()):
            if generation > after and (after >= 0 or worker in worlds):
                del self._next_worlds[worker]
                self._give_world(parked, worker)

    def _dismiss(self, worker: int) -> None:
        self._given_up.add(worker)
        parked, _ = self._next_worlds.pop(worker, (None, -1))
        if parked is not None:
            self._give_world(parked, worker)

    def _give_world(self, parked: _Parked, worker: int) -> None:
        world = None if worker in self._given_up else self._worlds.by_worker.get(worker)
        if world is None:
            message = f"generation {self._worlds.generation} has no place for this worker"
            parked.answer({"error": "removed", "message": message})
        else:
            parked.answer({"world": world.to_env()})

    def _store(self, key: str, value: bytes) -> None:
        self._table[key] = value
        for parked in self._gets.pop(key, []):
            parked.answer({}, value)

    def _broadcast(self, notice: Header) -> None:
        for peer in self._server.peers:
            peer.send(notice)

    def _worker_gone(self, worker: int, how: str, failed: bool) -> None:
        world = self._worlds.by_worker.get(worker)
        if world is None and self._worlds.by_worker:
            return  # it has no place in this generation: no rank waits for it
        rank = worker if world is None else world.rank
        self._gone[rank] = how
        self._failed = self._failed or failed
        for key, gather in list(self._gathers.items()):
            if gather.lacks(rank):
                self._fail_gather(key, self._obituary())
        if failed:
            waiting = [one for parked in self._gets.values() for one in parked]
            self._gets.clear()
            for one in waiting:
                one.answer({"error": "lost", "message": self._obituary()})
            generation = self._worlds.generation
            self._broadcast({"notice": "lost", "rank": rank, "generation": generation, "how": how})

    def _obituary(self) -> str:
        """How ranks went: not of all, should there be thousands, because a message's header is small."""
        told = [f"rank {rank} {how}" for rank, how in sorted(self._gone.items())]
        return "; ".join([*told[:_TOLD], f"and {len(told) - _TOLD} others"] if len(told) > _TOLD else told)

    def _fail_gather(self, key: str, why: str) -> None:
        for parked in self._gathers.pop(key).parked.values():
            parked.answer({"error": "lost", "message": why})

    def _park(self, peer: Peer, header: Header, describe: Callable[[], str], payload: bytes = b"") -> _Parked:
        parked = _Parked(peer, int(header["id"]), describe, payload)
        deadline = time.monotonic() + _limit_s(header)
        parked.timer = self._server.call_at(deadline, lambda: self._expire(parked))
        return parked

    def _expire(self, parked: _Parked) -> None:
        parked.answer({"error": "timeout", "message": parked.describe()})
        self._forget(parked)

    def _forget(self, parked: _Parked) -> None:
        for key, gather in list(self._gathers.items()):
            for rank, one in list(gather.parked.items()):
                if one is parked:
                    del gather.parked[rank]
            if not gather.parked:
                del self._gathers[key]
        for waiting in self._gets.values():
            waiting[:] = [one for one in waiting if one is not parked]

    def _answer(self, peer: Peer, request: int, payload: bytes = b"") -> None:
        peer.send({"re": request}, payload)


def _key(header: Header) -> str:
    key = header["key"]
    if not isinstance(key, str) or len(key) > _KEY_CHARACTERS:
        raise ValueError(f"a key must be text of at most {_KEY_CHARACTERS} characters")
    return key


def _limit_s(header: Header) -> float:
    limit_s = float(header["timeout_s"])
    if not math.isfinite(limit_s):
        raise ValueError(f"a time limit must be a number of seconds, but it is {limit_s}")
    return limit_s


_OPERATIONS: dict[str, Callable[[Rendezvous, Peer, Header, bytes], None]] = {
    "hello": Rendezvous._hello,
    "bye": Rendezvous._bye,
    "pong": Rendezvous._pong,
    "set": Rendezvous._set,
    "get": Rendezvous._get,
    "add": Rendezvous._add,
    "delete": Rendezvous._delete,
    "check": Rendezvous._check,
    "gather": Rendezvous._gather,
    "returned": Rendezvous._returned,
    "raised": Rendezvous._raised,
    "said": Rendezvous._said,
    "told": Rendezvous._told,
    "next_world": Rendezvous._next_world,
}
