"""The control tree: connects the ranks of one world for everything except tensors.

Ranks form a tree (`Tree`): the ranks of a host are below its first rank, the host leader; host leaders are below one
another, at most `FANOUT` per parent. So a rank communicates only with its host and `FANOUT + 1` others, for any world
size. Every rank keeps an authenticated connection, a link, to its parent: a local socket to its host leader, TCP
between host leaders. A process set has a tree of its members only, so that no other rank delays the set; its members
have additional links along that tree where needed. Links carry

    up, round     announcements of members and agreed rounds (`hora.engine.negotiation.tree`)
    gather        the values of all ranks at or below the sender; `gathered`: those of all, from the root down
    news          for all ranks: a rank shuts down (leaving), was lost, or the world is broken (fault)
    ack           the receiver has this news and forwards it
    bye           the sender has said goodbye: the end of its link is no loss

News spreads along all links: a rank that has not seen it records it and forwards it to its other neighbours. A dead
rank is noticed by all its neighbours, so the news reaches every side of it. A stopped rank forwards and acknowledges
nothing: after _ACK_LIMIT_S its neighbour sends the news to that rank's other neighbours itself, over separate
connections (`around` lists the stopped ranks). Invariants: each rank records each (kind, rank) of news once; a rank
accepts news about another rank only from that rank's side of the tree.

Goodbyes are gathered like other values, so there are as many messages as ranks. Executing everything that was agreed
before a goodbye does not depend on the order of messages: a goodbye carries the number of rounds seen in each set, and
a rank that has seen fewer waits for those first (`Runtime`).

`Handoff` passes descriptors of shared memory and streams for tensors beside the tree. Each process has one `Server` for
everything, whose thread sleeps unless something happens.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hora.engine.request import Key
from hora.engine.shm.segment import Segment
from hora.errors import HorovodInternalError
from hora.net.keys import RankKeys
from hora.net.server import Peer, Server
from hora.net.sockets import Where
from hora.net.wire import Connection, Header, Stream, connect, cut_parts, join_parts

__all__ = ["FANOUT", "ControlEvents", "ControlTree", "Handoff", "News", "Rounds", "Tree", "Whereabouts"]

log = logging.getLogger("hora")

FANOUT = 4  # child hosts per host: with more, rank 0 needs longer per round; with fewer, a round takes more hops
_TICK_S = 1.0  # how often to look for stalls
_SILENCE_LIMIT_S = 8
_FETCH_SLICE_S = 0.5
_ACK_LIMIT_S = 1.0  # a rank that does not acknowledge news in time counts as stopped
_AROUND_LIMIT_S = 5.0
_CLOSE_LIMIT_S = 3.0
_GOODBYES = "goodbyes"  # gathered at the end

Rounds = Mapping[int, int]  # by process set (its serial number): how many rounds a rank has seen


@dataclass(frozen=True)
class News:
    """A message for every rank: `rank` shuts down (leaving), was lost, or broke the world (fault).

    `around`: stopped ranks that it bypassed. `rounds`: for a leaving rank, the number it has executed of each set.
    """

    kind: str
    rank: int
    text: str = ""
    around: tuple[int, ...] = ()
    rounds: Rounds = field(default_factory=dict)

    def message(self) -> tuple[Header, bytes]:
        """Return the header and the payload."""
        header = {"t": "news", "kind": self.kind, "rank": self.rank, "text": self.text, "around": list(self.around)}
        return header, json.dumps(dict(self.rounds)).encode()

    @classmethod
    def of(cls, header: Header, payload: bytes) -> News:
        rounds = {int(serial): int(number) for serial, number in json.loads(payload or b"{}").items()}
        around = tuple(int(rank) for rank in header.get("around", ()))
        return cls(str(header["kind"]), int(header["rank"]), str(header["text"]), around, rounds)


@dataclass(frozen=True)
class Whereabouts:
    """What a rank waits for in a set, and the line that its training thread is in."""

    keys: Sequence[Key]
    line: str = ""

    def encode(self) -> bytes:
        return json.dumps([self.keys, self.line]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Whereabouts:
        keys, line = json.loads(data)
        return cls([(str(operation), name) for operation, name in keys], str(line))


class Tree:
    """Tree of these hosts, ordered by their first ranks, each with its ranks in ascending order. The first is the root.

    Pure: every rank derives the same tree from the same hosts.
    """

    def __init__(self, hosts: Sequence[Sequence[int]]) -> None:
        self._parents: dict[int, int] = {}
        self._children: dict[int, list[int]] = {rank: [] for host in hosts for rank in host}
        for index, (leader, *others) in enumerate(hosts):
            for rank in others:
                self._attach(rank, leader)
            if index:
                self._attach(leader, hosts[(index - 1) // FANOUT][0])

    def _attach(self, rank: int, parent: int) -> None:
        self._parents[rank] = parent
        self._children[parent].append(rank)

    def parent(self, rank: int) -> int | None:
        """Return the parent of this rank; None for the root."""
        return self._parents.get(rank)

    def children(self, rank: int) -> list[int]:
        return self._children[rank]

    def neighbours(self, rank: int) -> list[int]:
        """Return the ranks with which this one communicates."""
        parent = self._parents.get(rank)
        return self._children[rank] if parent is None else [parent, *self._children[rank]]

    def above(self, rank: int) -> list[int]:
        """Return its ancestors, from its parent to the root."""
        path: list[int] = []
        while (parent := self._parents.get(path[-1] if path else rank)) is not None:
            path.append(parent)
        return path

    def below(self, rank: int) -> list[int]:
        """Return this rank and its descendants, in ascending order."""
        found = [rank]
        for one in found:
            found.extend(self._children[one])
        return sorted(found)

    def behind(self, rank: int, neighbour: int) -> set[int]:
        """Return the ranks that `rank` reaches through this neighbour, including the neighbour."""
        if neighbour == self._parents.get(rank):
            return self._children.keys() - set(self.below(rank))
        return set(self.below(neighbour))


@dataclass(frozen=True, kw_only=True)
class ControlEvents:
    """Callbacks of the control tree to the runtime, called on the control tree's thread; they must not block.

    `negotiating(serial, rank, header, payload)`: a neighbour in the tree of a process set sent `up` or `round`.
    `whereabouts(serial)` returns what this rank waits for in a set.
    """

    lost: Callable[[int], None]
    leaving: Callable[[int, str, Rounds], None]
    fault: Callable[[str], None]
    negotiating: Callable[[int, int, Header, bytes], None]
    whereabouts: Callable[[int], Whereabouts]
    tick: Callable[[], None]


class Handoff:
    """Passes descriptors of shared memory and streams for tensors to other ranks, over separate connections.

    Receiving a descriptor proves that two ranks share a host. A stream begins with the same handshake as a link, and
    then belongs to the caller: `connect(rank, where, limit_s)` opens it.
    """

    def __init__(self, server: Server, connect: Callable[[int, Where, float], Connection]) -> None:
        self._server, self._connect = server, connect
        self._segments: dict[str, tuple[int, int]] = {}  # descriptor, readers that have not fetched it yet
        self._waiting_for_segment: list[tuple[str, Peer]] = []
        self._fetching: dict[int, list[Connection]] = {}  # to ranks that offered segments, for the next one
        self._streams: dict[tuple[str, int], Stream] = {}  # opened to us, by key and rank, until taken
        self._streams_known: set[tuple[str, int]] = set()  # including those already taken
        self._closed = False
        self._changed = threading.Condition()

    def offer(self, key: str, num_bytes: int, num_readers: int) -> Segment:
        """Create a segment that `num_readers` other ranks of this host will fetch."""
        segment = Segment.create(num_bytes)
        descriptor = segment.take_descriptor()
        if not num_readers:
            os.close(descriptor)
            return segment
        with self._changed:
            self._segments[key] = (descriptor, num_readers)  # ours until the last reader has it
        self._server.call(self._serve_segments)
        return segment

    def fetch(self, rank: int, name: str, key: str, *, limit_s: float, check_alive: Callable[[], None]) -> Segment:
        """Fetch the segment that this rank, listening at `name`, offers. Raises OSError if it is not on this host.

        `check_alive` raises if waiting has become pointless: any rank may have ended the world.
        """
        deadline = time.monotonic() + limit_s
        with self._changed:
            idle = self._fetching.setdefault(rank, [])
            connection = idle.pop() if idle else None
        connection = connection or self._connect(rank, name, limit_s)
        try:
            connection.send({"want": "segment", "key": key})
            descriptor = None
            while descriptor is None:
                check_alive()
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"waited {limit_s:g} s for shared memory {key!r} from a rank of this host")
                with contextlib.suppress(TimeoutError):
                    descriptor = connection.receive_descriptor(limit_s=_FETCH_SLICE_S)
                    if descriptor is None:
                        raise ConnectionError(f"no descriptor came for shared memory {key!r}")
        except BaseException:
            connection.close()
            raise
        with self._changed:
            idle.append(connection)  # the next segment needs no handshake
        return Segment.attach(descriptor)

    def open_stream(self, rank: int, where: Where, key: str, *, limit_s: float) -> Stream:
        """Open a one-way connection to this rank, listening at `where`; the control tree does not use it further.

        The other rank gets it with `take_stream`, under the same key.
        """
        connection = self._connect(rank, where, limit_s)
        try:
            connection.send({"want": "stream", "key": key})
            connection.receive(limit_s=limit_s)  # the other control tree has released it: it does not read what follows
        except EOFError:
            connection.close()
            raise ConnectionError(f"rank {rank} at {where} did not take a stream for {key!r}") from None
        except BaseException:
            connection.close()
            raise
        return Stream(connection.sock, connection.sealer.records())

    def take_stream(self, key: str, rank: int, *, limit_s: float) -> Stream:
        """Return the stream that this rank opened to us."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or (key, rank) in self._streams, limit_s):
                raise TimeoutError(f"waited {limit_s:g} s for a stream of rank {rank} for {key!r}")
            if self._closed:
                raise ConnectionError("Horovod has been shut down")
            return self._streams.pop((key, rank))

    def close(self) -> None:
        """Close everything that was not taken."""
        with self._changed:
            self._closed = True
            segments, self._segments = self._segments, {}
            streams, self._streams = self._streams, {}
            fetching, self._fetching = self._fetching, {}
            self._changed.notify_all()
        for connection in [one for idle in fetching.values() for one in idle]:
            connection.close()
        for descriptor, _ in segments.values():
            os.close(descriptor)
        for stream in streams.values():
            stream.sock.close()

    # In the server's thread.

    def segment_wanted(self, peer: Peer, key: str) -> None:
        """Handle a request for this segment, which may not have been offered yet."""
        self._waiting_for_segment.append((key, peer))
        self._serve_segments()

    def keep_stream(self, peer: Peer, name: tuple[str, int]) -> None:
        """Handle a stream that a rank has opened."""
        peer.send({"t": "stream"})
        if name in self._streams_known or not peer.drained:  # no rank opens one twice
            peer.close()
            return
        assert peer.opener is not None, peer.name
        stream = Stream(self._server.release(peer), peer.opener.records())
        with self._changed:
            self._streams_known.add(name)
            self._streams[name] = stream
            self._changed.notify_all()

    def _serve_segments(self) -> None:
        waiting, self._waiting_for_segment = self._waiting_for_segment, []
        for key, peer in waiting:
            if not peer.open:
                continue
            with self._changed:
                found = self._segments.get(key)
                if found is None:
                    self._waiting_for_segment.append((key, peer))
                    continue
                descriptor, num_readers = found
                with contextlib.suppress(OSError):
                    peer.send_descriptor(descriptor)
                if num_readers == 1:
                    del self._segments[key]
                    os.close(descriptor)
                else:
                    self._segments[key] = (descriptor, num_readers - 1)


class _Gathering:
    """Values on their way to the root."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, bytes]] = []
        self.num_heard = 0  # this rank itself, and children
        self.result: list[bytes] | None = None


class ControlTree:
    """This rank's part of the control tree."""

    def __init__(self, rank: int, size: int, events: ControlEvents) -> None:
        self.rank = rank
        self.size = size
        self.name = f"hora-{secrets.token_hex(16)}"
        self.goodbyes: set[int] = set()  # ranks known to have shut down or to be lost
        self._events = events
        self._tree: Tree | None = None
        self._where: Callable[[int], Where] | None = None
        self._parent: int | None = None
        self._num_children = -1  # in the world's tree; -1: not known yet
        self._links: dict[int, Peer] = {}
        self._opened: set[int] = set()  # links that this rank opened
        self._unsent: dict[int, list[tuple[Header, bytes]]] = {}  # to ranks that are about to open their link
        self._gatherings: dict[str, _Gathering] = {}
        self._noted: set[tuple[str, int]] = set()  # news already seen
        self._unacknowledged: set[tuple[str, int, int]] = set()  # news, and the rank that must acknowledge it
        self._dead: set[int] = set()  # ranks that will neither acknowledge nor say goodbye
        self._num_telling = 0  # threads that bypass a stopped rank
        self._ending = False  # a rank has begun to shut down
        self._has_left = False
        self._changed = threading.Condition()
        self._hopeless = ""
        self._server = Server(self, name="hora-control", silence_limit_s=_SILENCE_LIMIT_S, failed=self._on_failure)
        self._server.listen(self.name)
        self.handoff = Handoff(self._server, self._connect)

    # Setup, called by the runtime in this order: start, offer and fetch, listen_tcp, join, gather, know.

    def start(self, keys: RankKeys) -> None:
        """Start serving. `keys` are this rank's in this world: a peer proves which rank it is."""
        self._keys = keys
        self._server.start(keys.of)
        self._server.call(self._plan_tick)

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
            self._changed.wait_for(lambda: self._hopeless or gathering.result is not None, limit_s)
            heard = {rank for rank, _ in gathering.parts}
        if gathering.result is not None:
            return gathering.result
        if self._hopeless:
            raise HorovodInternalError(self._hopeless)
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
        link.number, link.speaker, link.name = rank, rank, f"rank {rank}"
        with self._changed:
            self._opened.add(rank)
            self._links.setdefault(rank, link)
            self._send_unsent(rank)
        self._server.serve(link)

    def _connect(self, rank: int, where: Where, limit_s: float) -> Connection:
        return connect(where, self._keys.towards(rank), timeout_s=limit_s, silence_limit_s=_SILENCE_LIMIT_S)

    def stop_waiting(self, why: str) -> None:
        """Stop all waits: some rank will never arrive."""
        with self._changed:
            self._hopeless = self._hopeless or why
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

    def leave(self, why: str, rounds: Rounds) -> None:
        """Say goodbye: this rank shuts down after having seen these rounds of its sets.

        The first goodbye ends the world.
        """
        self._goodbye(self.rank)
        self._noted.add(("leaving", self.rank))
        if not self._ending:
            self._ending = True
            self._spread(News("leaving", self.rank, why, rounds=rounds))
        for link in list(self._links.values()):
            link.send({"t": "bye"})
        self._server.call(self._count_goodbye)

    def expect_nothing_of(self, rank: int) -> None:
        """Stop expecting messages of a dead rank.

        The launcher notices a death before connections end, and tells all ranks.
        """
        with self._changed:
            self._dead.add(rank)
            self._changed.notify_all()

    def report_fault(self, rank: int, text: str) -> None:
        """Report to every rank that the world is broken, and by which rank."""
        self._noted.add(("fault", rank))
        self._spread(News("fault", rank, text))

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

    def whereabouts(self, rank: int, serial: int, *, limit_s: float) -> Whereabouts:
        """Ask a rank what it waits for in a set, over a separate connection.

        Raises OSError or EOFError without an answer.
        """
        assert self._where is not None
        with self._connect(rank, self._where(rank), limit_s) as connection:
            connection.send({"want": "whereabouts", "set": serial})
            return Whereabouts.decode(connection.receive(limit_s=limit_s)[1])

    def close(self) -> None:
        """Stop the thread and close all sockets and descriptors, after news has bypassed stopped ranks."""
        with self._changed:
            self._changed.wait_for(self._has_told_all, _CLOSE_LIMIT_S)
        self._server.close()
        self.handoff.close()

    # In the server's thread.

    def message(self, peer: Peer, header: Header, payload: bytes) -> None:
        """Handle a message of a rank. An error here is a bug of ours, no reason to disconnect that rank."""
        try:
            self._on_message(peer, header, payload)
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeError(f"a message of {peer.name} could not be handled: {error!r}") from error

    def closed(self, peer: Peer) -> None:
        rank = peer.number
        if rank < 0 or rank in self.goodbyes:
            return
        self._goodbye(rank)
        self.expect_nothing_of(rank)
        self._noted.add(("lost", rank))
        self._spread(News("lost", rank))
        self._events.lost(rank)

    def _on_failure(self, error: Exception) -> None:
        self._events.fault(f"the control tree of rank {self.rank} failed: {error!r}; Horovod has been shut down")

    def _plan_tick(self) -> None:
        def tick() -> None:
            self._plan_tick()
            self._events.tick()

        self._server.call_at(time.monotonic() + _TICK_S, tick)

    def _on_message(self, peer: Peer, header: Header, payload: bytes) -> None:
        kind, rank = header.get("t"), peer.number
        if rank < 0:
            self._introduce(peer, header, payload)
        elif kind in ("up", "round"):
            self._events.negotiating(int(header["set"]), rank, header, payload)
        elif kind == "news":
            self._on_news(peer, News.of(header, payload))
        elif kind == "ack":
            with self._changed:
                self._unacknowledged.discard((str(header["kind"]), int(header["rank"]), rank))
                self._changed.notify_all()
        elif kind == "gather":
            self._collect(str(header["what"]), cut_parts(payload, int(header["parts"])))
        elif kind == "gathered" and rank == self._parent:
            self._gathered(str(header["what"]), payload)
        elif kind == "bye":
            self._goodbye(rank)

    # Links.

    def _introduce(self, peer: Peer, header: Header, payload: bytes) -> None:
        match header.get("want"):
            case "segment":
                self.handoff.segment_wanted(peer, str(header["key"]))
            case "stream":
                self.handoff.keep_stream(peer, (str(header["key"]), peer.speaker))
            case "news":
                self._on_news(peer, News.of(header, payload))
            case "whereabouts":
                peer.send({}, self._events.whereabouts(int(header["set"])).encode())
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
            peer.number, peer.name = rank, f"rank {rank}"
            self._opened.discard(rank)
            self._links.setdefault(rank, peer)
            self._send_unsent(rank)

    def _send_unsent(self, rank: int) -> None:
        for header, payload in self._unsent.pop(rank, []):
            self._links[rank].send(header, payload)

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

    def _down(self, header: Header, payload: bytes = b"") -> None:
        """Send to the children in the world's tree. Links of sets are opened after the first gathering of all ranks."""
        children = self._links.keys() - {self._parent} if self._tree is None else self._tree.children(self.rank)
        for child in list(children):
            self.send(child, header, payload)

    # News.

    def _spread(self, news: News, *, skip: int = -1) -> None:
        """Send news to the neighbours, except the one it came from."""
        for rank, link in list(self._links.items()):
            if rank != skip and rank not in news.around and rank not in self.goodbyes:
                link.send(*news.message())
                if self._tree is not None and len(self._tree.neighbours(rank)) > 1:
                    self._expect_ack(rank, news)

    def _expect_ack(self, rank: int, news: News) -> None:
        waiting = news.kind, news.rank, rank
        self._unacknowledged.add(waiting)

        def check() -> None:
            if waiting in self._unacknowledged and rank not in self.goodbyes:
                self._num_telling += 1
                self._unacknowledged.discard(waiting)
                self._go_around(rank, news)

        def plan() -> None:
            self._server.call_at(time.monotonic() + _ACK_LIMIT_S, check)

        self._server.call(plan)

    def _go_around(self, stopped: int, news: News) -> None:
        """Send news to the other neighbours of a stopped rank."""
        assert self._tree is not None
        others = [rank for rank in self._tree.neighbours(stopped) if rank not in (self.rank, *self.goodbyes)]
        header, payload = replace(news, around=(*news.around, stopped)).message()
        log.info("rank %d does not acknowledge news: sending it to the ranks %s beyond it", stopped, others)

        def tell() -> None:
            assert self._where is not None
            try:
                for rank in others:
                    with (
                        contextlib.suppress(OSError, EOFError),
                        self._connect(rank, self._where(rank), _AROUND_LIMIT_S) as line,
                    ):
                        line.send({**header, "want": "news"}, payload)
                        line.receive(limit_s=_AROUND_LIMIT_S)
            finally:
                with self._changed:
                    self._num_telling -= 1
                    self._changed.notify_all()

        threading.Thread(target=tell, name="hora-control-around", daemon=True).start()

    def _has_told_all(self) -> bool:
        silent = self.goodbyes | self._dead
        return not self._num_telling and all(rank in silent for *_, rank in list(self._unacknowledged))

    def _on_news(self, peer: Peer, news: News) -> None:
        kind, rank = news.kind, news.rank
        if not self._believes(peer, news):
            log.warning("%s may not say %r of rank %d", peer.name, kind, rank)
            return
        peer.send({"t": "ack", "kind": kind, "rank": rank})
        if (kind, rank) in self._noted or rank == self.rank:
            return
        self._noted.add((kind, rank))
        self._spread(news, skip=peer.speaker)
        if kind == "fault":
            self._events.fault(news.text)
            return
        self._goodbye(rank)
        if kind == "leaving":
            self._ending = True
            self._events.leaving(rank, news.text, news.rounds)
        else:
            self.expect_nothing_of(rank)
            self._events.lost(rank)

    def _believes(self, peer: Peer, news: News) -> bool:
        """Return whether a connection may send this news.

        A rank speaks for the ranks behind it; one that bypasses a stopped rank speaks for those behind that. Any rank
        may report a fault.
        """
        kind, rank = news.kind, news.rank
        if kind not in ("leaving", "lost"):
            return kind == "fault"
        if peer.speaker == rank or self._tree is None:
            return kind == "lost" or peer.speaker == rank
        neighbours = self._tree.neighbours(self.rank)
        via = [one for one in (peer.speaker, *news.around) if one in neighbours]
        return any(rank in self._tree.behind(self.rank, one) for one in via)

    # Goodbyes.

    def _goodbye(self, rank: int) -> None:
        with self._changed:
            self.goodbyes.add(rank)
            self._changed.notify_all()

    def _count_goodbye(self) -> None:
        if not self._has_left:  # a rank may leave because another one does, and then shut down itself
            self._has_left = True
            self._collect(_GOODBYES, [(self.rank, b"")])
