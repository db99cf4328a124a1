"""A key-value store with all-gathers over authenticated connections. The server side of `hora.net.client`.

Under a foreign launcher rank 0 serves a plain one; the launcher's `Rendezvous` extends it. The server's thread owns all
state; public methods are thread-safe.

The answer to a request is `{"re": id}` on success and `{"re": id, "error": kind, "message": text}` otherwise, where
kind is `timeout`, `lost` or `mismatch`. A request that must wait is parked until its condition holds, its time limit
passes, its peer disconnects, or a rank it depends on is lost.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from hora.logs import printable
from hora.net import requests
from hora.net.messages import Pong, checked
from hora.net.server import Peer, Server, Timer
from hora.net.wire import Credentials, CredentialsOf, Header, join_parts

_SHOWN = 16  # ranks named in a message
# A process's text ends up in the headers of messages to others, which are limited.
_KEY_CHARACTERS, NAME_CHARACTERS = 4096, 200
# What one worker may keep in the server's memory: values that it has set, and contributions to gathers that wait.
WORKERS_BYTES = 64 * 1024 * 1024
_WORKERS_GATHERS = 64
_ENTRY_BYTES = 500  # of the tables, beside key and value
_UNANSWERED = (Pong, requests.LogLine, requests.Telemetry)

R = TypeVar("R", bound=requests.Request)


@dataclass(eq=False)
class Call(Generic[R]):
    """A request of a peer, which may wait for its answer."""

    peer: Peer
    number: int  # the answer repeats it
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
        call.peer.name = printable(call.request.name[:NAME_CHARACTERS])
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
