"""The engine across two to eight hosts, simulated by network namespaces: collectives, attacks, faults. `make
test-hosts`.

Takes minutes and is not part of `make test`, where `test_two_hosts` covers the most important cases.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from secrets import token_hex
from typing import Any

import psutil
import pytest
import strangers
import two_hosts_rank
from elastic_job import ElasticJob
from host_ranks import Helper, run_ranks
from namespaces import Host, badly_joined, joined
from ssh_server import SSHD
from test_elastic_hosts import assert_equal, stop_soon, wait_for_size
from test_elastic_netns import Machines
from test_two_hosts import recording

from waiting import wait_until

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.netns,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter", "tc"))),
        reason="needs root, ip, tc, unshare and nsenter",
    ),
]

V4 = ("10.77.1.1", "10.77.1.2", "10.77.1.3")
V6 = ("fd00:77::1", "fd00:77::2", "fd00:77::3")


@contextlib.contextmanager
def network(*addresses: str, join: Callable[..., Any] = joined) -> Iterator[list[Host]]:
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(join(addresses))
        except (AssertionError, subprocess.CalledProcessError) as error:
            pytest.skip(f"this machine does not let us make network namespaces: {error}")
        yield made


@pytest.fixture
def secret(tmp_path):
    """A secret file for the ranks of all hosts, as on a shared file system."""
    path = tmp_path / "secret"
    path.write_text(token_hex(32))
    path.chmod(0o600)
    return str(path)


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory):
    """The results of all collectives on one host."""
    path = tmp_path_factory.mktemp("one") / "secret"
    path.write_text(token_hex(32))
    path.chmod(0o600)
    host = Host()
    try:
        return run_ranks([host], str(path), "everything", address="127.0.0.1", sizes=(4,))
    finally:
        host.close()


@pytest.mark.parametrize(
    ("addresses", "sizes"),
    [(V4[:2], (2, 2)), (V4[:2], (1, 3)), (V4, (2, 1, 1)), (V6, (1, 2, 1))],
    ids=["two hosts", "two uneven hosts", "three uneven hosts", "three hosts over IPv6"],
)
def test_every_collective_has_the_same_result_as_on_one_host(secret, on_one_host, addresses, sizes):
    with network(*addresses) as hosts:
        # The interface is selected by name; the other hosts reach this one by address only.
        seen = run_ranks(hosts, secret, "everything", address=addresses[0], sizes=sizes, HOROVOD_GLOO_IFACE="cable")
    assert [len(host) for host in seen[0]["hosts"]] == list(sizes)
    for rank, (found, expected) in enumerate(zip(seen, on_one_host, strict=True)):
        for name, value in expected.items():
            if name.startswith("weights"):
                assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (rank, name)
            elif name.startswith("compressed"):
                assert found[name] == seen[0][name], (rank, name)
                assert found[name] == pytest.approx(value, abs=0.05), (rank, name)  # five steps of 0.01
            elif name not in ("hosts", "place", "transport", "memory"):
                assert found[name] == value, (rank, name)


@pytest.mark.parametrize("ranks_per_host", [1, 2])
@pytest.mark.parametrize("num_hosts", [2, 4, 8])
def test_training_on_several_hosts_matches_one_host(secret, num_hosts, ranks_per_host):
    addresses = [f"10.77.2.{number + 1}" for number in range(num_hosts)]
    size = num_hosts * ranks_per_host
    host = Host()
    try:
        expected = run_ranks([host], secret, "any number", address="127.0.0.1", sizes=(size,))
    finally:
        host.close()
    with network(*addresses) as hosts:
        sizes = (ranks_per_host,) * num_hosts
        seen = run_ranks(hosts, secret, "any number", address=addresses[0], sizes=sizes, HOROVOD_GLOO_IFACE="cable")
    assert [len(one) for one in seen[0]["hosts"]] == list(sizes)
    assert [found["wrong"] for found in (*seen, *expected)] == [[]] * 2 * size
    for found in seen:
        for model in ("MLP", "ResNet18"):
            assert found[model] == pytest.approx(expected[0][model], rel=1e-4)


@pytest.mark.parametrize("encrypt", ["always", "never"])
def test_process_group_sends_messages_between_any_two_ranks(secret, encrypt):
    with network(*V4[:2]) as hosts, recording(hosts) as found:
        strict = {} if encrypt == "always" else {"HORA_ENCRYPT": encrypt, "HORA_STRICT": "0"}
        seen = run_ranks(hosts, secret, "process group", address=V4[0], **strict)
    assert two_hosts_rank.TENSOR_TEXT not in found[1]  # messages are encrypted with any setting
    for rank, results in enumerate(seen):
        others = [other for other in range(4) if other != rank]
        assert results["text"] == results["large"] == results["empty"] == []
        assert results["batch"] == [[10.0 * other + rank] * 2 for other in others]
        assert results["all_to_all"] == [[float(other)] * (rank + 1) for other in range(4)]
        assert results["mixed"] == [[3.0, 0.0, 2.0, 1.0], 4.0 * [3, 0, 2, 1].index(rank), 3.0]
    assert seen[0]["any"] == [[1, 1], [2, 2], [3, 3]]
    assert seen[0]["across"] == seen[2]["across"] == 4.0


@pytest.mark.parametrize("sizes", [(1, 3), (2, 1, 1), (2, 2, 2)], ids=str)
def test_steady_training_steps_send_no_announcements(secret, sizes):
    addresses = V4[: len(sizes)]
    with network(*addresses) as hosts:
        seen = run_ranks(hosts, secret, "steady", address=addresses[0], sizes=sizes)
    assert [found["wrong"] for found in seen] == [[]] * sum(sizes)
    assert [found["announced"] for found in seen] == [[0, 0, 0]] * sum(sizes)


def test_only_a_stopped_host_leader_is_reported_not_the_ranks_behind_it(secret):
    """Rank 2 relays for rank 3. The stall check asks rank 3 directly and reports the shutdown to it around rank 2."""

    def once_stopped(pids):
        stopped = psutil.Process(pids[2])
        wait_until("rank 2 is stopped", lambda: stopped.status() == psutil.STATUS_STOPPED)

    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}
    with network(*V4[:2]) as hosts:
        seen = run_ranks(hosts, secret, "a speaker is stopped", address=V4[0], lost=(2,), then=once_stopped, **limits)
    for rank in (0, 1, 3):
        assert "rank(s) 2 stalled for more than 4 s" in seen[rank]["error"]


def test_allgather_allocates_little_more_than_its_result(secret):
    with network(*V4[:2]) as hosts:
        seen = run_ranks(hosts, secret, "memory", address=V4[0])
    for found in seen:
        assert 64 <= found["mib"] < 64 + 48


@pytest.mark.parametrize("encrypt", ["auto", "never"])
def test_attackers_on_another_host_or_under_another_user_have_no_effect(secret, encrypt):
    """They connect before the ranks do, hold another job's secret, replay recorded messages, stop in the middle,
    announce huge lengths, open two thousand connections at a time, send nothing, or never read.
    """
    with network(*V4) as hosts, contextlib.ExitStack() as stack:
        crowd = stack.enter_context(Helper(strangers.crowd, hosts[2].namespace, [host.pid for host in hosts[:2]]))
        recorder = stack.enter_context(Helper(strangers.record, hosts[1].namespace))
        speaker = stack.enter_context(Helper(strangers.say, hosts[2].namespace))
        other = stack.enter_context(Helper(strangers.another_user, hosts[0].namespace))

        def attack(pids):
            told = crowd.ask("how many?")
            assert told["let in"] == 0
            assert len(told["places"]) >= 5  # the rendezvous, and one control tree endpoint per rank
            for pid in pids:
                assert psutil.Process(pid).num_fds() < 600
            places = [tuple(place) for place in told["places"]]
            recorded = [(tuple(place), text) for place, text in recorder.ask("what was said?")]
            repeated = [(place, text[:100_000]) for place, text in recorded if place in places]
            assert len(repeated) >= 4
            for data in ([(place, text) for place in places for text in strangers.sayings()], repeated):
                for said in speaker.ask(data):
                    assert said is None or len(said) <= 48  # at most half of a key exchange
            assert speaker.ask(None) == "gone"
            assert all(len(said) <= 48 * len(strangers.sayings()) for said in other.ask("now").values())
            assert crowd.ask("go") == "gone"

        seen = run_ranks(
            hosts[:2], secret, "until told", address=V4[0], then=attack, HORA_ENCRYPT=encrypt, HORA_STRICT="0"
        )
    for found in seen:
        assert found["rounds"] > 1
        assert found["wrong"] == 0
        assert found["mib"] < 100


# With and without the native library.
WAYS = {
    "encrypted": {"HORA_ENCRYPT": "always"},
    "plain": {"HORA_ENCRYPT": "never"},
    "encrypted without the native part": {"HORA_ENCRYPT": "always", "HORA_NATIVE": "0"},
}


@contextlib.contextmanager
def slow_network() -> Iterator[list[Host]]:
    with network(*V4[:2]) as hosts:
        for host in hosts:
            how = ["tbf", "rate", "200mbit", "burst", "256kb", "latency", "50ms"]
            host.run("tc", "qdisc", "add", "dev", "cable", "root", *how)
        yield hosts


@pytest.mark.parametrize("way", WAYS)
def test_a_slice_leader_killed_during_an_exchange_is_reported(secret, way):
    with slow_network() as hosts:
        seen = run_ranks(hosts, secret, "killed in mid-exchange", address=V4[0], lost=(3,), **WAYS[way])
    for rank in (0, 1, 2):
        assert "rank 3" in seen[rank]["error"]


@pytest.mark.parametrize("way", WAYS)
def test_a_slice_leader_stopped_during_an_exchange_resumes(secret, way):
    def mend(pids):
        stopped = psutil.Process(pids[3])
        wait_until("rank 3 is stopped", lambda: stopped.status() == psutil.STATUS_STOPPED)
        os.kill(pids[3], signal.SIGCONT)

    with slow_network() as hosts:
        seen = run_ranks(hosts, secret, "stopped in mid-exchange", address=V4[0], then=mend, **WAYS[way])
    for found in seen:
        assert found == {"wrong": 0}


def test_a_stopped_rank_does_not_delay_process_sets_without_it(secret):
    with network(*V4[:2]) as hosts:
        seen = run_ranks(hosts, secret, "one is stopped", address=V4[0])
    assert seen == [{"rounds": 0 if rank == 1 else 400, "together": 4.0} for rank in range(4)]


@pytest.mark.parametrize("way", WAYS)
def test_a_link_cut_during_an_exchange_is_detected_on_both_sides(secret, way):
    with slow_network() as hosts:
        cut = lambda pids: hosts[0].run("ip", "link", "set", "cable", "down")  # noqa: E731
        seen = run_ranks(hosts, secret, "cut", address=V4[0], then=cut, **WAYS[way])
    for rank, other_side in enumerate(((2, 3), (2, 3), (0, 1), (0, 1))):
        assert any(f"rank {peer} " in seen[rank]["error"] for peer in other_side)


def test_results_are_correct_on_a_slow_and_lossy_network(secret):
    """Each direction delays by 20 ms, and one packet in a thousand is lost."""
    with network(*V4[:2], join=partial(badly_joined, delay_s=0.02, loss=0.001)) as hosts:
        seen = run_ranks(hosts, secret, "operations", address=V4[0])
    for found in seen:
        assert found["large"] == [10.0, 2_999_990.0]


@pytest.mark.skipif(not all(map(shutil.which, ("ssh", "ssh-keygen", SSHD))), reason="needs ssh and sshd")
def test_an_elastic_job_continues_after_a_slice_leader_is_killed(tmp_path, tmp_path_factory):
    with Machines(tmp_path_factory.mktemp("netns")) as machines:
        job = ElasticJob(
            tmp_path,
            {"samples": 8000, "epochs": 1},
            {"HORA_SSH": machines.server.command},
            prefix=("ip", "netns", "exec", machines.here),
            num_proc=4,
            min_num_proc=2,
            hosts="10.78.0.1:2,there:2",
            network_interfaces=["cable"],
            cooldown_range=(1, 3),
            start_timeout=60,
        )
        wait_for_size(job, 4)
        os.kill(job.worker(3), signal.SIGKILL)
        job.wait_for_step(job.step() + 20)
        stop_soon(job)
        results = job.results()
    assert_equal(results)
    assert any("rank 3" in line or "worker 3" in line for line in job.text().splitlines())
