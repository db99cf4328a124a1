"""Elections: the leader, the state that the next leader reads, and rejected messages of former leaders.

No process is started.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import pytest

from hora.launch.agent.protocol import Exited, Output, Started, Terminate
from hora.launch.controller.agents import Agents
from hora.launch.controller.hosts import ElasticSpec, Hosts
from hora.launch.controller.policy import Facts, Limits, WorkerState
from hora.launch.ha.following import LeaderLink, Relay, _earlier_process
from hora.launch.ha.leadership import Leadership, next_step, open_store
from hora.launch.ha.store import AuthenticatedStore, Contents, LeaderTerm, StoreError
from hora.launch.job import LeadershipLostError
from hora.net import sockets
from hora.net.client import ControlClient
from hora.net.keys import HeldSecret
from hora.net.rendezvous import Rendezvous
from hora.net.wire import new_secret, worker_key
from hora.world import RendezvousEndpoint
from waiting import wait_until

NOWHERE = open_store("etcd://127.0.0.1:1", {})
OVER = {"run": "b", "status": 7}


@pytest.mark.parametrize(
    ("term", "values", "former", "step"),
    [
        (1, {}, "", "follow"),
        (0, {}, "", "stand"),
        (1, {"over": OVER}, "", 7),
        (0, {"over": OVER}, "a", 7),
        (0, {"over": OVER}, "b", "stand"),  # the run had ended before this node joined
        (1, {"over": OVER}, "b", "follow"),
    ],
)
def test_the_next_step_of_a_node(term: int, values: dict, former: str, step: str | int):
    assert next_step(Contents(term, values), former) == step


def test_a_leader_that_failed_to_renew_in_time_steps_down_by_its_own_clock():
    leadership = Leadership(NOWHERE, LeaderTerm(5, "1"), since_s=0.0)  # expired long ago
    with pytest.raises(LeadershipLostError):
        leadership.check()
    with pytest.raises(LeadershipLostError):
        leadership.put("state", {})


def link(**rest) -> LeaderLink:
    node = {"node": 0, "name": "a", "slots": 1}
    limits = {"leaderless_s": 60, "orphaned_s": 60, "poll_s": 60}
    return LeaderLink(node, new_secret(), NOWHERE, **limits, orphaned=lambda: True, **rest)


def test_an_agent_reports_its_state_to_the_next_leader_and_obeys_it():
    """The state is its running workers, output that no leader has received, and exits of others."""
    followed, secret = link(), new_secret()
    for report in (Started(1, 11), Output(1, "stdout", b"words"), Started(2, 12), Exited(2, 3, "why")):
        followed.send(report)
    followed._secret, followed._run = secret, "run"
    leader = Agents(("127.0.0.1", 0), secret, num_nodes=1, silence_limit_s=60, nonce="run", term=7, names=["a"])
    threading.Thread(target=followed._serve, args=(7, "127.0.0.1", leader.port), daemon=True).start()
    leader.wait(30)
    assert leader.workers_at("a") == {1, 2}
    events = Noted()
    leader.agent("a").look_after(events, {1, 2})
    wait_until("the state has come", lambda: events.ends)
    assert events.said == b"words"
    assert [(ended.worker, ended.code, ended.reason) for ended in events.ends] == [(2, 3, "why")]
    leader.agent("a").terminate([1, 2], grace_s=1.0)
    orders: list[object] = []
    wait_until("the order has come", lambda: orders.extend(followed.receive()) or any(map(is_order, orders)))
    assert [order for order in orders if is_order(order)] == [Terminate([1, 2], 1.0)]
    followed.close()
    leader.dismiss(0)


def is_order(message: object) -> bool:
    return isinstance(message, Terminate)


class Noted:
    """Implements LaunchEvents."""

    def __init__(self) -> None:
        self.said, self.ends = b"", []

    def started(self, worker) -> None: ...

    def output(self, worker, stream, data) -> None:
        self.said += data

    def exited(self, ended) -> None:
        self.ends.append(ended)


def test_an_agent_waits_for_the_end_of_an_earlier_one_of_its_node():
    ended, waiting = threading.Event(), link(preceded=lambda: not ended.is_set())
    waiting._orphaned, waiting._orphaned_s, waiting._leaderless_s, waiting._poll_s = lambda: False, 0.0, 0.0, 0.01
    waiting.start()
    waiting._thread.join(0.5)
    assert waiting._thread.is_alive()
    ended.set()
    waiting._thread.join(30)
    assert not waiting._thread.is_alive(), "nobody has led the job for zero seconds"
    orphan = link(preceded=lambda: True)
    orphan._follow()  # no process is left for which it could wait
    for one in (waiting, orphan):
        one.receive()
        assert one.gone
        one.close()


def test_only_earlier_processes_of_the_same_command_count(monkeypatch):
    parents = Path(f"/proc/{os.getppid()}/cmdline").read_text()[:-1].split("\0")
    monkeypatch.setattr(os, "getppid", os.getpid)  # as seen by a child of this process
    assert _earlier_process(parents)
    assert not _earlier_process([*parents, "of another job"])


class OneStore:
    """A store in memory that others can write to as well."""

    members, ttl_s = (("127.0.0.1", 1),), 600
    delete = renew = resign = None

    def __init__(self):
        self.values, self.term, self.version, self.evicted = {}, 0, "", []

    def __str__(self):
        return "memory"

    def read(self):
        return Contents(self.term, self.values, self.version)

    def evict(self, leader_version):
        self.evicted.append(leader_version)

    def put(self, key, value, *, term, lasting_s=0):
        self.values[key] = json.loads(json.dumps(value))
        return True

    def lead(self, name):
        self.term += 1
        self.values["leader"] = {"name": name}


@pytest.mark.parametrize(
    "forged",
    [{}, {"run": "x", "status": 0}, {"text": "{}", "mac": ""}, {"text": "{}", "mac": "é"}, {"text": 1, "mac": []}],
)
def test_forged_entries_of_the_store_are_named_and_ignored(forged, caplog):
    raw = OneStore()
    store, other = AuthenticatedStore(raw, b"s" * 32), AuthenticatedStore(raw, b"o" * 32)
    store.lead("node.0")
    store.put("state", {"run": "r", "n": [1.5, None]}, term=1)
    assert store.read() == Contents(1, {"leader": {"name": "node.0"}, "state": {"run": "r", "n": [1.5, None]}})
    raw.values["over"] = forged
    raw.values["where"] = raw.values["state"]  # an authentic entry under another key
    other.put("stray", {"run": "another job's"}, term=1)
    for _ in range(3):
        assert set(store.read().values) == {"leader", "state"}
    for key in ("over", "where", "stray"):
        assert caplog.text.count(f"the entry '{key}' in the store (HORA_STORE: memory) was not written") == 1
    raw.values["leader"] = {"name": "me"}
    for raw.version in ("2", "2", "3"):  # no leader has restored its own entry yet
        with pytest.raises(StoreError, match=r"the entry 'leader' in the store .* remove it"):
            store.read()
    store.ttl_s = 0
    assert store.read().term == 0
    assert raw.evicted == ["3"]


def test_a_node_unknown_to_the_next_leader_gets_a_new_name():
    """Its name may be that of a lost node whose workers are lost too."""
    agents = Agents(("127.0.0.1", 0), new_secret(), num_nodes=2, silence_limit_s=60, term=2, names=["a", "a-1"])
    try:
        assert agents._new_name("a", 0) == "a-0"
        assert agents._new_name("a", 1) == "a-1-2"
        assert agents._new_name("b", 1) == "b"
    finally:
        agents.dismiss(0)


def test_the_next_leader_restores_the_workers():
    facts = Facts()
    for slot in range(3):
        facts.add("a", slot, WorkerState.READY, 1.0)
    facts.begin({0, 1}, 2.0)
    facts.workers[0].joined = True
    facts.workers[1].enter(WorkerState.FAILED, 3.0)
    facts.workers[1].written_off = True
    taken_over = Facts()
    taken_over.restore(facts.saved(), 100.0)
    assert (taken_over.generation, taken_over.num_resets) == (0, 0)
    assert [(w.number, w.host, w.slot, w.state, w.generation) for w in taken_over.workers] == [
        (w.number, w.host, w.slot, w.state, w.generation) for w in facts.workers
    ]
    first, failed, newcomer = taken_over.workers
    assert newcomer.lost_at is None, "it has never connected"
    assert first.lost_at == 100.0, "it is cut off until it connects"
    assert (failed.written_off, failed.exited, failed.lost_at) == (True, True, None)
    assert taken_over.add("a", 3, WorkerState.STARTING, 101.0) == 3, "numbers are not used again"


def test_the_next_leader_restores_barred_hosts():
    spec = ElasticSpec(limits=Limits(num_proc=1, min_num_proc=1), cooldown_range=(10, 100))
    hosts = Hosts(spec, lambda: 0.0)
    hosts.bar_place(("a", None), 0.0)  # for 20 s
    hosts.bar_place(("b", 1), 0.0)
    taken_over = Hosts(spec, lambda: 0.0)
    taken_over.restore(hosts.saved(5.0), 1000.0)
    assert taken_over.is_barred("a", None, 1014.0)
    assert not taken_over.is_barred("a", None, 1016.0)
    assert taken_over.is_barred("b", 1, 1014.0)
    assert taken_over.bar_place(("a", None), 1016.0) == 1016.0 + 40.0, "the second time lasts longer"


class Nobody:
    """Implements RendezvousEvents by ignoring all of them."""

    def __getattr__(self, name: str):
        return lambda *args: None


def test_a_worker_reconnects_to_the_next_leader_and_never_to_a_former_one():
    secret, relay = new_secret(), Relay()
    held = HeldSecret(worker_key(secret, 0))
    leaders = {
        term: Rendezvous("127.0.0.1", secret=secret, job="job", events=Nobody(), term=term) for term in (5, 3, 6)
    }
    rendezvous = RendezvousEndpoint(
        kind="hora", address="127.0.0.1", relay=relay.name, secret_file=held.path, job="job", worker=0, return_s=60
    )
    relay.set_target(("127.0.0.1", leaders[5].port))
    client = ControlClient.connect(rendezvous, name="rank 0", timeout_s=30, worker=0)
    for leader in leaders.values():
        leader.set("hora/who", b"?")
    leaders[6].set("hora/who", b"the next")
    relay.set_target(None)
    leaders[5].close()
    relay.set_target(("127.0.0.1", leaders[3].port))
    wait_until("the leader of the past has heard it", lambda: leaders[3].heard_at(0) is not None)
    relay.set_target(("127.0.0.1", leaders[6].port))
    assert client.get("hora/who", timeout_s=30) == b"the next"
    assert client._term == 6
    client.close()
    relay.close()
    held.close()
    for leader in leaders.values():
        leader.close()


def echo(server: socket.socket, word: bytes) -> None:
    while True:
        try:
            sock, _ = server.accept()
        except OSError:
            return
        sock.sendall(word)
        threading.Thread(target=sock.recv, args=(1,), daemon=True).start()


def test_a_relay_connects_to_the_current_leader_and_closes_connections_to_the_former():
    relay = Relay()
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    for server, word in zip(servers, (b"old", b"new"), strict=True):
        threading.Thread(target=echo, args=(server, word), daemon=True).start()
    old, new = (server.getsockname() for server in servers)
    relay.set_target(old)
    with sockets.open_socket(relay.name, limit_s=30) as first:
        assert first.recv(3) == b"old"
        relay.set_target(None)
        assert first.recv(3) == b"", "it led to a leader that is none any more"
    wait_until("it is gone", lambda: not relay._tasks.connections)
    with sockets.open_socket(relay.name, limit_s=30) as waiting:
        wait_until("it waits for a leader", lambda: relay._tasks.connections)
        relay.set_target(new)
        assert waiting.recv(3) == b"", "there is a leader now: try again"
    with sockets.open_socket(relay.name, limit_s=30) as second:
        assert second.recv(3) == b"new"
    wait_until("nothing is kept", lambda: not relay._tasks.connections)
    relay.close()
    for server in servers:
        server.close()
