"""News for every rank of a world: a rank shuts down (leaving), was lost, or the world is broken (fault).

News spreads along all links: a rank that has not seen it records it and forwards it to its other neighbours. A dead
rank is noticed by all its neighbours, so the news reaches every side of it. A stopped rank forwards and acknowledges
nothing: after _ACK_LIMIT_S its neighbour sends the news to that rank's other neighbours itself, over separate
connections (`around` lists the stopped ranks). Invariants: each rank records each (kind, rank) of news once; a rank
accepts news about another rank only from that rank's side of the tree.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hora.engine.rank_tree import Tree
from hora.net.server import Peer, Server
from hora.net.wire import Connection, Header

log = logging.getLogger("hora")

_ACK_LIMIT_S = 1.0  # a rank that does not acknowledge news in time counts as stopped
_AROUND_LIMIT_S = 5.0


@dataclass(frozen=True)
class News:
    """A message for every rank: `rank` shuts down (leaving), was lost, or broke the world (fault).

    `around`: stopped ranks that it bypassed.
    """

    kind: str
    rank: int
    text: str = ""
    around: tuple[int, ...] = ()

    def message(self) -> Header:
        return {"t": "news", "kind": self.kind, "rank": self.rank, "text": self.text, "around": list(self.around)}

    @classmethod
    def of(cls, header: Header) -> News:
        around = tuple(int(rank) for rank in header.get("around", ()))
        return cls(str(header["kind"]), int(header["rank"]), str(header["text"]), around)


class NewsChannel:
    """This rank's part of spreading news, over its links and around stopped ranks.

    `connect` opens a separate connection to a rank, `deliver` takes each news of others once, on the server's thread,
    and `changed` is notified of goodbyes and acknowledgements.
    """

    def __init__(
        self,
        rank: int,
        links: Mapping[int, Peer],
        server: Server,
        *,
        connect: Callable[[int, float], Connection],
        deliver: Callable[[News], None],
        changed: threading.Condition,
    ) -> None:
        self.tree: Tree | None = None  # of all ranks, once it is known
        self.goodbyes: set[int] = set()  # ranks known to have shut down or to be lost
        self.dead: set[int] = set()  # ranks that will neither acknowledge nor say goodbye
        self._rank, self._links, self._server = rank, links, server
        self._connect, self._deliver, self._changed = connect, deliver, changed
        self._noted: set[tuple[str, int]] = set()  # news already seen
        self._unacknowledged: set[tuple[str, int, int]] = set()  # news, and the rank that must acknowledge it
        self._num_telling = 0  # threads that bypass a stopped rank

    def goodbye(self, rank: int) -> None:
        """Note that a rank has shut down or is lost."""
        with self._changed:
            self.goodbyes.add(rank)
            self._changed.notify_all()

    def expect_nothing_of(self, rank: int) -> None:
        """Stop expecting messages of a dead rank.

        The launcher notices a death before connections end, and tells all ranks.
        """
        with self._changed:
            self.dead.add(rank)
            self._changed.notify_all()

    def acknowledged(self, kind: str, rank: int, by: int) -> None:
        with self._changed:
            self._unacknowledged.discard((kind, rank, by))
            self._changed.notify_all()

    def has_told_all(self) -> bool:
        """Return whether every rank that can acknowledge what this one has told it has done so."""
        silent = self.goodbyes | self.dead
        return not self._num_telling and silent.issuperset(rank for *_, rank in list(self._unacknowledged))

    def spread(self, news: News, *, skip: int = -1) -> None:
        """Send news to the neighbours, except the one it came from."""
        self._noted.add((news.kind, news.rank))
        for rank, link in list(self._links.items()):
            if rank != skip and rank not in news.around and rank not in self.goodbyes:
                link.send(news.message())
                if self.tree is not None and len(self.tree.neighbours(rank)) > 1:
                    self._expect_ack(rank, news)

    def _expect_ack(self, rank: int, news: News) -> None:
        waiting = news.kind, news.rank, rank
        self._unacknowledged.add(waiting)

        def check() -> None:
            if waiting in self._unacknowledged and rank not in self.goodbyes:
                self._num_telling += 1
                self._unacknowledged.discard(waiting)
                self._go_around(rank, news)

        deadline = time.monotonic() + _ACK_LIMIT_S
        self._server.call(lambda: self._server.call_at(deadline, check))

    def _go_around(self, stopped: int, news: News) -> None:
        """Send news to the other neighbours of a stopped rank."""
        assert self.tree is not None
        others = [rank for rank in self.tree.neighbours(stopped) if rank not in (self._rank, *self.goodbyes)]
        header = {**replace(news, around=(*news.around, stopped)).message(), "want": "news"}
        log.info("rank %d does not acknowledge news: sending it to the ranks %s beyond it", stopped, others)

        def tell() -> None:
            try:
                for rank in others:
                    with contextlib.suppress(OSError, EOFError), self._connect(rank, _AROUND_LIMIT_S) as line:
                        line.send(header)
                        line.receive(limit_s=_AROUND_LIMIT_S)
            finally:
                with self._changed:
                    self._num_telling -= 1
                    self._changed.notify_all()

        threading.Thread(target=tell, name="hora-control-around", daemon=True).start()

    def receive(self, peer: Peer, news: News) -> None:
        """Take news of a neighbour, or of a rank that bypasses one."""
        kind, rank = news.kind, news.rank
        if not self._believes(peer, news):
            log.warning("%s may not say %r of rank %d", peer.name, kind, rank)
            return
        peer.send({"t": "ack", "kind": kind, "rank": rank})
        if (kind, rank) not in self._noted and rank != self._rank:
            self.spread(news, skip=peer.speaker)
            self._deliver(news)

    def _believes(self, peer: Peer, news: News) -> bool:
        """Return whether a connection may send this news.

        A rank speaks for the ranks behind it; one that bypasses a stopped rank speaks for those behind that. Any rank
        may report a fault.
        """
        kind, rank = news.kind, news.rank
        if kind not in ("leaving", "lost"):
            return kind == "fault"
        if peer.speaker == rank or self.tree is None:
            return kind == "lost" or peer.speaker == rank
        neighbours = self.tree.neighbours(self._rank)
        via = [one for one in (peer.speaker, *news.around) if one in neighbours]
        return any(rank in self.tree.behind(self._rank, one) for one in via)
