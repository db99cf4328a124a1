"""Control trees without ranks: several of them in one process."""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from hora.engine.control_tree import ControlEvents, ControlTree, Whereabouts
from hora.engine.rank_tree import Tree
from hora.errors import AuthenticationError, HorovodInternalError
from hora.net.keys import RankKeys, rank_keys
from hora.net.wire import Connection, Credentials, connect, cut_parts, join_parts, new_secret
from waiting import wait_until

LIMIT_S = 60.0
WORLD = new_secret()


def given(rank: int, world: bytes = WORLD) -> RankKeys:
    """Return the keys that a launcher gives to this rank, and no others."""
    return RankKeys(rank, lambda ranks: rank_keys(world, rank, ranks))


def a_control_tree(rank: int, size: int, heard: list[tuple[object, ...]]) -> ControlTree:
    """Start a control tree that records its events in `heard`."""
    names = ("lost", "leaving", "fault", "negotiating")
    told = {name: lambda *what, name=name: heard.append((name, *what)) for name in names}
    waits = lambda serial: Whereabouts([("allreduce", serial)], "train.py:3")  # noqa: E731
    control_tree = ControlTree(
        rank, size, ControlEvents(**told, tick=lambda: None, whereabouts=waits, standstill=lambda question: b"")
    )
    control_tree.start(given(rank))
    return control_tree


@pytest.fixture
def heard():
    """The events of rank 0's control tree."""
    return []


@pytest.fixture
def control_trees(heard):
    """The control trees of ranks 0 and 1 in a world of three; both share a host."""
    with contextlib.ExitStack() as stack:
        some = [a_control_tree(0, 3, heard), a_control_tree(1, 3, [])]
        for control_tree in some:
            stack.callback(control_tree.close)
            control_tree.know(Tree([[0, 1], [2]]), lambda rank: some[rank].name)
        yield some


class World:
    """Ranks connected along the tree of their hosts."""

    def __init__(self, *sizes: int) -> None:
        self.tree = Tree([list(range(sum(sizes[:at]), sum(sizes[: at + 1]))) for at in range(len(sizes))])
        size = sum(sizes)
        self.heard: list[list[tuple[object, ...]]] = [[] for _ in range(size)]
        self.control_trees = [a_control_tree(rank, size, self.heard[rank]) for rank in range(size)]
        for control_tree in self.control_trees:
            parent = self.tree.parent(control_tree.rank)
            place = None if parent is None else (parent, self.control_trees[parent].name)
            control_tree.join(place, len(self.tree.children(control_tree.rank)), limit_s=LIMIT_S)
            control_tree.know(self.tree, lambda rank: self.control_trees[rank].name)
        self.gather("ready")  # as ranks do: now all links exist

    def gather(self, what: str) -> list[list[bytes]]:
        with ThreadPoolExecutor(len(self.control_trees)) as pool:
            return list(
                pool.map(
                    lambda control_tree: control_tree.gather(what, b"%d" % control_tree.rank, limit_s=LIMIT_S),
                    self.control_trees,
                )
            )

    def stop(self, rank: int) -> None:
        """Simulate a stopped process: it receives messages and ignores them."""
        self.control_trees[rank]._on_message = lambda *message: None  # type: ignore[method-assign]

    def all_heard(self, what: tuple[object, ...], ranks: list[int]) -> None:
        wait_until(f"{ranks} have heard {what}", lambda: all(what in self.heard[rank] for rank in ranks))
        for rank in ranks:
            assert self.heard[rank].count(what) == 1


@pytest.fixture
def worlds():
    made = []

    def make(*sizes: int) -> World:
        made.append(World(*sizes))
        return made[-1]

    yield make
    for world in made:
        for control_tree in world.control_trees:
            control_tree.close()


def test_a_rank_fetches_what_another_one_offers(control_trees):
    offered = control_trees[0].handoff.offer("some", 100, 1)
    offered.memory[0] = 7
    assert (
        control_trees[1]
        .handoff.fetch(0, control_trees[0].name, "some", limit_s=LIMIT_S, check_alive=lambda: None)
        .memory[0]
        == 7
    )


def test_a_rank_does_not_wait_for_an_offer_when_the_world_has_ended(control_trees):
    num_looks = 0

    def check_alive():
        nonlocal num_looks
        num_looks += 1
        if num_looks == 2:
            raise HorovodInternalError("rank 2 was lost")

    with pytest.raises(HorovodInternalError, match="rank 2 was lost"):
        control_trees[1].handoff.fetch(0, control_trees[0].name, "never", limit_s=LIMIT_S, check_alive=check_alive)
    with pytest.raises(TimeoutError, match=r"waited 0\.1 s for shared memory 'never'"):
        control_trees[1].handoff.fetch(0, control_trees[0].name, "never", limit_s=0.1, check_alive=lambda: None)


def a_member(control_tree: ControlTree, rank: int) -> Connection:
    connection = connect(control_tree.name, given(rank).towards(control_tree.rank), timeout_s=LIMIT_S)
    connection.send({"want": "link"})
    return connection


def news(kind: str, rank: int, text: str = "") -> dict[str, object]:
    return {"t": "news", "kind": kind, "rank": rank, "text": text, "around": []}


def test_a_member_reports_only_for_its_own_side_of_the_tree(control_trees, heard):
    with a_member(control_trees[0], 2) as other:
        control_trees[1].link(0, control_trees[0].name, limit_s=LIMIT_S)
        wait_until("both are connected", lambda: len(control_trees[0]._links) == 2)
        for taken in (1, 2, 3, -1):
            with a_member(control_trees[0], taken) as second, pytest.raises(EOFError):
                second.receive(limit_s=LIMIT_S)
        other.send(news("lost", 1))
        other.send(news("leaving", 1, "says rank 2"))
        other.send(news("gone mad", 2))
        other.send(news("leaving", 2, "the end"))
        wait_until("rank 2 has left", lambda: heard)
    assert heard == [("leaving", 2, "the end")]


def test_announcements_are_attributed_to_the_authenticated_rank(control_trees, heard):
    with a_member(control_trees[0], 2) as other:
        said = {"t": "up", "set": 5, "parts": 1, "rank": 1}
        other.send(said, b"mine")
        wait_until("it has come", lambda: heard)
    assert heard[0] == ("negotiating", 5, 2, said, b"mine")


@pytest.mark.parametrize("sizes", [(1,), (4,), (1, 1), (2, 1, 3), (1,) * 7])
def test_all_ranks_gather_the_values_of_all(worlds, sizes):
    world = worlds(*sizes)
    for what in ("first", "second"):
        assert world.gather(what) == [[b"%d" % rank for rank in range(sum(sizes))]] * sum(sizes)


def test_missing_ranks_are_named(worlds):
    world = worlds(2, 1)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(world.control_trees[1].gather, "names", b"", limit_s=LIMIT_S)
        with pytest.raises(HorovodInternalError, match=r"waited 0.5 s for rank\(s\) \[2\] to send their names"):
            world.control_trees[0].gather("names", b"", limit_s=0.5)
        world.control_trees[1].stop_waiting("rank 2 was lost")
        with pytest.raises(HorovodInternalError, match="rank 2 was lost"):
            late.result()


@pytest.mark.parametrize("leaver", [0, 1, 2, 6])
def test_all_ranks_receive_a_goodbye_and_wait_for_all_others(worlds, leaver):
    world = worlds(2, 2, 1, 1, 1)
    others = [rank for rank in range(7) if rank != leaver]
    world.control_trees[leaver].leave("the end")
    world.all_heard(("leaving", leaver, "the end"), others)
    for rank in others:
        world.control_trees[rank].leave("the end too")
    for control_tree in world.control_trees:
        assert control_tree.wait_for_goodbyes(LIMIT_S)
    for control_tree in world.control_trees:
        control_tree.close()
    assert all(len(heard) == (rank != leaver) for rank, heard in enumerate(world.heard))


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_a_death_is_reported_on_every_side_of_the_dead_rank(worlds, victim):
    """Rank 2 connects the root with the hosts of ranks 7, 8 and 9."""
    world = worlds(2, 2, *[1] * 6)
    assert set(world.tree.children(2)) == {3, 7, 8, 9}
    world.control_trees[victim].close()
    world.all_heard(("lost", victim), [rank for rank in range(10) if rank != victim])


@pytest.mark.parametrize("sender", [0, 1, 3, 8])
def test_news_bypasses_a_stopped_rank(worlds, sender):
    world = worlds(2, 2, *[1] * 6)
    world.stop(2)
    world.control_trees[sender].report_fault(sender, "it broke")
    world.all_heard(("fault", "it broke"), [rank for rank in range(10) if rank not in (2, sender)])
    world.control_trees[sender].leave("the end")
    others = [rank for rank in range(10) if rank not in (2, sender)]
    world.all_heard(("leaving", sender, "the end"), others)


def test_a_rank_can_be_asked_for_its_pending_operations(worlds):
    world = worlds(1, 1)
    found = world.control_trees[0].whereabouts([1], 7)
    assert found == {1: Whereabouts([("allreduce", 7)], "train.py:3")}


def test_messages_sent_before_a_link_exists_arrive_later(control_trees, heard):
    control_trees[1].send(0, {"t": "up", "set": 1}, b"early")
    control_trees[1].link(0, control_trees[0].name, limit_s=LIMIT_S)
    control_trees[1].link(0, control_trees[0].name, limit_s=LIMIT_S)  # exists already
    control_trees[1].send(0, {"t": "up", "set": 1}, b"late")
    wait_until("both have come", lambda: len(heard) == 2)
    assert [what[-1] for what in heard] == [b"early", b"late"]


def test_a_ranks_keys_open_no_connection_in_another_ranks_name(control_trees):
    """An attacker on rank 2's host holds all keys of rank 2."""
    place = "127.0.0.1", control_trees[0].listen_tcp("127.0.0.1")
    mine = given(2)
    held = [mine.towards(0).secret, mine.towards(1).secret, mine.of(1).secret, mine.shared]
    for secret in held:
        for rank in (0, 1):
            for where in (place, control_trees[0].name):
                with pytest.raises(AuthenticationError):
                    connect(where, Credentials(secret, "control", rank), timeout_s=LIMIT_S)
    with connect(place, mine.towards(0), timeout_s=LIMIT_S) as stream:  # accepted, but only as rank 2
        stream.send({"want": "stream", "key": "k", "rank": 1})
        stream.receive(limit_s=LIMIT_S)
        with pytest.raises(TimeoutError):
            control_trees[0].handoff.accept_stream("k", 1, limit_s=0.1)
        control_trees[0].handoff.accept_stream("k", 2, limit_s=LIMIT_S).sock.close()


def test_the_keys_of_an_earlier_generation_open_nothing(control_trees):
    old = given(1, new_secret())
    with pytest.raises(AuthenticationError):
        connect(control_trees[0].name, old.towards(0), timeout_s=LIMIT_S)


def test_keys_are_requested_once_and_together():
    asked = []

    def get(ranks):
        asked.append(list(ranks))
        return rank_keys(WORLD, 1, ranks)

    keys = RankKeys(1, get, at_once=[0])
    keys.fetch([0, 1, 2, 3])
    assert [keys.towards(rank) for rank in (0, 2, 3)] == [given(rank).of(1) for rank in (0, 2, 3)]
    assert asked == [[0], [2, 3]]
    assert keys.shared == given(3).shared


def test_a_rank_that_does_not_read_delays_no_other(control_trees, heard):
    """Rank 0 sends far more to it than its socket buffers, while the others continue."""
    with a_member(control_trees[0], 2) as stopped:
        stopped.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        control_trees[1].link(0, control_trees[0].name, limit_s=LIMIT_S)
        wait_until("both are connected", lambda: len(control_trees[0]._links) == 2)
        piece, num_rounds = bytes(100_000), 50
        for number in range(num_rounds):
            control_trees[0].send(2, {"t": "round", "set": 7}, piece)
            control_trees[1].send(0, {"t": "up", "set": 7}, piece)
            wait_until("it has come", lambda number=number: len(heard) > number)
        assert not control_trees[0]._links[2].drained
        for _ in range(num_rounds):  # once it reads again, it has missed nothing
            header, payload = stopped.receive(limit_s=LIMIT_S)
            assert (header["t"], header["set"], payload) == ("round", 7, piece)


def test_ten_thousand_ranks_fit_into_one_message():
    parts = [(rank, b"%d" % rank) for rank in range(10_000)]
    assert cut_parts(join_parts(parts) + b"more", len(parts)) == parts
