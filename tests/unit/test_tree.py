"""The tree of ranks and negotiation over it, without processes; messages are delivered in random order."""

from __future__ import annotations

import random
import time
from collections import deque
from types import SimpleNamespace

import pytest

from hora.engine.control_tree import Whereabouts
from hora.engine.negotiation.tree import OLD_S, SLOTS, TreeNegotiation
from hora.engine.plan import BatchPlanner
from hora.engine.rank_tree import FANOUT, Tree, by_host
from hora.engine.request import Key, Kind, Signature
from hora.net.wire import cut_parts
from waiting import wait_until


def hosts_of(*sizes: int) -> list[list[int]]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


def test_ranks_are_grouped_by_host_in_their_own_order():
    hosts = [[0, 2], [1, 3], [4]]
    assert by_host(range(5), hosts) == [[0, 2], [1, 3], [4]]
    assert by_host([1, 2], hosts) == [[1], [2]]
    assert by_host([3, 4, 0, 1, 2], hosts) == [[3, 1], [4], [0, 2]]
    assert Tree(by_host([3, 4, 0, 1, 2], hosts)).parent(3) is None  # the first of them is the root


@pytest.mark.parametrize("sizes", [(1,), (3,), (1, 1), (2, 3, 1), (8,) * 30, (1,) * 100])
def test_every_rank_but_the_root_has_a_parent_and_few_neighbours(sizes):
    hosts = hosts_of(*sizes)
    tree, ranks = Tree(hosts), [rank for host in hosts for rank in host]
    assert tree.parent(0) is None
    assert tree.below(0) == ranks
    for rank in ranks[1:]:
        parent = tree.parent(rank)
        assert rank in tree.children(parent)
        assert tree.above(rank)[0] == parent
        assert tree.above(rank)[-1] == 0
    for rank in ranks:
        assert len(tree.neighbours(rank)) <= max(sizes) + FANOUT
        assert tree.neighbours(rank) == ([] if rank == 0 else [tree.parent(rank)]) + tree.children(rank)
        sides = [tree.behind(rank, neighbour) for neighbour in tree.neighbours(rank)]
        assert sorted([rank, *(one for side in sides for one in side)]) == ranks


class Network:
    """Connects control trees without sockets: each pair of ranks has an ordered line per direction, nothing else."""

    def __init__(self, tree: Tree, ranks: list[int], seed: int, *, without_cache: int = -1) -> None:
        self.random = random.Random(seed)
        self.lines: dict[tuple[int, int], deque] = {}
        self.calls: dict[int, deque] = {rank: deque() for rank in ranks}
        self.num_messages = 0
        self.stopped: set[int] = set()
        self.in_flight: dict[int, set[Key]] = {rank: set() for rank in ranks}  # what the ranks report
        control_trees = {rank: FakeControlTree(self, rank) for rank in ranks}
        self.negotiations = {
            rank: TreeNegotiation(control_trees[rank], 1, tree, ranks, cache_capacity=0 if rank == without_cache else 4)
            for rank in ranks
        }
        self.planners = {rank: BatchPlanner(ranks, fusion_threshold_bytes=1000) for rank in ranks}
        self.executed: dict[int, list] = {rank: [] for rank in ranks}

    def step(self) -> bool:
        """Deliver a random next message or run a random planned call; return whether there was one."""
        lines = [ends for ends, line in self.lines.items() if line and ends[1] not in self.stopped]
        calls = [rank for rank, some in self.calls.items() if some and rank not in self.stopped]
        if not lines and not calls:
            return False
        what = self.random.choice([*lines, *calls])
        if isinstance(what, int):
            self.calls[what].popleft()()
        else:
            self.negotiations[what[1]].receive(what[0], *self.lines[what].popleft())
        return True

    def run(self) -> None:
        while self.step():
            pass
        for rank, negotiation in self.negotiations.items():
            while (batches := negotiation.poll(self.planners[rank])) is not None:
                self.executed[rank] += [
                    (batch.kind, batch.error, batch.last_joined, [part[0] for part in batch.parts]) for batch in batches
                ]

    def agreed(self) -> list:
        """Return the batches that all ranks have executed, in the same order."""
        (same,) = {repr(executed) for executed in self.executed.values()}
        del same
        return next(iter(self.executed.values()))


class FakeControlTree:
    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank = network, rank

    def send(self, rank, header, payload=b""):
        self.network.num_messages += 1
        self.network.lines.setdefault((self.rank, rank), deque()).append((header, payload))

    def call(self, function):
        self.network.calls[self.rank].append(function)

    def whereabouts(self, ranks, serial):
        stopped, in_flight = self.network.stopped, self.network.in_flight
        return {rank: Whereabouts(() if rank in stopped else list(in_flight[rank])) for rank in ranks}


def an_allreduce(name: str | None, *, size: int = 10) -> Signature:
    return Signature(int(Kind.ALLREDUCE), "allreduce", name, ("float32",), ((size,),))


JOIN = Signature(int(Kind.JOIN), "join", None)
SHAPES = [(1,), (2, 2), (1, 3, 2), (3, 1, 1, 1, 1, 2), (1,) * 12]


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("seed", range(10))
def test_all_ranks_execute_the_same_operations_in_the_same_order(sizes, seed):
    """Each rank announces the operations in its own order: some named, some numbered, some with their own shape."""
    hosts = hosts_of(*sizes)
    ranks = [rank for host in hosts for rank in host]
    network = Network(Tree(hosts), ranks, seed)
    for _ in range(3):  # names are repeated, and there are more than the announcers cache
        for rank in ranks:
            operations = [(an_allreduce(f"t{index}"), 0) for index in range(6)]
            operations += [(an_allreduce(None), instance) for instance in range(3)]
            operations += [(Signature(int(Kind.ALLGATHER), "allgather", "g", ("float32",), ((rank + 1,),)), 0)]
            network.random.shuffle(operations)
            for signature, instance in operations:
                network.negotiations[rank].announce(signature, instance)
                network.step()
        network.run()
        agreed = network.agreed()
        assert not any(error for _, error, _, _ in agreed)
        assert sorted(str(key) for _, _, _, keys in agreed for key in keys) == sorted(
            [str(("allreduce", f"t{index}")) for index in range(6)]
            + [str(("allreduce", index)) for index in range(3)]
            + [str(("allgather", "g"))]
        )
        for executed in network.executed.values():
            executed.clear()


def test_a_known_request_costs_two_small_messages_per_link():
    hosts = hosts_of(*[8] * 30)
    ranks = [rank for host in hosts for rank in host]
    network = Network(Tree(hosts), ranks, 0)
    for _ in range(2):
        network.num_messages = 0
        for rank in ranks:
            network.negotiations[rank].announce(an_allreduce("t"), 0)
        sent = [payload for line in network.lines.values() for _, payload in line]
        network.run()
        assert network.agreed()
    assert network.num_messages == 2 * (len(ranks) - 1)
    assert {len(payload) for payload in sent} == {8 + 1}  # rank, length, a vector of one bit


def test_known_requests_are_sent_as_bits_and_all_others_in_full():
    """Twenty known requests in any order take three bytes, beside new and numbered ones."""
    hosts = hosts_of(2, 1, 1)
    network = Network(Tree(hosts), list(range(4)), 0)
    for again in range(3):
        for rank in range(4):
            operations = [(an_allreduce(f"t{index}"), 0) for index in range(20)]
            operations += [(an_allreduce(None), again), (an_allreduce(f"new in {again}"), 0)]
            network.random.shuffle(operations)
            for signature, instance in operations:
                network.negotiations[rank].announce(signature, instance)
        vectors = [
            data
            for line in network.lines.values()
            for header, payload in line
            for who, data in cut_parts(payload, header["parts"])
            if who == SLOTS
        ]
        assert len(vectors) == (0 if again == 0 else 3 * 20)  # from the three leaves of the tree
        network.run()
        assert sorted(map(str, (key for _, _, _, keys in network.agreed() for key in keys))) == sorted(
            [str(("allreduce", f"t{index}")) for index in range(20)]
            + [str(("allreduce", again)), str(("allreduce", f"new in {again}"))]
        )
        for executed in network.executed.values():
            executed.clear()
    network.negotiations[0].announce(an_allreduce("t0"), 0)
    network.negotiations[0].announce(an_allreduce("t19"), 0)
    for rank in (1, 2, 3):
        network.negotiations[rank].announce(an_allreduce("t19"), 0)
    network.run()
    assert [keys for _, _, _, keys in network.agreed()] == [[("allreduce", "t19")]]  # t0 waits for the other ranks


def make_known(network: Network) -> None:
    """Let all ranks agree on the request for the first time."""
    for negotiation in network.negotiations.values():
        negotiation.announce(an_allreduce("t"), 0)
    network.run()
    for executed in network.executed.values():
        assert executed
        executed.clear()


@pytest.mark.parametrize("one", [0, 2, 3])
def test_a_rank_without_a_cache_announces_in_full_and_agrees_with_the_others(one):
    network = Network(Tree(hosts_of(2, 2, 1)), list(range(5)), one, without_cache=one)
    for _ in range(3):
        make_known(network)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("sizes", [(2, 2), (1, 3, 2), (1,) * 12])
@pytest.mark.parametrize("seed", range(5))
def test_a_mismatch_is_an_error_on_all_ranks(sizes, seed, known):
    hosts = hosts_of(*sizes)
    ranks = [rank for host in hosts for rank in host]
    network = Network(Tree(hosts), ranks, seed)
    if known:
        make_known(network)
    odd = network.random.choice(ranks)
    for rank in ranks:
        network.negotiations[rank].announce(an_allreduce("t", size=11 if rank == odd else 10), 0)
    network.run()
    ((_, error, _, _),) = network.agreed()
    assert f"rank {odd} has [11]" in error
    network.executed = {rank: [] for rank in ranks}
    make_known(network)  # the mismatch has left no trace


@pytest.mark.parametrize("sizes", [(1,), *SHAPES[1:]])
@pytest.mark.parametrize("seed", range(10))
def test_ranks_join_at_different_times_and_continue(sizes, seed):
    """Rank r announces r operations, which may be known, and joins; then all announce an operation again."""
    hosts = hosts_of(*sizes)
    ranks = [rank for host in hosts for rank in host]
    network = Network(Tree(hosts), ranks, seed)
    if seed % 2:
        for index in range(len(ranks) - 1):
            for rank in ranks:
                network.negotiations[rank].announce(an_allreduce(f"step{index}"), 0)
        network.run()
        network.executed = {rank: [] for rank in ranks}
    for again in range(2):
        for index in range(len(ranks) + 1):
            for rank in network.random.sample(ranks, len(ranks)):
                if index < rank:
                    network.negotiations[rank].announce(an_allreduce(f"step{index}"), 0)
                elif index == rank:
                    network.negotiations[rank].announce(JOIN, again)
                for _ in range(network.random.randrange(4)):
                    network.step()
        network.run()
        for rank in ranks:
            network.negotiations[rank].announce(an_allreduce("after"), 0)
        network.run()
        agreed = network.agreed()
        assert not any(error for _, error, _, _ in agreed)
        keys = [key for _, _, _, keys in agreed for key in keys]
        assert set(keys) == {("allreduce", f"step{index}") for index in ranks[:-1]} | {("allreduce", "after")}
        assert keys[-1] == ("allreduce", "after")
        assert [kind for kind, _, _, _ in agreed].count(Kind.JOIN) == 1
        for executed in network.executed.values():
            executed.clear()


def let_time_pass(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic() + 2 * OLD_S
    monkeypatch.setattr("hora.engine.negotiation.tree.time", SimpleNamespace(monotonic=lambda: now))
    for _ in range(2):
        for rank, negotiation in network.negotiations.items():
            if rank not in network.stopped:
                negotiation.tick()
        network.run()


@pytest.mark.parametrize("known", [False, True])
def test_the_root_finds_the_missing_ranks(monkeypatch, known):
    """Two ranks of different hosts, one of them the root, have not announced the operation."""
    hosts = hosts_of(2, 2, 2)
    network = Network(Tree(hosts), list(range(6)), 0)
    if known:
        make_known(network)
    for rank in (1, 2, 4, 5):
        network.negotiations[rank].announce(an_allreduce("t"), 0)
    network.run()
    let_time_pass(network, monkeypatch)
    ((_, signatures),) = network.negotiations[0].waiting_requests().items()
    assert [rank for rank, signature in enumerate(signatures) if signature is None] == [0, 3]
    for rank in (0, 3):  # once they announce it, it completes
        network.negotiations[rank].announce(an_allreduce("t"), 0)
    network.run()
    assert [keys for _, _, _, keys in network.agreed()] == [[("allreduce", "t")]]
    assert not network.negotiations[0].waiting_requests()


@pytest.mark.parametrize("known", [False, True])
def test_ranks_behind_a_stopped_rank_are_asked_and_not_blamed(monkeypatch, known):
    """Rank 2 is stopped; of the ranks below it, only rank 7 has not announced."""
    hosts = [[0, 1], [2, 3], [4], [5], [6], [7]]  # the last host is below the second
    network = Network(Tree(hosts), list(range(8)), 0)
    if known:
        make_known(network)
    network.stopped.add(2)
    for rank in (0, 1, 3, 4, 5, 6):
        network.negotiations[rank].announce(an_allreduce("t"), 0)
        network.in_flight[rank].add(("allreduce", "t"))
    network.run()
    assert not network.negotiations[0].waiting_requests()  # no rank has been asked yet
    let_time_pass(network, monkeypatch)
    wait_until("the root has asked", network.negotiations[0].waiting_requests)
    ((_, signatures),) = network.negotiations[0].waiting_requests().items()
    assert [rank for rank, signature in enumerate(signatures) if signature is None] == [2, 7]
    network.stopped.clear()
    for rank in (2, 7):
        network.negotiations[rank].announce(an_allreduce("t"), 0)
    network.run()
    assert [keys for _, _, _, keys in network.agreed()] == [[("allreduce", "t")]]


def test_announcements_for_ranks_outside_the_senders_subtree_are_ignored():
    network = Network(Tree(hosts_of(1, 1, 1)), [0, 1, 2], 0)
    impostor = network.negotiations[1]
    for rank in (0, 1, 2):
        impostor._send_up([(rank, impostor._announcer.encode(an_allreduce("t"), 0))])
    network.negotiations[0].announce(an_allreduce("t"), 0)
    network.run()
    assert network.agreed() == []
    network.negotiations[2].announce(an_allreduce("t"), 0)
    network.run()
    assert len(network.agreed()) == 1
