"""torch's groups use the authenticated control connection as their store, instead of an open TCPStore."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hora.engine.rendezvous import ControlStore
from hora.errors import HorovodInternalError
from hora.net.client import ControlClient
from hora.net.rendezvous import Rendezvous
from hora.net.wire import new_secret
from hora.world import RendezvousEndpoint

BINARY = bytes(range(256)) * 3


class Events:
    """Ignores all events."""

    def __getattr__(self, name):
        return lambda *arguments: None


@pytest.fixture
def rendezvous():
    secret = new_secret()
    descriptor = os.memfd_create("secret")
    os.write(descriptor, secret)
    server = Rendezvous("127.0.0.1", secret=secret, job="job", events=Events())
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    try:
        yield RendezvousEndpoint(kind="hora", address="127.0.0.1", port=server.port, secret_file=path, job="job")
    finally:
        server.close()
        os.close(descriptor)


@pytest.fixture
def client(rendezvous):
    made = ControlClient.connect(rendezvous, name="test", timeout_s=10)
    yield made
    made.close()


def test_the_store_behaves_as_torch_expects(client):
    store = ControlStore(client, prefix="a", timeout_s=10)
    assert isinstance(store, dist.Store)
    store.set("key", BINARY)
    assert store.get("key") == BINARY
    assert ControlStore(client, prefix="b", timeout_s=10).check(["key"]) is False
    assert store.check(["key"]) is True
    assert store.check(["key", "other"]) is False
    assert [store.add("count", 3), store.add("count", -1)] == [3, 2]
    store.wait(["key", "count"], timedelta(seconds=1))
    assert store.compare_set("turn", "", "first") == b"first"
    assert store.compare_set("turn", "nobody", "second") == b"first"
    assert store.compare_set("turn", b"first", "second") == b"second"
    assert store.delete_key("key") is True
    assert store.delete_key("key") is False
    store.multi_set(["x", "y"], ["1", b"\x00"])
    assert store.multi_get(["x", "y"]) == [b"1", b"\x00"]
    deep = dist.PrefixStore("deep", store)
    assert deep.has_extended_api() is False
    deep.set("key", "1")
    assert store.get("deep/key") == b"1"
    assert deep.delete_key("key") is True
    if hasattr(deep, "clone"):
        copy = deep.clone()
        copy.set("key", "2")
        assert deep.get("key") == b"2"


def test_waiting_for_a_key_ends_at_the_limit_or_by_the_liveness_check(client):
    def check_alive():
        raise HorovodInternalError("rank 1 is dead")

    with pytest.raises(TimeoutError, match=r"waited 0\.2 s for the key 'a/missing'"):
        ControlStore(client, prefix="a", timeout_s=0.2).get("missing")
    with pytest.raises(HorovodInternalError, match="rank 1 is dead"):
        ControlStore(client, prefix="a", timeout_s=60, check_alive=check_alive).get("missing")


@pytest.mark.ranks(3)
def test_a_gloo_group_can_use_the_store(place, rendezvous):
    client = ControlClient.connect(rendezvous, name=f"rank {place.rank}", timeout_s=30)
    store = ControlStore(client, prefix="group", timeout_s=30)
    group = dist.ProcessGroupGloo(store, place.rank, place.size, timedelta(seconds=30))
    tensor = torch.arange(1000.0) * (place.rank + 1)
    group.allreduce([tensor]).wait()
    del group
    client.close()
    assert torch.equal(tensor, torch.arange(1000.0) * 6)
