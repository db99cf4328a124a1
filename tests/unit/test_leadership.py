"""Leaders that follow one another: who leads, what the next one is told, and that nobody obeys one of the past.

No process.
"""

from __future__ import annotations

import os
import queue
import socket
import threading

import pytest

from hora.launch.agent.keeper import Keeper
from hora.launch.controller.agents import Agents
from hora.launch.controller.blacklist import Blacklist
from hora.launch.controller.members import Roster
from hora.launch.controller.policy import WorkerState
from hora.launch.controller.rendezvous import Rendezvous
from hora.launch.ha.leadership import Leadership, Over, View, next_step
from hora.launch.ha.relay import Relay
from hora.launch.ha.store import Office, open_store
from hora.launch.job import LeadershipLostError
from hora.net import sockets
from hora.net.client import ControlClient
from hora.net.keys import worker_key
from hora.net.secret_file import HeldSecret
from hora.net.wire import new_secret
from hora.world import RendezvousEndpoint
from waiting import wait_until

NOWHERE = open_store("etcd://127.0.0.1:1", {})
OVER = {"run": "b", "status": 7}


@pytest.mark.parametrize(
    ("view", "step"),
    [
        (View(leader=True), "follow"),
        (View(leader=False), "stand"),
        (View(leader=True, over=OVER), Over(7)),
        (View(leader=False, over=OVER, former="a"), Over(7)),
        (View(leader=False, over=OVER, former="b"), "stand"),  # it was over before this node came
        (View(leader=True, over=OVER, former="b"), "follow"),
    ],
)
def test_what_a_node_does_next(view: View, step: str | Over):
    assert next_step(view) == step


def test_a_leader_that_could_not_renew_in_time_knows_it_by_its_own_clock():
    leadership = Leadership(NOWHERE, Office(5, "1"), since_s=0.0)  # long ago
    with pytest.raises(LeadershipLostError):
        leadership.check()
    with pytest.raises(LeadershipLostError):
        leadership.save("state", {})


def test_a_keeper_refuses_orders_of_a_leader_of_the_past():
    place = {"node": 0, "name": "a", "slots": 1}
    keeper = Keeper(place, new_secret(), NOWHERE, leaderless_s=60, orphaned_s=60, poll_s=60, parent=1)
    obeyed: list[bytes] = []
    keeper._order = obeyed.append  # type: ignore[method-assign]
    keeper._term = 7
    messages: queue.SimpleQueue = queue.SimpleQueue()
    for message in (
        ({"op": "in", "term": 6}, b"old"),
        ({"op": "in", "term": 7}, b"new"),
        ({"op": "bye", "term": 6}, b""),
    ):
        messages.put(message)
    messages.put(None)
    keeper._obey(messages, "127.0.0.1")
    assert obeyed == [b"new"]
    assert not keeper._over.is_set()
    keeper._relay.close()


def test_one_keeper_of_a_node_at_a_time_holds_its_workers():
    place, limits = (
        {"node": 0, "name": "a", "slots": 1},
        {"leaderless_s": 60, "orphaned_s": 60, "poll_s": 60, "parent": -1},
    )
    claim = f"unit-{os.getpid()}"
    first, second, orphan = (Keeper(place, new_secret(), NOWHERE, **limits, claim=claim) for _ in range(3))
    assert first._holds_claim()
    assert first._holds_claim()
    assert not second._holds_claim()
    assert orphan.run() is None, "nobody is left for whom it could wait"
    first._over.set()
    assert first.run() is None
    assert second._holds_claim()
    second._over.set()
    second.run()


def test_a_node_that_is_new_to_the_next_leader_has_a_new_name():
    """Its name may be that of a node whose workers are gone with it."""
    agents = Agents(("127.0.0.1", 0), new_secret(), num_nodes=2, silence_limit_s=60, term=2, names=["a", "a-1"])
    try:
        assert agents._new_name("a", 0) == "a-0"
        assert agents._new_name("a", 1) == "a-1-2"
        assert agents._new_name("b", 1) == "b"
    finally:
        agents.dismiss(0)


def test_the_next_leader_knows_the_workers():
    roster = Roster()
    for slot in range(3):
        roster.add("a", slot, WorkerState.READY, 1.0)
    roster.begin(0, {0, 1}, 2.0)
    roster.joined(0)
    roster.set(1, WorkerState.FAILED, 3.0)
    roster.write_off(1)
    taken_over = Roster()
    taken_over.restore(roster.saved(), 100.0)
    assert [(w.number, w.host, w.slot, w.state, w.generation) for w in taken_over] == [
        (w.number, w.host, w.slot, w.state, w.generation) for w in roster
    ]
    first, failed, newcomer = taken_over
    assert newcomer.lost_at is None, "it has never connected"
    assert first.lost_at == 100.0, "it is cut off until it connects"
    assert (failed.written_off, failed.exited, failed.lost_at) == (True, True, None)
    assert taken_over.add("a", 3, WorkerState.STARTING, 101.0) == 3, "numbers are not used again"


def test_the_next_leader_knows_barred_places():
    blacklist = Blacklist((10, 100), lambda: 0.0)
    blacklist.bar(("a", None), 0.0)  # for 20 s
    blacklist.bar(("b", 1), 0.0)
    taken_over = Blacklist((10, 100), lambda: 0.0)
    taken_over.restore(blacklist.saved(5.0), 1000.0)
    assert taken_over.is_host_barred("a", 1014.0)
    assert not taken_over.is_host_barred("a", 1016.0)
    assert taken_over.is_barred("b", 1, 1014.0)
    assert taken_over.bar(("a", None), 1016.0) == 1016.0 + 40.0, "the second time lasts longer"


class Nobody:
    """Implements RendezvousEvents."""

    def __getattr__(self, name: str):
        return lambda *args: None


def test_a_worker_comes_back_to_the_next_leader_and_never_to_the_last():
    secret, relay = new_secret(), Relay()
    held = HeldSecret(worker_key(secret, 0))
    leaders = {
        term: Rendezvous("127.0.0.1", secret=secret, job="job", events=Nobody(), term=term) for term in (5, 3, 6)
    }
    rendezvous = RendezvousEndpoint(
        kind="hora", address="127.0.0.1", relay=relay.name, secret_file=held.path, job="job", worker=0, return_s=60
    )
    relay.lead_to(("127.0.0.1", leaders[5].port))
    client = ControlClient.connect(rendezvous, name="rank 0", timeout_s=30, worker=0)
    for leader in leaders.values():
        leader.set("hora/who", b"?")
    leaders[6].set("hora/who", b"the next")
    relay.lead_to(None)
    leaders[5].close()
    relay.lead_to(("127.0.0.1", leaders[3].port))
    wait_until("the leader of the past has heard it", lambda: leaders[3].heard_at(0) is not None)
    relay.lead_to(("127.0.0.1", leaders[6].port))
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


def test_a_relay_leads_to_the_present_leader_and_cuts_what_led_to_the_last():
    relay = Relay()
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    for server, word in zip(servers, (b"old", b"new"), strict=True):
        threading.Thread(target=echo, args=(server, word), daemon=True).start()
    old, new = (server.getsockname() for server in servers)
    relay.lead_to(old)
    with sockets.open_socket(relay.name, limit_s=30) as first:
        assert first.recv(3) == b"old"
        relay.lead_to(None)
        assert first.recv(3) == b"", "it led to a leader that is none any more"
    with sockets.open_socket(relay.name, limit_s=30) as second:
        relay.lead_to(new)  # meanwhile it waits
        assert second.recv(3) == b"new"
    wait_until("nothing is kept", lambda: not relay._connections)
    relay.close()
    for server in servers:
        server.close()
