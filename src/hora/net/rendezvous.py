"""The rendezvous: where the workers of a job meet and report. The server side of `hora.net.client`.

`KeyValueStore` is a store with all-gathers: under a foreign launcher rank 0 serves a plain one. The launcher's
`Rendezvous` extends it: it knows which ranks are lost, publishes worlds generation by generation, and passes results,
errors and log lines to the controller (`RendezvousEvents`). It makes no decisions. The server's thread owns all state;
public methods are thread-safe.

The answer to a request is `{"re": id}` on success and `{"re": id, "error": kind, "message": text}` otherwise, where
kind is `timeout`, `lost` or `mismatch`, or from the launcher `removed` or `refused`. A request that must wait is parked
until its condition holds, its time limit passes, its peer disconnects, or a rank it depends on is lost.

Every worker has its own key (`hora.net.keys`), so the sender is known: it reports only on itself, takes part in
barriers only as its own rank, and gets only the keys of generations in which it has a place.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from hora.logs import printable
from hora.net import requests
from hora.net.keys import rank_keys, world_secret
from hora.net.messages import Pong, checked
from hora.net.server import Peer, Server, Timer
from hora.net.wire import Credentials, CredentialsOf, Header, join_parts, worker_key
from hora.world import World

_SHOWN = 16  # ranks named in a message
# A process's text ends up in the headers of messages to others, which are limited.
_KEY_CHARACTERS, _NAME_CHARACTERS = 4096, 200
_LINE_BYTES, _TELEMETRY_BYTES = 64 * 1024, 1024 * 1024
_KEYS_BYTES = 256 * 1024
# What one worker may keep in the launcher's memory: values that it has set, and contributions to gathers that wait.
WORKERS_BYTES = 64 * 1024 * 1024
_WORKERS_GATHERS = 64
_ENTRY_BYTES = 500  # of the tables, beside key and value
_LAUNCHERS_KEYS = "hora/"  # only the launcher sets keys with this prefix
_READING = (requests.Get, requests.Check, requests.Keys)
_WRITING = (requests.Set, requests.Add, requests.Delete, requests.Gather)
_UNANSWERED = (Pong, requests.LogLine, requests.Telemetry)

R = TypeVar("R", bound=requests.Request)


@dataclass(eq=False)
class Call(Generic[R]):
    """A request of a peer, which may wait for its answer. `number`: the answer repeats it."""

    peer: Peer
    number: int
    request: R
    timer: Timer | None = None
    answered: bool = False

    def answer(self, data: bytes = b"", **header: Any) -> None:
        """Answer once; later attempts (such as an expired time limit) do nothing."""
        if not self.answered:
            self.answered = True
            if self.timer is not None:
                self.timer.cancel()
            self.peer.send({"re": self.number, **header}, data)


@dataclass
class _Gather:
    size: int
    parked: dict[int, Call[requests.Gather]] = field(default_factory=dict)  # by rank

    @property
    def complete(self) -> bool:
        return len(self.parked) == self.size

    def lacks(self, rank: int) -> bool:
        return 0 <= rank < self.size and rank not in self.parked

    def missing(self) -> str:
        """Describe the missing ranks, limited in case there are thousands."""
        missing = (rank for rank in range(self.size) if rank not in self.parked)
        first = list(itertools.islice(missing, _SHOWN))
        rest = self.size - len(self.parked) - len(first)
        return f"ranks {first} are missing" + (f", and {rest} others" if rest else "")


def grouped(labels: Sequence[object]) -> list[list[int]]:
    """Group ranks by equal labels, in rank order; groups are ordered by their first rank."""
    groups: dict[object, list[int]] = {}
    for rank, label in enumerate(labels):
        groups.setdefault(label, []).append(rank)
    return list(groups.values())


class KeyValueStore:
    """Serves the store at this address until closed. `name` is its thread's."""

    def __init__(self, where: tuple[str, int], credentials: Credentials | CredentialsOf, *, name: str) -> None:
        self.generation = -1  # of the ranks that meet
        self._table: dict[str, bytes] = {}
        self._owners: dict[str, int] = {}  # key -> the worker that has set it
        self._stored: dict[int, int] = {}  # worker -> the bytes that it has stored
        self._gets: dict[str, list[Call[requests.Get]]] = {}
        self._gathers: dict[str, _Gather] = {}
        self._gone: dict[int, str] = {}  # rank of the current generation -> how it ended
        self._failed = False  # one of them failed
        self._ranks: dict[Peer, tuple[int, int]] = {}  # generation and rank for which a peer spoke last
        self._server = Server(self, name=name)
        self.port = self._server.listen(where)
        self._server.start(credentials)

    def set(self, key: str, value: bytes) -> None:
        self._server.call(lambda: self._store(key, value))

    def flush(self, *, limit_s: float = 30.0) -> None:
        """Wait until earlier calls of `set` have taken effect. Raises TimeoutError."""
        settled = threading.Event()
        self._server.call(settled.set)
        if not settled.wait(limit_s):
            raise TimeoutError(f"the key-value store has not stored the values within {limit_s:g} s")

    def close(self) -> None:
        self._server.close()

    # ---- in the server's thread -------------------------------------------------------------------------

    def message(self, peer: Peer, header: Header, payload: bytes) -> None:
        kind = requests.REQUESTS.get(str(header["op"]))
        if kind is None or not hasattr(self, f"_on_{header['op']}"):
            raise ValueError(f"unknown operation {header['op']!r}")
        number, request = -1 if kind in _UNANSWERED else header["id"], checked(kind, {**header, "data": payload})
        if type(number) is not int:
            raise ValueError(f"the number of a request is {str(number)[:100]!r}")
        if len(getattr(request, "key", "")) > _KEY_CHARACTERS:
            raise ValueError(f"a key has at most {_KEY_CHARACTERS} characters")
        self._carry_out(Call(peer, number, request))

    def _carry_out(self, call: Call[Any]) -> None:
        """Handle the request by the method of its name."""
        getattr(self, f"_on_{requests.NAMES[type(call.request)]}")(call)

    def _on_pong(self, call: Call[Pong]) -> None:
        """Do nothing: the server has noted the activity."""

    def closed(self, peer: Peer) -> None:
        for parked in self._gets.values():
            parked[:] = [one for one in parked if one.peer is not peer]
        # The loss of a rank of an earlier generation says nothing about the current rank of that number.
        generation, rank = self._ranks.pop(peer, (None, -1))
        for key, gather in list(self._gathers.items()):
            if generation == self.generation and gather.lacks(rank):
                self._fail_gather(key, f"rank {rank} closed its connection without a goodbye")
            elif any(one.peer is peer for one in gather.parked.values()):
                self._fail_gather(key, f"{peer.name} closed its connection without a goodbye")

    def _on_hello(self, call: Call[requests.Hello]) -> None:
        call.peer.name = printable(call.request.name[:_NAME_CHARACTERS])
        call.answer()

    def _on_bye(self, call: Call[requests.Bye]) -> None:
        # A goodbye is no loss: forget the rank, so that the end of its connection is not reported.
        call.peer.number = -1
        self._ranks.pop(call.peer, None)
        call.answer()

    def _on_set(self, call: Call[requests.Set]) -> None:
        if self._store_of(call, call.request.data):
            call.answer()

    def _on_get(self, call: Call[requests.Get]) -> None:
        key = call.request.key
        if key in self._table:
            call.answer(self._table[key])
        elif self._failed:
            call.answer(error="lost", message=self._lost_ranks_message())
        else:
            self._park(call, lambda: f"no process has set {key!r}")
            self._gets.setdefault(key, []).append(call)

    def _on_add(self, call: Call[requests.Add]) -> None:
        total = str(int(self._table.get(call.request.key, b"0")) + call.request.amount).encode()
        if self._store_of(call, total):
            call.answer(total)

    def _on_delete(self, call: Call[requests.Delete]) -> None:
        self._release_key(call.request.key)
        call.answer(b"0" if self._table.pop(call.request.key, None) is None else b"1")

    def _on_check(self, call: Call[requests.Check]) -> None:
        call.answer(b"1" if all(key in self._table for key in call.request.keys) else b"0")

    def _on_gather(self, call: Call[requests.Gather]) -> None:
        key, rank, size = call.request.key, call.request.rank, call.request.size
        if not self._may_wait(call):
            return
        gather = self._gathers.setdefault(key, _Gather(size))
        if gather.size != size or not 0 <= rank < size or rank in gather.parked:
            # The waiting ranks would wait forever: report the mismatch to all of them.
            why = f"rank {rank} of {size} does not fit: it meets ranks {sorted(gather.parked)} of {gather.size}"
            call.answer(error="mismatch", message=f"all-gather {key!r}: {why}")
            self._fail_gather(key, why)
            return
        self._ranks[call.peer] = (self.generation, rank)
        self._park(call, gather.missing)
        gather.parked[rank] = call
        if gather.complete:
            del self._gathers[key]
            self._complete(gather, fanout=call.request.fanout)
        elif any(gather.lacks(gone) for gone in self._gone):
            self._fail_gather(key, self._lost_ranks_message())

    def _complete(self, gather: _Gather, *, fanout: int) -> None:
        """Answer each rank with the values of its group and of the first rank of the parent group.

        The total size grows with the number of ranks, not its square, as long as groups do not grow.
        """
        groups = grouped([gather.parked[rank].request.group for rank in range(gather.size)])
        firsts = [ranks[0] for ranks in groups]
        for index, ranks in enumerate(groups):
            above = [firsts[(index - 1) // fanout]] if index and fanout else []
            values = [(rank, gather.parked[rank].request.data) for rank in (*ranks, *above)]
            header = {"members": len(ranks), "values": len(values), "index": index, "groups": len(groups)}
            joined = join_parts(values)
            for rank in ranks:
                gather.parked[rank].answer(joined, **header)

    def _store_of(self, call: Call[requests.Set] | Call[requests.Add], value: bytes) -> bool:
        """Store a peer's value; refuse it beyond the memory of its worker. The holder of a shared key has no limit."""
        key, worker = call.request.key, call.peer.speaker
        if worker >= 0:
            freed = _num_bytes(key, self._table[key]) if self._owners.get(key) == worker else 0
            stored = self._stored.get(worker, 0) - freed + _num_bytes(key, value)
            if stored > WORKERS_BYTES:
                call.answer(error="refused", message=f"worker {worker} would store {stored} bytes: {_QUOTA}")
                return False
        self._store(key, value)
        if worker >= 0:
            self._owners[key] = worker
            self._stored[worker] = self._stored.get(worker, 0) + _num_bytes(key, value)
        return True

    def _release_key(self, key: str) -> None:
        owner = self._owners.pop(key, None)
        if owner is not None:
            self._stored[owner] -= _num_bytes(key, self._table[key])

    def _may_wait(self, call: Call[requests.Gather]) -> bool:
        """Refuse a contribution to a gather beyond the memory of its worker."""
        worker, rank = call.peer.speaker, call.request.rank
        if worker < 0:
            return True
        waiting = [one.parked[rank].request for one in self._gathers.values() if rank in one.parked]
        num_bytes = sum(len(one.data) for one in (*waiting, call.request))
        if len(waiting) >= _WORKERS_GATHERS or num_bytes > WORKERS_BYTES:
            why = f"worker {worker} would wait in {len(waiting) + 1} gathers with {num_bytes} bytes: {_QUOTA}"
            call.answer(error="refused", message=why)
            return False
        return True

    def _store(self, key: str, value: bytes) -> None:
        self._release_key(key)
        self._table[key] = value
        for call in self._gets.pop(key, []):
            call.answer(value)

    def _lost_ranks_message(self) -> str:
        """Describe how ranks ended, limited to a few because a message's header is small."""
        causes = [f"rank {rank} {how}" for rank, how in sorted(self._gone.items())]
        return "; ".join([*causes[:_SHOWN], f"and {len(causes) - _SHOWN} others"] if len(causes) > _SHOWN else causes)

    def _fail_gather(self, key: str, why: str) -> None:
        for call in self._gathers.pop(key).parked.values():
            call.answer(error="lost", message=why)

    def _park(self, call: Call[Any], missing: Callable[[], str]) -> None:
        """Limit the wait for an answer; `missing` describes what the peer waits for."""
        call.timer = self._server.call_at(
            time.monotonic() + call.request.timeout_s, lambda: self._expire(call, missing())
        )

    def _expire(self, call: Call[Any], why: str) -> None:
        call.answer(error="timeout", message=why)
        for key, gather in list(self._gathers.items()):
            gather.parked = {rank: one for rank, one in gather.parked.items() if one is not call}
            if not gather.parked:
                del self._gathers[key]
        for waiting in self._gets.values():
            waiting[:] = [one for one in waiting if one is not call]


_QUOTA = f"at most {WORKERS_BYTES >> 20} MiB, and {_WORKERS_GATHERS} gathers"


def _num_bytes(key: str, value: bytes) -> int:
    return _ENTRY_BYTES + len(key) + len(value)


class RendezvousEvents:
    """Interface to which the rendezvous reports, in its thread: never block. This class ignores all events."""

    def joined(self, worker: int) -> None:
        """A worker has connected and identified itself."""

    def returned(self, worker: int, result: bytes) -> None:
        """The function returned on this worker."""

    def raised(self, worker: int, report: requests.Raised) -> None:
        """The function raised on this worker."""

    def on_log_line(self, worker: int, text: str) -> None:
        """A line that a worker wants to be shown where the job was started."""

    def waiting(self, worker: int, generation: int) -> None:
        """The worker waits for a world later than this generation."""

    def lost(self, worker: int) -> None:
        """The worker's connection ended without a closing message."""

    def on_telemetry(self, worker: int, kind: str, data: bytes) -> None:
        """A worker's telemetry (`hora.telemetry`), or its answer to a question."""


class Rendezvous(KeyValueStore):
    """The controller sets values, publishes worlds, reports exits. Workers ignore leaders of an earlier `term`."""

    def __init__(self, bind_address: str, *, secret: bytes, job: str, events: RendezvousEvents, term: int = 0) -> None:
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
            return Credentials(worker_key(secret, worker), job, worker)

        super().__init__((bind_address, 0), credentials, name="hora-rendezvous")

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
        # A rank of a job of fixed size has its worker's key, although its connection does not speak for the worker.
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
        name = printable(call.request.name[:_NAME_CHARACTERS])
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
            call.answer(world=world.to_env(), **self._stamp)

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
