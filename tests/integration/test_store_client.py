"""What Hora asks of etcd, asked of a real one: terms, leases, passwords and TLS."""

from __future__ import annotations

import datetime
import ipaddress
import shutil
import subprocess
from pathlib import Path

import pytest
from test_job_store import Etcd

from hora.launch.agent.leadership import Leadership
from hora.launch.agent.store import Store, StoreError
from hora.launch.job import LeadershipLostError
from waiting import wait_until

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd (Debian: etcd-server)")


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    made = Etcd(tmp_path_factory.mktemp("etcd"))
    made.start()
    made.wait(Store.from_url(made.url))
    yield made
    made.stop()


def test_only_the_present_leader_writes(etcd: Etcd):
    store = Store.from_url(etcd.url).below("terms")
    first = store.grant(60)
    term = store.lead({"name": "a"}, first)
    assert term is not None
    assert store.lead({"name": "b"}, store.grant(60)) is None
    assert store.put("state", {"generation": 1}, term=term)
    store.revoke(first)
    assert store.get("leader") is None
    assert not store.put("state", {"generation": 2}, term=term), "a leader of the past has written"
    later = store.lead({"name": "b"}, store.grant(60))
    assert later is not None
    assert later > term
    assert not store.put("state", {"generation": 2}, term=term)
    assert not store.delete("state", term=term)
    found = store.get("state")
    assert found is not None
    assert found.value == {"generation": 1}
    assert store.put("state", {"generation": 3}, term=later)


def test_a_lease_that_is_not_renewed_ends(etcd: Etcd):
    store = Store.from_url(etcd.url).below("leases")
    lease = store.grant(1)
    assert store.lead({}, lease)
    assert store.renew(lease)
    wait_until("the leader is gone", lambda: store.get("leader") is None, 60)
    assert not store.renew(lease)


def test_a_leader_whose_lease_was_taken_hears_of_it(etcd: Etcd):
    store = Store.from_url(etcd.url).below("taken")
    leadership = Leadership.won(store, "a", 3)
    assert leadership is not None
    assert Leadership.won(store, "b", 3) is None
    lost = []
    leadership.lost = lambda: lost.append(True)
    leadership.save("state", {"x": 1})
    store.revoke(leadership._lease)
    wait_until("it has heard", lambda: lost == [True], 60)
    with pytest.raises(LeadershipLostError):
        leadership.check()
    with pytest.raises(LeadershipLostError):
        leadership.save("state", {"x": 2})
    leadership.resign()
    again = Leadership.won(store, "b", 3)
    assert again is not None
    assert again.term > leadership.term
    again.resign()


def ctl(etcd: Etcd, *words: str) -> None:
    command = ["etcdctl", "--endpoints", f"127.0.0.1:{etcd.port}", *words]
    subprocess.run(command, check=True, capture_output=True, timeout=60, env={"ETCDCTL_API": "3", "PATH": "/usr/bin"})


@pytest.mark.skipif(shutil.which("etcdctl") is None, reason="needs etcdctl (Debian: etcd-client)")
def test_a_password(tmp_path: Path):
    etcd = Etcd(tmp_path)
    etcd.start()
    try:
        etcd.wait(Store.from_url(etcd.url))
        ctl(etcd, "user", "add", "root:admin")
        ctl(etcd, "user", "grant-role", "root", "root")
        ctl(etcd, "role", "add", "hora")
        ctl(etcd, "role", "grant-permission", "hora", "--prefix=true", "readwrite", "/hora/")
        ctl(etcd, "user", "add", "trainer:p@ss w:rd")
        ctl(etcd, "user", "grant-role", "trainer", "hora")
        ctl(etcd, "auth", "enable")
        host = f"127.0.0.1:{etcd.port}"
        store = Store.from_url(f"etcd://trainer:p%40ss%20w%3Ard@{host}").below("job")
        term = store.lead({}, store.grant(60))
        assert term
        assert store.put("state", {"x": 1}, term=term)
        for url, words in (
            (f"etcd://trainer:wrong@{host}", "refuses user 'trainer'.*authentication failed"),
            (f"etcd://{host}", "refuses a client without a user"),
            (f"etcd://trainer:p%40ss%20w%3Ard@{host}/elsewhere", "permission denied.*role for /elsewhere/"),
        ):
            with pytest.raises(StoreError, match=words) as caught:
                Store.from_url(url).get("x")
            assert "wrong" not in str(caught.value)
            assert "p@ss" not in str(caught.value)
    finally:
        etcd.stop()


def certificates(folder: Path) -> None:
    """An authority, and certificates of a server and a client that it has signed."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.timezone.utc)
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("ca", "server", "client")}
    names = {name: x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in keys}
    for name, key in keys.items():
        builder = x509.CertificateBuilder().subject_name(names[name]).issuer_name(names["ca"])
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(
            now + datetime.timedelta(1)
        )
        builder = builder.add_extension(x509.BasicConstraints(ca=name == "ca", path_length=None), critical=True)
        own = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = builder.add_extension(x509.SubjectAlternativeName([own]), critical=False)
        certificate = builder.sign(keys["ca"], hashes.SHA256())
        (folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (folder / f"{name}.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )


def test_tls_with_certificates_of_both_ends(tmp_path: Path):
    certificates(tmp_path)
    tls = ["--cert-file", f"{tmp_path}/server.crt", "--key-file", f"{tmp_path}/server.key"]
    tls += ["--client-cert-auth", "--trusted-ca-file", f"{tmp_path}/ca.crt"]
    etcd = Etcd(tmp_path, tls)
    etcd.start()
    try:
        own = f"?ca={tmp_path}/ca.crt&cert={tmp_path}/client.crt&key={tmp_path}/client.key"
        store = Store.from_url(etcd.url + own)
        etcd.wait(store)
        assert store.lead({}, store.grant(60))
        with pytest.raises(StoreError, match="certificate"):
            Store.from_url(etcd.url).get("x")  # an authority that this machine does not know
        with pytest.raises(StoreError):
            Store.from_url(f"{etcd.url}?ca={tmp_path}/ca.crt").get("x")  # no certificate of its own
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
    ],
)
def test_an_address_that_cannot_be_meant(url: str, words: str):
    with pytest.raises(ValueError, match=words):
        Store.from_url(url)


def test_an_address_is_read():
    store = Store.from_url("etcd://user:pa%2Fss@one,two:2380,[fd00::1]:2381/team/a?ttl=5")
    assert store.members == (("one", 2379), ("two", 2380), ("fd00::1", 2381))
    assert (store.user, store.password, store.prefix, store.ttl_s) == ("user", "pa/ss", "/team/a/", 5)
    assert "pa/ss" not in repr(store)


def test_the_doctor_looks_at_the_store(etcd: Etcd):
    from hora.cli.doctor.examine import _store

    assert _store(etcd.url).level == "ok"
    missing = _store("etcd://127.0.0.1:1")
    assert missing.level == "problem"
    assert "127.0.0.1:1" in missing.text
