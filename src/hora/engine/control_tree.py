"""The control tree: connects the ranks of one world for everything except tensors.

Ranks form a tree of hosts (`Tree`), so that a rank communicates only with its host and `FANOUT + 1` others, for any
world size. Every rank keeps an authenticated connection, a link, to its parent: a local socket to its host leader, TCP
between host leaders. A process set has a tree of its members only, so that no other rank delays the set; its members
have additional links along that tree where needed. Links carry

    up, round     announcements of members and agreed rounds (`hora.engine.negotiation.tree`)
    gather        the values of all ranks at or below the sender; `gathered`: those of all, from the root down
    news          for all ranks: a rank shuts down (leaving), was lost, or broke the world (fault)
    ack           the receiver has this news and forwards it
    bye           the sender has said goodbye: the end of its link is no loss

Goodbyes are gathered like other values, so there are as many messages as ranks. After the first one a rank still
executes what was agreed before: rounds of sets take other links, and have a moment to arrive (`WorldStatus`).

News spreads along all links: a rank that has not seen it records it and forwards it to its other neighbours. A dead
rank is noticed by all its neighbours, so the news reaches every side of it. A stopped rank forwards and acknowledges
nothing: after _ACK_LIMIT_S its neighbour sends the news to that rank's other neighbours itself, over separate
connections (`around` lists the stopped ranks). Invariants: each rank records each (kind, rank) of news once; a rank
accepts news about another rank only from that rank's side of the tree.

`Handoff` passes descriptors of shared memory and streams for tensors beside the tree. Each process has one `Server` for
everything, whose thread sleeps unless something happens.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from hora.engine.handoff import Handoff
from hora.engine.rank_tree import Tree
from hora.engine.request import Key
from hora.errors import HorovodInternalError
from hora.net.keys import RankKeys
from hora.net.messages import checked
from hora.net.server import Peer, Server
from hora.net.sockets import Where
from hora.net.wire import Connection, Header, connect, cut_parts, join_parts

log = logging.getLogger("hora")

_TICK_S = 1.0  # how often to look for stalls
_SILENCE_LIMIT_S = 8
_CLOSE_LIMIT_S = 3.0
_ASK_LIMIT_S = 2.0
_ASKED_AT_ONCE = 16
_ACK_LIMIT_S = 1.0  # a rank that does not acknowledge news in time counts as stopped
_AROUND_LIMIT_S = 5.0
_GOODBYES = "goodbyes"  # gathered at the end


class Whereabouts(NamedTuple):
    """Operations of a set that a rank waits for, and the line that its training thread is in, or why it is unknown."""

    keys: Sequence[Key]
    line: str = ""

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> Whereabouts:
        keys, line = json.loads(data)
        return cls([(str(operation), name) for operation, name in keys], str(line))


class _News(NamedTuple):
    """News for all ranks, as described above."""

    kind: str
    rank: int
    text: str
    around: list[int]

    def message(self) -> Header:
        return {"t": "news", **self._asdict()}


@dataclass(frozen=True, kw_only=True)
class ControlEvents:
    """Callbacks of the control tree to the runtime, called on the control tree's thread; they must not block.

    `negotiating(serial, rank, header, payload)`: a neighbour in the tree of a process set sent `up` or `round`.
    `whereabouts(serial)` returns what this rank waits for in a set, `standstill(question)` whether it may be stuck.
    """

    lost: Callable[[int], None]
    leaving: Callable[[int, str], None]
    fault: Callable[[str], None]
    negotiating: Callable[[int, int, Header, bytes], None]
    whereabouts: Callable[[int], Whereabouts]
    standstill: Callable[[Header], bytes]
    tick: Callable[[], None]


@dataclass
class _Gathering:
    """Values on their way to the root."""

    parts: list[tuple[int, bytes]] = field(default_factory=list)
    num_heard: int = 0  # this rank itself, and children
    result: list[bytes] | None = None


class ControlTree:
    """This rank's part of the control tree."""

    def __init__(self, rank: int, size: int, events: ControlEvents) -> None:
        self.rank = rank
        self.size = size
        self.name = f"hora-{secrets.token_hex(16)}"
        self._events = events
        self._where: Callable[[int], Where] | None = None
        self._tree: Tree | None = None  # of all ranks, once it is known
        self._parent: int | None = None
        self._num_children = -1  # in the world's tree; -1: not known yet
        self._links: dict[int, Peer] = {}
        self._opened: set[int] = set()  # links that this rank opened
        self._unsent: dict[int, list[tuple[Header, bytes]]] = {}  # to ranks that are about to open their link
        self._gatherings: dict[str, _Gathering] = {}
        self.goodbyes: set[int] = set()  # ranks known to have shut down or to be lost
        self._dead: set[int] = set()  # ranks that will neither acknowledge news nor send a goodbye
        self._noted: set[tuple[str, int]] = set()  # news already seen
        self._unacknowledged: set[tuple[str, int, int]] = set()  # news, and the rank that it is to reach or bypass
        self._changed = threading.Condition()
        self._why_pointless = ""
        self._server = Server(self, name="hora-control", silence_limit_s=_SILENCE_LIMIT_S, failed=self._on_failure)
        self._server.listen(self.name)
        self.handoff = Handoff(self._server, self._connect)

    # Setup, called by the runtime in this order: start, offer and fetch, listen_tcp, join, gather, know.

    def start(self, keys: RankKeys) -> None:
        """Start serving. `keys` are this rank's in this world: a peer proves which rank it is."""
        self._keys = keys
        self._server.start(keys.of)
        self._server.call(self._tick)

    def listen_tcp(self, address: str) -> int:
        """Listen at `address` for ranks of other hosts; returns the port."""
        return self._server.listen((address, 0))

    def join(self, parent: tuple[int, Where] | None, num_children: int, *, limit_s: float) -> None:
        """Take the place in the world's tree: below this rank, with this many children."""
        if parent is not None:
            self._parent = parent[0]
            self.link(*parent, limit_s=limit_s)
        self._server.call(lambda: self._expect(num_children))

    def gather(self, what: str, value: bytes, *, limit_s: float) -> list[bytes]:
        """Return every rank's value, in rank order (collective)."""
        self._server.call(lambda: self._collect(what, [(self.rank, value)]))
        with self._changed:
            gathering = self._gatherings.setdefault(what, _Gathering())
            self._changed.wait_for(lambda: self._why_pointless or gathering.result is not None, limit_s)
            heard = {rank for rank, _ in gathering.parts}
        if gathering.result is not None:
            return gathering.result
        if self._why_pointless:
            raise HorovodInternalError(self._why_pointless)
        missing = sorted(set(range(self.size)) - heard) if self._parent is None else [self._parent]
        raise HorovodInternalError(f"waited {limit_s:g} s for rank(s) {missing} to send their {what}")

    def know(self, tree: Tree, where: Callable[[int], Where]) -> None:
        """Set the tree of all ranks and their addresses, for news that must bypass a stopped rank."""
        self._tree, self._where = tree, where

    def link(self, rank: int, where: Where, *, limit_s: float) -> None:
        """Open a link to this rank unless there is one."""
        if rank in self._links:
            return
        connection = self._connect(rank, where, limit_s)
        connection.send({"want": "link"})
        link = self._server.peer_at(connection)
        link.speaker = rank
        with self._changed:
            self._opened.add(rank)
            self._add_link(rank, link)
        self._server.serve(link)

    def _connect(self, rank: int, where: Where, limit_s: float) -> Connection:
        return connect(where, self._keys.towards(rank), timeout_s=limit_s, silence_limit_s=_SILENCE_LIMIT_S)

    def _call(self, rank: int, limit_s: float) -> Connection:
        assert self._where is not None
        return self._connect(rank, self._where(rank), limit_s)

    def stop_waiting(self, why: str) -> None:
        """Stop all waits: some rank will never arrive."""
        with self._changed:
            self._why_pointless = self._why_pointless or why
            self._changed.notify_all()

    # Messages.

    def send(self, rank: int, header: Header, payload: bytes = b"") -> None:
        """Send over the link to this rank, or once it has opened one."""
        link = self._links.get(rank)
        if link is None:
            with self._changed:
                link = self._links.get(rank)
                if link is None:
                    self._unsent.setdefault(rank, []).append((header, payload))
                    return
        link.send(header, payload)

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the control tree's thread, after the messages that have already arrived."""
        self._server.call(function)

    def leave(self, why: str) -> None:
        """Send the goodbye, once: this rank or another one shuts down. The first goodbye ends the world."""
        with self._changed:
            if self.rank in self.goodbyes:
                return
            self._note(self.goodbyes, self.rank)
        if "leaving" not in [kind for kind, _ in list(self._noted)]:
            self._spread(_News("leaving", self.rank, why, []))
        for link in list(self._links.values()):
            link.send({"t": "bye"})
        self._server.call(lambda: self._collect(_GOODBYES, [(self.rank, b"")]))

    def report_fault(self, rank: int, text: str) -> None:
        """Report to every rank that the world is broken, and by which rank."""
        self._spread(_News("fault", rank, text, []))

    def expect_nothing_of(self, rank: int) -> None:
        """Stop expecting messages of a dead rank: the launcher may notice a death before connections end."""
        self._note(self._dead, rank)

    def wait_for_goodbyes(self, limit_s: float) -> bool:
        """Give the others a moment to finish agreed work; returns whether all have said goodbye by then.

        Returns at once before this rank has joined the tree, and if a rank is dead, without which nothing can finish.
        """
        with self._changed:
            gathering = self._gatherings.setdefault(_GOODBYES, _Gathering())
            self._changed.wait_for(
                lambda: gathering.result is not None or self._num_children < 0 or self._dead, limit_s
            )
            return gathering.result is not None or self._num_children < 0

    def whereabouts(self, ranks: Sequence[int], serial: int) -> dict[int, Whereabouts]:
        """Ask ranks what they wait for in a set, over separate connections; returns each one's answer."""

        answers = self.request(ranks, {"want": "whereabouts", "set": serial})
        return {
            rank: Whereabouts.decode(found) if isinstance(found, bytes) else Whereabouts((), f"no answer: {found}")
            for rank, found in answers.items()
        }

    def request(self, ranks: Sequence[int], question: Header) -> dict[int, bytes | Exception]:
        """Send a question to ranks over separate connections; returns each one's answer, or why there is none."""

        def answer_of(rank: int) -> bytes | Exception:
            try:
                with self._call(rank, _ASK_LIMIT_S) as connection:
                    connection.send(question)
                    return bytes(connection.receive(limit_s=_ASK_LIMIT_S)[1])
            except (OSError, EOFError, KeyError) as error:
                return error

        with ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="hora-control-ask") as pool:
            return dict(zip(ranks, pool.map(answer_of, ranks), strict=True))

    def is_there(self, rank: int) -> bool:
        """Return whether a rank's control tree still listens. A rank that does not answer in time is there."""
        try:
            self._call(rank, _ASK_LIMIT_S).close()
        except ConnectionRefusedError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        """Stop the thread and close all sockets and descriptors, after news has bypassed stopped ranks."""
        with self._changed:
            self._changed.wait_for(self._has_told_all, _CLOSE_LIMIT_S)
        self._server.close()
        self.handoff.close()

    # In the server's thread.

    def message(self, peer: Peer, header: Header, payload: bytes) -> None:
        """Handle a message of a rank. An error here is a bug in Hora, no reason to disconnect that rank."""
        try:
            self._on_message(peer, header, payload)
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeError(f"a message of {peer.name} could not be handled: {error!r}") from error

    def closed(self, peer: Peer) -> None:
        rank = peer.number
        if rank >= 0 and rank not in self.goodbyes:
            self._spread(_News("lost", rank, "", []))
            self._on_news(_News("lost", rank, "", []))

    def _on_failure(self, error: Exception) -> None:
        self._events.fault(f"the control tree of rank {self.rank} failed: {error!r}; Horovod has been shut down")

    def _tick(self) -> None:
        self._server.call_at(time.monotonic() + _TICK_S, self._tick)
        self._events.tick()

    def _on_message(self, peer: Peer, header: Header, payload: bytes) -> None:
        kind, rank = header.get("t"), peer.number
        if rank < 0:
            self._introduce(peer, header)
        elif kind in ("up", "round"):
            self._events.negotiating(int(header["set"]), rank, header, payload)
        elif kind == "news":
            self._receive_news(peer, checked(_News, header))
        elif kind == "ack":
            self._acknowledged(str(header["kind"]), int(header["rank"]), rank)
        elif kind == "gather":
            self._collect(str(header["what"]), cut_parts(payload, int(header["parts"])))
        elif kind == "gathered" and rank == self._parent:
            self._gathered(str(header["what"]), payload)
        elif kind == "bye":
            self._note(self.goodbyes, rank)

    # Links.

    def _introduce(self, peer: Peer, header: Header) -> None:
        match header.get("want"):
            case "segment":
                self.handoff.segment_wanted(peer, str(header["key"]))
            case "stream":
                self.handoff.keep_stream(peer, (str(header["key"]), peer.speaker))
            case "news":
                self._receive_news(peer, checked(_News, header))
            case "whereabouts":
                peer.send({}, self._events.whereabouts(int(header["set"])).encode())
            case "standstill":
                peer.send({}, self._events.standstill(header))
            case _:
                self._accept_link(peer)

    def _accept_link(self, peer: Peer) -> None:
        rank = peer.speaker
        with self._changed:
            # Two ranks may open a link to each other at the same time: each sends over its own.
            taken = rank in self._links and rank not in self._opened
            if not 0 <= rank < self.size or rank == self.rank or taken:
                log.warning("closed a link from %s, which claimed to be rank %d: that rank is taken", peer.where, rank)
                peer.close()
                return
            self._opened.discard(rank)
            self._add_link(rank, peer)

    def _add_link(self, rank: int, peer: Peer) -> None:
        peer.number, peer.name = rank, f"rank {rank}"
        link = self._links.setdefault(rank, peer)
        for header, payload in self._unsent.pop(rank, []):
            link.send(header, payload)

    # Gathering.

    def _expect(self, num_children: int) -> None:
        self._num_children = num_children
        for what in list(self._gatherings):
            self._pass_on(what)

    def _collect(self, what: str, parts: Sequence[tuple[int, bytes]]) -> None:
        """Add the contribution of this rank or a child."""
        with self._changed:
            gathering = self._gatherings.setdefault(what, _Gathering())
            gathering.parts.extend(parts)
            gathering.num_heard += 1
        self._pass_on(what)

    def _pass_on(self, what: str) -> None:
        gathering = self._gatherings[what]
        if gathering.num_heard != self._num_children + 1:
            return
        payload = join_parts(gathering.parts)
        if self._parent is not None:
            self.send(self._parent, {"t": "gather", "what": what, "parts": len(gathering.parts)}, payload)
        else:
            values = dict(gathering.parts)
            ordered = [(rank, values[rank]) for rank in range(self.size)]
            self._gathered(what, zlib.compress(join_parts(ordered), 1))

    def _gathered(self, what: str, payload: bytes) -> None:
        self._down({"t": "gathered", "what": what}, payload)
        values = [value for _, value in cut_parts(zlib.decompress(payload), self.size)]
        with self._changed:
            self._gatherings.setdefault(what, _Gathering()).result = values
            self._changed.notify_all()

    def _down(self, header: Header, payload: bytes) -> None:
        """Send to the children in the world's tree. Links of sets are opened after the first gathering of all ranks."""
        tree = self._tree
        children = self._links.keys() - {self._parent} if tree is None else tree.children(self.rank)
        for child in list(children):
            self.send(child, header, payload)

    # News.

    def _note(self, ranks: set[int], rank: int) -> None:
        with self._changed:
            ranks.add(rank)
            self._changed.notify_all()

    def _on_news(self, news: _News) -> None:
        if news.kind == "fault":
            self._events.fault(news.text)
            return
        self._note(self.goodbyes, news.rank)
        if news.kind == "leaving":
            self._events.leaving(news.rank, news.text)
        else:
            self._note(self._dead, news.rank)
            self._events.lost(news.rank)

    def _spread(self, news: _News, *, skip: int = -1) -> None:
        """Send news to the neighbours, except the one it came from. Thread-safe."""
        self._noted.add((news.kind, news.rank))
        for rank, link in list(self._links.items()):
            if rank != skip and rank not in news.around and rank not in self.goodbyes:
                link.send(news.message())
                if self._tree is not None and len(self._tree.neighbours(rank)) > 1:
                    self._expect_ack(rank, news)

    def _expect_ack(self, rank: int, news: _News) -> None:
        waiting, deadline = (news.kind, news.rank, rank), time.monotonic() + _ACK_LIMIT_S
        self._unacknowledged.add(waiting)

        def check() -> None:
            if waiting in self._unacknowledged and rank not in self.goodbyes:
                self._go_around(rank, news)

        self._server.call(lambda: self._server.call_at(deadline, check))

    def _acknowledged(self, kind: str, rank: int, by: int) -> None:
        with self._changed:
            self._unacknowledged.discard((kind, rank, by))
            self._changed.notify_all()

    def _has_told_all(self) -> bool:
        """Return whether what this rank has told every other one is acknowledged, or has bypassed it, if it can be."""
        silent = self.goodbyes | self._dead
        return silent.issuperset(rank for *_, rank in list(self._unacknowledged))

    def _go_around(self, stopped: int, news: _News) -> None:
        """Send news to the other neighbours of a stopped rank."""
        assert self._tree is not None
        others = [rank for rank in self._tree.neighbours(stopped) if rank not in (self.rank, *self.goodbyes)]
        header = {**news._replace(around=[*news.around, stopped]).message(), "want": "news"}
        log.info("rank %d does not acknowledge news: sending it to the ranks %s beyond it", stopped, others)

        def tell() -> None:
            try:
                for rank in others:
                    with contextlib.suppress(OSError, EOFError), self._call(rank, _AROUND_LIMIT_S) as line:
                        line.send(header)
                        line.receive(limit_s=_AROUND_LIMIT_S)
            finally:
                self._acknowledged(news.kind, news.rank, stopped)

        threading.Thread(target=tell, name="hora-control-around", daemon=True).start()

    def _receive_news(self, peer: Peer, news: _News) -> None:
        """Take news of a neighbour, or of a rank that bypasses one."""
        kind, rank = news.kind, news.rank
        if not self._believes(peer, news):
            log.warning("%s may not say %r of rank %d", peer.name, kind, rank)
            return
        peer.send({"t": "ack", "kind": kind, "rank": rank})
        if (kind, rank) not in self._noted and rank != self.rank:
            self._spread(news, skip=peer.speaker)
            self._on_news(news)

    def _believes(self, peer: Peer, news: _News) -> bool:
        """Return whether a connection may send this news.

        Accept news about a rank only from its own side of the tree, or from a rank that bypasses a stopped one there.
        Any rank may report a fault.
        """
        kind, rank, tree = news.kind, news.rank, self._tree
        if kind not in ("leaving", "lost"):
            return kind == "fault"
        if peer.speaker == rank or tree is None:
            return kind == "lost" or peer.speaker == rank
        neighbours = tree.neighbours(self.rank)
        via = [one for one in (peer.speaker, *news.around) if one in neighbours]
        return any(rank in tree.behind(self.rank, one) for one in via)
