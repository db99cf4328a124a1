"""Rendezvous and client in one process, over real loopback connections."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from hora.errors import AuthenticationError, HorovodInternalError
from hora.net import acceptor
from hora.net.client import ControlClient
from hora.net.rendezvous import Rendezvous
from hora.net.wire import ClientHandshake, Credentials, new_secret
from hora.world import RendezvousEndpoint, World
from waiting import wait_until

LIMIT_S = 20.0


class Events:
    """Records the rendezvous' reports."""

    def __init__(self) -> None:
        self.seen: queue.SimpleQueue[tuple] = queue.SimpleQueue()

    def __getattr__(self, name: str):
        return lambda *args: self.seen.put((name, *args))

    def next(self) -> tuple:
        return self.seen.get(timeout=LIMIT_S)


class Place:
    """A rendezvous and its clients."""

    def __init__(self) -> None:
        self.secret = new_secret()
        self.secret_fd = os.memfd_create("test-secret")
        os.write(self.secret_fd, self.secret)
        self.events = Events()
        self.server = Rendezvous("127.0.0.1", secret=self.secret, job="job", events=self.events)
        self.rendezvous = RendezvousEndpoint(
            kind="hora",
            address="127.0.0.1",
            port=self.server.port,
            secret_file=f"/proc/self/fd/{self.secret_fd}",
            job="job",
        )
        self.clients: list[ControlClient] = []

    def connect(self, rank: int, *, worker: int = -1) -> ControlClient:
        client = ControlClient.connect(self.rendezvous, name=f"rank {rank}", timeout_s=LIMIT_S, worker=worker)
        self.clients.append(client)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.close()
        os.close(self.secret_fd)


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    yield place
    place.close()


def gather(client: ControlClient, rank: int, size: int, key: str = "k", limit_s: float = LIMIT_S) -> list[bytes]:
    return list(client.gather(key, b"from %d" % rank, rank=rank, size=size, timeout_s=limit_s).members.values())


def test_repeated_allgathers_under_one_key(place: Place):
    clients = [place.connect(rank) for rank in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            got = list(pool.map(lambda rank: gather(clients[rank], rank, 4), range(4)))
            assert got == [[b"from 0", b"from 1", b"from 2", b"from 3"]] * 4


def test_one_client_serves_many_threads(place: Place):
    client = place.connect(0)
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(client.get, f"key {i}", timeout_s=LIMIT_S) for i in range(4)]
        totals = list(pool.map(lambda _: client.add("counter", 1), range(50)))
        for i in range(4):
            client.set(f"key {i}", b"value %d" % i)
        assert [future.result() for future in waiting] == [b"value %d" % i for i in range(4)]
    assert sorted(totals) == list(range(1, 51))


def test_key_value_operations(place: Place):
    client = place.connect(0)
    client.set("a", b"\x00\xff")
    assert client.get("a", timeout_s=1) == b"\x00\xff"
    assert client.check(["a"])
    assert not client.check(["a", "b"])
    assert client.delete("a")
    assert not client.delete("a")
    assert client.add("n", 5) == 5
    assert client.add("n", -2) == 3


def test_a_payload_of_many_frames_arrives_complete(place: Place):
    client, value = place.connect(0), os.urandom(5_000_001)
    client.set("big", value)
    assert client.get("big", timeout_s=LIMIT_S) == value


def test_a_get_that_times_out_names_the_key(place: Place):
    with pytest.raises(TimeoutError, match=r"Timed out waiting for key 'never'.*Timeout after 0\.2 seconds"):
        place.connect(0).get("never", timeout_s=0.2)


def test_an_allgather_that_times_out_names_the_missing_ranks(place: Place):
    with pytest.raises(TimeoutError, match=r"ranks \[0, 2\] are missing"):
        gather(place.connect(1), 1, 3, limit_s=0.2)


def test_a_failed_allgather_leaves_its_key_usable(place: Place):
    one, two = place.connect(0), place.connect(1)
    with pytest.raises(TimeoutError):
        gather(one, 0, 2, limit_s=0.1)
    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(lambda pair: gather(pair[1], pair[0], 2), enumerate((one, two))))
    assert got == [[b"from 0", b"from 1"]] * 2


def test_ranks_that_disagree_about_the_size_get_an_error(place: Place):
    one, two = place.connect(0), place.connect(1)
    with ThreadPoolExecutor(2) as pool:
        for waiting in [pool.submit(gather, one, 0, 3), pool.submit(gather, two, 1, 2)]:
            with pytest.raises(HorovodInternalError, match="does not fit"):
                waiting.result(LIMIT_S)


def test_the_death_of_a_rank_ends_the_wait_for_it(place: Place):
    survivor = place.connect(0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gather, survivor, 0, 2)
        survivor.set("I have", b"begun")
        place.server.worker_exited(1, "was killed by signal 9", failed=True)
        with pytest.raises(HorovodInternalError, match="rank 1 was killed by signal 9"):
            waiting.result(LIMIT_S)
    with pytest.raises(HorovodInternalError, match="rank 1 was killed"):
        gather(survivor, 0, 2)
    with pytest.raises(HorovodInternalError, match="rank 1 was killed"):
        survivor.get("what it would have set", timeout_s=LIMIT_S)


def test_a_broken_connection_ends_the_wait_for_its_rank(place: Place):
    survivor, victim = place.connect(0), place.connect(1)
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(gather, survivor, 0, 2), pool.submit(gather, victim, 1, 2)]:
            future.result(LIMIT_S)
        waiting = pool.submit(gather, survivor, 0, 2)
        # The victim's gather might otherwise be processed after its shutdown.
        wait_until("the survivor's gather has come", lambda: place.server._gathers)
        victim._connection.shutdown()
        with pytest.raises(HorovodInternalError, match="rank 1 closed its connection"):
            waiting.result(LIMIT_S)


def test_notices_reach_listeners_registered_before_and_after(place: Place):
    client, early = place.connect(0), queue.SimpleQueue()
    client.on_notice(early.put)
    place.server.worker_exited(1, "ended with exit code 3", failed=True)
    expected = {"notice": "lost", "rank": 1, "generation": -1, "how": "ended with exit code 3"}
    assert early.get(timeout=LIMIT_S) == expected
    late = queue.SimpleQueue()
    client.on_notice(late.put)
    assert late.get(timeout=LIMIT_S) == expected
    client.close()
    assert late.get(timeout=LIMIT_S)["notice"] == "closed"


def test_results_errors_and_lines_reach_the_controller(place: Place):
    client = place.connect(3, worker=3)
    assert place.events.next() == ("joined", 3)
    client.send_result(b"42")
    assert place.events.next() == ("returned", 3, b"42")
    client.say("hello")
    assert place.events.next() == ("on_log_line", 3, "hello")
    client.send_error(type_name="E", message="m" * 10**6, traceback="t" * 10**6, consequence=True, pickled=b"p")
    name, worker, report = place.events.next()
    assert (name, worker, report.type, report.consequence, report.data) == (
        "raised",
        3,
        "E",
        True,
        b"p",
    )
    client._connection.shutdown()
    assert place.events.next() == ("lost", 3)


def test_long_errors_keep_both_ends_in_any_script(place: Place):
    client = place.connect(3, worker=3)
    place.events.next()
    for letter in ("x", "語", "🎉", '"'):
        text = f"first line\n{letter * 100_000}\nlast line"
        client.send_error(type_name="E", message=text, traceback=text, consequence=False)
        report = place.events.next()[2]
        for told in (report.message, report.traceback):
            assert told.startswith(f"first line\n{letter}")
            assert told.endswith(f"{letter}\nlast line")
            assert "characters …]" in told


def test_thousands_of_deaths_fit_into_one_message(place: Place):
    survivor = place.connect(0)
    for rank in range(1, 3000):
        place.server.worker_exited(rank, "ended with exit code 1, and with many more words", failed=True)
    with pytest.raises(HorovodInternalError, match=r"rank 1 ended .* and 2983 others"):
        gather(survivor, 0, 3000)


def test_a_polite_leaver_is_not_lost(place: Place):
    place.connect(0, worker=0).close()
    place.connect(1, worker=1).close()
    assert [place.events.next(), place.events.next()] == [("joined", 0), ("joined", 1)]
    assert place.events.seen.empty()


def test_survivors_get_the_next_world_and_others_get_none(place: Place):
    clients = {worker: place.connect(worker, worker=worker) for worker in (0, 1)}
    worlds = {w: World(rank=w, size=2, local_rank=w, local_size=2, worker=w, hostname=f"h{w}") for w in (0, 1)}
    with ThreadPoolExecutor(2) as pool:
        waiting = {w: pool.submit(clients[w].next_world, worlds[w], timeout_s=LIMIT_S) for w in (0, 1)}
        heard = {place.events.next() for _ in range(4)}
        assert heard >= {("waiting", 0, 0), ("waiting", 1, 0)}
        place.server.publish(1, {1: World(rank=0, size=1, generation=1, rendezvous=place.rendezvous)})
        assert waiting[0].result(LIMIT_S) is None
        world = waiting[1].result(LIMIT_S)
    assert (world.rank, world.size, world.generation, world.worker, world.hostname) == (0, 1, 1, 1, "h1")
    assert world.rendezvous == place.rendezvous


def test_stale_news_of_an_earlier_generation_is_ignored(place: Place):
    """Worker 1 was rank 1 and died; worker 2 now has its rank."""
    first, dead = place.connect(0), place.connect(1)
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(gather, first, 0, 2), pool.submit(gather, dead, 1, 2)]:
            future.result(LIMIT_S)
        place.server.publish(1, {w: World(rank=r, size=2, generation=1) for w, r in ((0, 0), (2, 1))})
        waiting = pool.submit(gather, first, 0, 2, "1/k")
        first.set("it waits", b"")
        place.server.worker_exited(1, "was killed by signal 9", failed=True)
        dead._connection.shutdown()
        assert gather(place.connect(1), 1, 2, "1/k") == [b"from 0", b"from 1"]
        assert waiting.result(LIMIT_S) == [b"from 0", b"from 1"]


def test_a_wrong_secret_is_a_clear_error(place: Place):
    os.pwrite(place.secret_fd, new_secret(), 0)
    with pytest.raises(AuthenticationError, match=r"127\.0\.0\.1:\d+, the rendezvous of job job"):
        place.connect(0)


def test_an_unreadable_secret_is_a_clear_error(place: Place):
    rendezvous = RendezvousEndpoint(
        kind="hora", address="127.0.0.1", port=1, secret_file="/proc/self/fd/99999", job="job"
    )
    with pytest.raises(AuthenticationError, match="secret from /proc/self/fd/99999"):
        ControlClient.connect(rendezvous, name="rank 0", timeout_s=1)


def test_a_closed_port_is_a_clear_error(place: Place):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    rendezvous = RendezvousEndpoint(
        kind="hora", address="127.0.0.1", port=port, secret_file=place.rendezvous.secret_file, job="job"
    )
    with pytest.raises(ConnectionError, match="cannot reach the rendezvous of job job"):
        ControlClient.connect(rendezvous, name="rank 0", timeout_s=1)


def test_a_silent_server_is_a_timeout(place: Place):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        rendezvous = RendezvousEndpoint(
            kind="hora",
            address="127.0.0.1",
            port=mute.getsockname()[1],
            secret_file=place.rendezvous.secret_file,
            job="job",
        )
        with pytest.raises(TimeoutError, match=r"Timed out waiting for the rendezvous.*after 0\.2 seconds"):
            ControlClient.connect(rendezvous, name="rank 0", timeout_s=0.2)


def test_a_worker_that_was_cut_off_reconnects_and_repeats_its_requests(place: Place):
    client = place.connect(0, worker=7)
    assert place.events.next() == ("joined", 7)
    heard: queue.SimpleQueue[dict] = queue.SimpleQueue()
    client.on_notice(heard.put)
    with ThreadPoolExecutor(3) as pool:
        value = pool.submit(client.get, "late", timeout_s=LIMIT_S)
        world = pool.submit(client.next_world, World(elastic=True, worker=7, generation=0), timeout_s=LIMIT_S)
        assert place.events.next() == ("waiting", 7, 0)
        rendezvous = pool.submit(gather, client, 0, 2)
        wait_until("the gather is under way", lambda: place.server._gathers)
        client._connection.shutdown()
        assert {place.events.next() for _ in range(3)} == {("lost", 7), ("joined", 7), ("waiting", 7, 0)}
        with pytest.raises(HorovodInternalError, match="the connection to the launcher broke and was restored"):
            rendezvous.result(LIMIT_S)
        place.server.set("late", b"but whole")
        place.server.publish(1, {7: World(rank=3, size=4, worker=7, generation=1, rendezvous=place.rendezvous)})
        assert value.result(LIMIT_S) == b"but whole"
        found = world.result(LIMIT_S)
        assert found is not None
        assert found.rank == 3
    assert not client.closed
    place.server.notify({"notice": "hosts_updated", "timestamp": 1, "change": 2, "generation": 1})
    assert heard.get(timeout=LIMIT_S)["notice"] == "hosts_updated"
    client._connection.shutdown()
    assert heard.get(timeout=LIMIT_S)["notice"] == "hosts_updated", "what it may have missed"


def test_a_reconnect_before_the_old_connection_breaks_is_not_a_loss(place: Place):
    place.connect(0, worker=7)
    assert place.events.next() == ("joined", 7)
    again = place.connect(0, worker=7)  # the same name; the launcher has not noticed that the first one is broken
    assert place.events.next() == ("joined", 7)
    place.clients[0]._reopen = None
    place.clients[0]._connection.shutdown()
    wait_until("the first one is closed", lambda: place.clients[0].closed)
    again.set("still", b"here")
    again.close()
    assert place.events.seen.empty()


def test_the_end_of_the_server_ends_every_wait(place: Place):
    client = place.connect(0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.get, "never", timeout_s=LIMIT_S)
        client.set("it waits", b"")
        place.server.close()
        with pytest.raises(ConnectionError, match="has ended"):
            waiting.result(LIMIT_S)
    with pytest.raises(ConnectionError, match="has ended"):
        client.set("a", b"")


def test_idle_connections_are_closed(place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(acceptor, "HANDSHAKE_LIMIT_S", 0.1)
    with socket.create_connection(("127.0.0.1", place.server.port), timeout=LIMIT_S) as sock:
        assert sock.recv(1) == b""
    place.connect(0).close()
    assert "did not authenticate within 0.1 s" in caplog.text


def test_a_crowd_of_unauthenticated_connections_harms_only_itself(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(acceptor, "MAX_STRANGERS", 4)
    patient = socket.create_connection(
        ("127.0.0.1", place.server.port), timeout=LIMIT_S, source_address=("127.0.0.2", 0)
    )
    crowd = [socket.create_connection(("127.0.0.1", place.server.port), timeout=LIMIT_S) for _ in range(20)]
    try:
        assert crowd[0].recv(1) == b""
        place.connect(0).close()
        # The only pending connection from its address is still accepted, although it is the oldest.
        handshake = ClientHandshake(Credentials(place.secret, "job"))
        patient.sendall(handshake.hello)
        assert handshake.finish(patient.recv(handshake.answer_bytes, socket.MSG_WAITALL))
    finally:
        for sock in (patient, *crowd):
            sock.close()


def test_no_thread_is_left():
    before = set(threading.enumerate())
    place = Place()
    place.connect(0)
    place.close()
    assert set(threading.enumerate()) <= before


def test_a_new_worker_waits_for_a_generation_with_a_slot_for_it(place: Place):
    place.server.publish(4, {0: World(size=1, generation=4, worker=0)})
    newcomer = place.connect(0, worker=7)
    mine = World(worker=7, generation=-1, elastic=True, rendezvous=place.rendezvous)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(newcomer.next_world, mine, timeout_s=LIMIT_S)
        assert [place.events.next(), place.events.next()] == [("joined", 7), ("waiting", 7, -1)]
        place.server.publish(5, {0: World(size=1, generation=5, worker=0)})  # not yet
        second = World(rank=1, size=2, local_rank=1, local_size=2, generation=6, worker=7, rendezvous=place.rendezvous)
        place.server.publish(6, {7: second})
        found = answer.result(LIMIT_S)
    assert found is not None
    assert (found.rank, found.size, found.generation, found.worker) == (1, 2, 6, 7)


def test_a_worker_of_an_old_generation_gets_no_world(place: Place):
    place.server.publish(3, {1: World(size=1, generation=3, worker=1)})
    assert place.connect(0, worker=0).next_world(World(worker=0, generation=1), timeout_s=LIMIT_S) is None


def test_a_dropped_worker_is_rejected(place: Place):
    """A host that was cut off returns after its workers' world has ended."""
    cut_off = place.connect(2, worker=2)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(cut_off.next_world, World(worker=2, generation=0), timeout_s=LIMIT_S)
        assert [place.events.next(), place.events.next()] == [("joined", 2), ("waiting", 2, 0)]
        place.server.reject(2)
        assert answer.result(LIMIT_S) is None
    place.server.publish(1, {2: World(size=1, generation=1, worker=2)})
    assert cut_off.next_world(World(worker=2, generation=0), timeout_s=LIMIT_S) is None
    with pytest.raises(HorovodInternalError, match="worker 2 was given up by the launcher"):
        place.connect(2, worker=2)


def test_a_worker_obeys_no_leader_of_an_earlier_term_than_the_one_that_started_it():
    """Two leaders may stand beside one another, and the name of the run may lead to the earlier one."""
    secret = new_secret()
    held = os.memfd_create("test-secret")
    os.write(held, secret)
    leaders = {term: Rendezvous("127.0.0.1", secret=secret, job="job", events=Events(), term=term) for term in (3, 5)}
    started_by_5 = RendezvousEndpoint(
        kind="hora", address="127.0.0.1", secret_file=f"/proc/self/fd/{held}", job="job", leaderless_s=60, term=5
    )
    with pytest.raises(ConnectionError, match="an outdated leader"):
        ControlClient.connect(replace(started_by_5, port=leaders[3].port), name="rank 0", timeout_s=0.5, worker=0)
    client = ControlClient.connect(replace(started_by_5, port=leaders[5].port), name="rank 0", timeout_s=20, worker=0)
    client.close()
    for leader in leaders.values():
        leader.close()
    os.close(held)


def test_an_answer_to_a_ping_updates_the_last_contact(place: Place):
    client = place.connect(0, worker=5)
    assert place.events.next() == ("joined", 5)
    client.set("key", b"value")
    before = place.server.heard_at(5)
    assert before is not None
    place.server.notify({"notice": "ping"})
    client.set("after", b"the ping")  # the reader answers the ping before it sees the reply to this
    client.set("after", b"the pong")
    later = place.server.heard_at(5)
    assert later is not None
    assert later > before
    assert place.server.heard_at(6) is None
