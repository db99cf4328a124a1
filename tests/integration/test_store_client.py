"""Clients of a real etcd and of a minimal Kubernetes API server: terms and leases, passwords, tokens and TLS."""

from __future__ import annotations

import base64
import contextlib
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lease_server import certificates, lease_server
from test_job_store import Etcd

from hora.launch.ha.etcd import Etcd as EtcdStore
from hora.launch.ha.kubernetes import LeaseStore
from hora.launch.ha.leadership import Leadership, open_store
from hora.launch.ha.store import StoreError
from hora.launch.job import LeadershipLostError
from hora.launch.providers.kubernetes import ManifestRequest, manifests
from waiting import wait_until

needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd (Debian: etcd-server)")
REQUEST = ManifestRequest(name="train", image="i", command=("true",), min_nodes=1, any_leader=True)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    made = Etcd(tmp_path_factory.mktemp("etcd"))
    made.start()
    made.wait(EtcdStore.from_url(made.url))
    yield made
    made.stop()


@pytest.fixture
def api(tmp_path):
    certificates(tmp_path)
    with lease_server(tmp_path, manifests("job", REQUEST)) as server:
        yield server


@pytest.fixture(params=[pytest.param("etcd", marks=needs_etcd), "kubernetes"])
def url(request) -> tuple[str, dict[str, str]]:
    """The address of a store, and the variables that it needs."""
    if request.param == "etcd":
        return f"{request.getfixturevalue('etcd').url}/{request.node.name}", {}
    server = request.getfixturevalue("api")
    return server.url(REQUEST.state), server.environment


def with_ttl(url, seconds):
    """Set the lease's duration; a request may take a third of it."""
    address, environment = url
    return f"{address}{'&' if '?' in address else '?'}ttl={seconds}", environment


def test_only_the_current_leader_can_write(url):
    store, other = (open_store(*url).below("job") for _ in range(2))
    first = store.lead("a")
    assert first is not None
    assert other.lead("b") is None
    assert store.put("state", {"generation": 1}, term=first.term)
    assert other.read().term == first.term
    store.resign(first)
    assert other.read().term == 0
    later = other.lead("b")
    assert later is not None
    assert later.term > first.term
    assert not store.put("state", {"generation": 2}, term=first.term), "a leader of the past has written"
    assert not store.delete("state", term=first.term)
    assert not store.renew(first)
    with contextlib.suppress(StoreError):
        store.resign(first)
    assert store.read().term == later.term
    assert store.read().values["state"] == {"generation": 1}
    assert other.put("state", {"generation": 3}, term=later.term)
    assert other.put("where", {"port": 1}, term=later.term, lasting_s=60)
    assert other.delete("where", term=later.term)
    assert {key for key in store.read().values if key != "leader"} == {"state"}
    other.resign(later)


def test_a_lease_expires_unless_it_is_renewed(url):
    store, other = (open_store(*with_ttl(url, 3)).below("job") for _ in range(2))
    leader = store.lead("a")
    assert leader is not None
    assert store.renew(leader)
    wait_until("the leader is gone", lambda: other.read().term == 0, 60)
    assert other.lead("b") is not None
    assert not store.renew(leader)


def test_a_leader_is_notified_when_it_loses_its_lease(url):
    store = open_store(*url).below("job")
    leadership = Leadership.won(store, "a")
    assert leadership is not None
    assert Leadership.won(store, "b") is None
    lost = []
    leadership.watch(lambda: lost.append(True))
    leadership.put("state", {"x": 1})
    store.resign(leadership._leader)
    wait_until("it has heard", lambda: lost == [True], 60)
    with pytest.raises(LeadershipLostError):
        leadership.check()
    with pytest.raises(LeadershipLostError):
        leadership.put("state", {"x": 2})
    leadership.resign()
    again = Leadership.won(store, "b")
    assert again is not None
    assert again.term > leadership.term
    again.resign()


def test_one_of_many_concurrent_candidates_is_elected(url):
    stores = [open_store(*with_ttl(url, 60)).below("job") for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        offices = [leader for leader in pool.map(lambda store: store.lead("x"), stores) if leader is not None]
    assert len(offices) == 1
    stores[0].resign(offices[0])


def test_evict_removes_a_leaders_entry_unless_it_has_changed(url):
    first, second = (open_store(*with_ttl(url, 60)).below("job") for _ in range(2))
    leader = first.lead("a")
    assert leader is not None
    second.evict("1")
    assert second.read().term == leader.term
    assert first.renew(leader)
    second.evict(second.read().leader_version)
    assert second.read().term == 0
    assert not first.renew(leader)
    assert second.lead("b") is not None


# ---- Kubernetes ---------------------------------------------------------------------------------------------------


def test_concurrent_writes_to_a_secret_are_serialized(api):
    store = open_store(api.url(REQUEST.state), api.environment).below("job")
    leader = store.lead("a")
    assert leader is not None
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda number: store.put(f"key{number}", {"x": number}, term=leader.term), range(8)))
    assert store.read().values == {"leader": {"name": "a"}} | {f"key{number}": {"x": number} for number in range(8)}


def test_a_leader_whose_lease_expires_between_read_and_write_is_rejected(api, monkeypatch):
    store, other = (open_store(api.url(REQUEST.state, "ttl=3"), api.environment).below("job") for _ in range(2))
    leader = store.lead("a")
    assert leader is not None
    assert store.put("state", {"x": 1}, term=leader.term)
    replace, later = LeaseStore._replace, []

    def stopped(self, *arguments):
        if self is store and not later:
            wait_until("the lease has expired", lambda: other.read().term == 0, 60)
            later.append(other.lead("b"))
        return replace(self, *arguments)

    monkeypatch.setattr(LeaseStore, "_replace", stopped)
    assert not store.put("state", {"x": 2}, term=leader.term)
    assert later[0] is not None
    assert other.read().values["state"] == {"x": 1}


def test_a_lease_of_another_job_is_rejected(api):
    open_one = lambda job: open_store(api.url(REQUEST.state), api.environment).below(job)  # noqa: E731
    first, second = open_one("one"), open_one("two")
    leader = first.lead("a")
    assert leader is not None
    assert first.put("over", {"run": "x"}, term=leader.term)
    with pytest.raises(StoreError, match="another job uses the Lease train-hora-state"):
        second.read()
    first.resign(leader)
    assert second.lead("b") is not None
    assert second.read().values == {"leader": {"name": "b"}}


def test_a_secret_that_somebody_else_has_written_is_an_error_of_the_store(api):
    store = open_store(api.url(REQUEST.state), api.environment).below("job")
    leader = store.lead("a")
    assert leader is not None
    api.objects["secrets", REQUEST.state]["data"]["term"] = base64.b64encode(b"text").decode()
    calls = [lambda: store.put("x", {}, term=leader.term), lambda: store.delete("x", term=leader.term)]
    store.resign(leader)
    for call in (*calls, lambda: store.lead("b")):
        with pytest.raises(StoreError, match="the `term` of the Secret train-hora-state is no number"):
            call()


def test_errors_of_the_api_server_are_reported(api, tmp_path):
    def read(name: str = REQUEST.state) -> None:
        open_store(api.url(name), api.environment).below("job").read()

    read()
    assert set(api.asked) == {"get leases", "get secrets"}
    api.rules.pop()
    with pytest.raises(StoreError, match=r"refuses this pod's service account: secrets .* is forbidden"):
        read()
    with pytest.raises(StoreError, match="is forbidden"):
        read("another")
    api.rules[:] = [{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get"]}]
    with pytest.raises(StoreError, match="there is no Lease another in default"):
        read("another")
    (api.account / "token").write_text("an old one")
    with pytest.raises(StoreError, match="refuses this pod's service account: Unauthorized"):
        read()
    (tmp_path / "elsewhere").mkdir()
    certificates(tmp_path / "elsewhere")
    (api.account / "ca.crt").write_text((tmp_path / "elsewhere" / "ca.crt").read_text())
    with pytest.raises(StoreError, match=r"does not answer at 127.0.0.1:.*certificate"):
        read()


# ---- etcd ---------------------------------------------------------------------------------------------------------


def ctl(etcd: Etcd, *words: str) -> None:
    command = ["etcdctl", "--endpoints", f"127.0.0.1:{etcd.port}", *words]
    subprocess.run(command, check=True, capture_output=True, timeout=60, env={"ETCDCTL_API": "3", "PATH": "/usr/bin"})


@needs_etcd
@pytest.mark.skipif(shutil.which("etcdctl") is None, reason="needs etcdctl (Debian: etcd-client)")
def test_etcd_with_a_password(tmp_path: Path):
    etcd = Etcd(tmp_path)
    etcd.start()
    try:
        etcd.wait(EtcdStore.from_url(etcd.url))
        ctl(etcd, "user", "add", "root:admin")
        ctl(etcd, "user", "grant-role", "root", "root")
        ctl(etcd, "role", "add", "hora")
        ctl(etcd, "role", "grant-permission", "hora", "--prefix=true", "readwrite", "/hora/")
        ctl(etcd, "user", "add", "trainer:p@ss w:rd")
        ctl(etcd, "user", "grant-role", "trainer", "hora")
        ctl(etcd, "auth", "enable")
        host = f"127.0.0.1:{etcd.port}"
        store = EtcdStore.from_url(f"etcd://trainer:p%40ss%20w%3Ard@{host}").below("job")
        leader = store.lead("a")
        assert leader
        assert store.put("state", {"x": 1}, term=leader.term)
        for url, words in (
            (f"etcd://trainer:wrong@{host}", "refuses user 'trainer'.*authentication failed"),
            (f"etcd://{host}", "refuses a client without a user"),
            (f"etcd://trainer:p%40ss%20w%3Ard@{host}/elsewhere", "permission denied.*role for /elsewhere/"),
        ):
            with pytest.raises(StoreError, match=words) as caught:
                EtcdStore.from_url(url).read()
            assert "wrong" not in str(caught.value)
            assert "p@ss" not in str(caught.value)
    finally:
        etcd.stop()


@needs_etcd
def test_tls_with_certificates_of_both_ends(tmp_path: Path):
    certificates(tmp_path)
    tls = ["--cert-file", f"{tmp_path}/server.crt", "--key-file", f"{tmp_path}/server.key"]
    tls += ["--client-cert-auth", "--trusted-ca-file", f"{tmp_path}/ca.crt"]
    etcd = Etcd(tmp_path, tls)
    etcd.start()
    try:
        own = f"?ca={tmp_path}/ca.crt&cert={tmp_path}/client.crt&key={tmp_path}/client.key"
        store = EtcdStore.from_url(etcd.url + own)
        etcd.wait(store)
        assert store.lead("a")
        with pytest.raises(StoreError, match="certificate"):
            EtcdStore.from_url(etcd.url).read()  # signed by an authority that this machine does not know
        with pytest.raises(StoreError):
            EtcdStore.from_url(f"{etcd.url}?ca={tmp_path}/ca.crt").read()  # no client certificate
    finally:
        etcd.stop()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://a", "must look like etcd://"),
        ("etcd://", "must look like etcd://"),
        ("etcd://a:x", "names a member 'a:x'"),
        ("etcd://a?tls=1", "but not tls"),
        ("etcd://a?ttl=0", "ttl= must lie in 1..600"),
        ("etcds://a?ca=/does/not/exist", "cannot be used"),
        ("kubernetes://", "must look like kubernetes://name"),
        ("kubernetes://a/b", "must look like kubernetes://name"),
        ("kubernetes://a?ca=b", "but not ca"),
        ("kubernetes://a?account=/does/not/exist", "for pods with a service account"),
    ],
)
def test_an_invalid_address_is_rejected(url: str, words: str):
    with pytest.raises(ValueError, match=words):
        open_store(url, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})


def test_an_address_is_parsed():
    store = EtcdStore.from_url("etcd://user:pa%2Fss@one,two:2380,[fd00::1]:2381/team/a?ttl=5")
    assert store.members == (("one", 2379), ("two", 2380), ("fd00::1", 2381))
    assert (store.user, store.password, store.prefix, store.ttl_s) == ("user", "pa/ss", "/team/a/", 5)
    assert "pa/ss" not in repr(store)


@needs_etcd
def test_the_doctor_examines_the_store(etcd: Etcd):
    from hora.cli.doctor import _store

    assert _store(etcd.url).level == "ok"
    missing = _store("etcd://127.0.0.1:1")
    assert missing.level == "problem"
    assert "127.0.0.1:1" in missing.text
