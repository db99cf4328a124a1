"""Key-value store for the rendezvous of processes, with all-gathers; the server side of `hora.net.client`.

The launcher's rendezvous extends it with workers; under a foreign launcher rank 0 serves a plain one. The server's
thread owns all state; public methods are thread-safe.

The answer to a request is `{"re": id}` on success and `{"re": id, "error": kind, "message": text}` otherwise, where
kind is `timeout`, `lost` or `mismatch`. A request that must wait is parked until its condition holds, its time limit
passes, its peer disconnects, or a rank it depends on is lost.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hora.net.server import Peer, Server, Timer
from hora.net.wire import Credentials, CredentialsOf, Header, join_parts

_SHOWN = 16  # ranks named in a message
# A process's text ends up in the headers of messages to others, which are limited.
_KEY_CHARACTERS, NAME_CHARACTERS = 4096, 200

Operation = Callable[[Peer, Header, bytes], None]


@dataclass
class Parked:
    """A request that waits for its answer."""

    peer: Peer
    request: int
    describe: Callable[[], str]
    payload: bytes = b""
    timer: Timer | None = None
    answered: bool = False

    def answer(self, header: Header, payload: bytes = b"") -> None:
        """Answer once; later attempts (such as an expired time limit) do nothing."""
        if not self.answered:
            self.answered = True
            if self.timer is not None:
                self.timer.cancel()
            self.peer.send({"re": self.request} | header, payload)


@dataclass
class _Gather:
    size: int
    parked: dict[int, Parked] = field(default_factory=dict)  # by rank
    groups: dict[int, str] = field(default_factory=dict)  # by rank: the name of its group
    fanout: int = 0  # children of a group; 0: none

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


class KeyValueStore:
    """Serves the store at this address until closed. `name` is its thread's."""

    def __init__(self, where: tuple[str, int], credentials: Credentials | CredentialsOf, *, name: str) -> None:
        self.generation = -1  # of the ranks that meet
        self._table: dict[str, bytes] = {}
        self._gets: dict[str, list[Parked]] = {}
        self._gathers: dict[str, _Gather] = {}
        self._gone: dict[int, str] = {}  # rank of the current generation -> how it ended
        self._failed = False  # one of them failed
        self._ranks: dict[Peer, tuple[int, int]] = {}  # generation and rank for which a peer spoke last
        self._operations = self._all_operations()
        self._server = Server(self, name=name)
        try:
            self.port = self._server.listen(where)
        except OSError:
            self._server.close()
            raise
        self._server.start(credentials)

    def set(self, key: str, value: bytes) -> None:
        self._server.call(lambda: self._store(key, value))

    def settle(self, *, limit_s: float = 30.0) -> None:
        """Wait until earlier calls of `set` have taken effect. Raises TimeoutError."""
        settled = threading.Event()
        self._server.call(settled.set)
        if not settled.wait(limit_s):
            raise TimeoutError(f"the key-value store has not stored the values within {limit_s:g} s")

    def close(self) -> None:
        self._server.close()

    # ---- in the server's thread -------------------------------------------------------------------------

    def message(self, peer: Peer, header: Header, payload: bytes) -> None:
        operation = self._operations.get(str(header["op"]))
        if operation is None:
            raise ValueError(f"unknown operation {header['op']!r}")
        operation(peer, header, payload)

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

    def _all_operations(self) -> dict[str, Operation]:
        return {
            "hello": self._hello,
            "bye": self._bye,
            "pong": self._pong,
            "set": self._set,
            "get": self._get,
            "add": self._add,
            "delete": self._delete,
            "check": self._check,
            "gather": self._gather,
        }

    def _hello(self, peer: Peer, header: Header, payload: bytes) -> None:
        peer.name = str(header["name"])[:NAME_CHARACTERS]
        self._answer(peer, header["id"])

    def _pong(self, peer: Peer, header: Header, payload: bytes) -> None:
        """Do nothing: the server has noted the activity."""

    def _bye(self, peer: Peer, header: Header, payload: bytes) -> None:
        # A goodbye is no loss: forget the rank, so that the end of its connection is not reported.
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
        parked = self._park(peer, header, lambda: f"no process has set {key!r}")
        if self._failed:
            parked.answer({"error": "lost", "message": self._lost_ranks_message()})
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
            # The waiting ranks would wait forever: report the mismatch to all of them.
            why = f"rank {rank} of {size} does not fit: it meets ranks {sorted(gather.parked)} of {gather.size}"
            self._park(peer, header, str).answer({"error": "mismatch", "message": f"all-gather {key!r}: {why}"})
            self._fail_gather(key, why)
            return
        self._ranks[peer] = (self.generation, rank)
        gather.parked[rank] = self._park(peer, header, gather.missing, payload)
        gather.groups[rank] = str(header.get("group", ""))
        gather.fanout = int(header.get("fanout", 0))
        if gather.complete:
            del self._gathers[key]
            self._complete(gather)
        elif any(gather.lacks(gone) for gone in self._gone):
            self._fail_gather(key, self._lost_ranks_message())

    def _complete(self, gather: _Gather) -> None:
        """Answer each rank with the values of its group and of the first rank of the parent group.

        The total size grows with the number of ranks, not its square, as long as groups do not grow.
        """
        groups: dict[str, list[int]] = {}
        for rank in range(gather.size):
            groups.setdefault(gather.groups[rank], []).append(rank)
        firsts = [ranks[0] for ranks in groups.values()]
        for index, ranks in enumerate(groups.values()):
            above = [firsts[(index - 1) // gather.fanout]] if index and gather.fanout else []
            values = [(rank, gather.parked[rank].payload) for rank in (*ranks, *above)]
            header = {"members": len(ranks), "values": len(values), "index": index, "groups": len(groups)}
            joined = join_parts(values)
            for rank in ranks:
                gather.parked[rank].answer(header, joined)

    def _store(self, key: str, value: bytes) -> None:
        self._table[key] = value
        for parked in self._gets.pop(key, []):
            parked.answer({}, value)

    def _lost_ranks_message(self) -> str:
        """Describe how ranks ended, limited to a few because a message's header is small."""
        causes = [f"rank {rank} {how}" for rank, how in sorted(self._gone.items())]
        return "; ".join([*causes[:_SHOWN], f"and {len(causes) - _SHOWN} others"] if len(causes) > _SHOWN else causes)

    def _fail_gather(self, key: str, why: str) -> None:
        for parked in self._gathers.pop(key).parked.values():
            parked.answer({"error": "lost", "message": why})

    def _park(self, peer: Peer, header: Header, describe: Callable[[], str], payload: bytes = b"") -> Parked:
        parked = Parked(peer, int(header["id"]), describe, payload)
        deadline = time.monotonic() + _limit_s(header)
        parked.timer = self._server.call_at(deadline, lambda: self._expire(parked))
        return parked

    def _expire(self, parked: Parked) -> None:
        parked.answer({"error": "timeout", "message": parked.describe()})
        self._forget(parked)

    def _forget(self, parked: Parked) -> None:
        for key, gather in list(self._gathers.items()):
            for rank, one in list(gather.parked.items()):
                if one is parked:
                    del gather.parked[rank], gather.groups[rank]
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
