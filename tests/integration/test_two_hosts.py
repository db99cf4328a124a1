"""The engine across two hosts of two ranks each, simulated by two network namespaces joined by a cable."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from secrets import token_hex
from typing import Any

import pytest
import two_hosts_rank
from host_ranks import Helper, run_ranks
from namespaces import Host, joined

pytestmark = pytest.mark.netns

ADDRESSES = ("10.77.0.1", "10.77.0.2")


@pytest.fixture(scope="module")
def hosts():
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "unshare", "nsenter")):
        pytest.skip("needs root, ip, unshare and nsenter")
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(joined(ADDRESSES))
        except (AssertionError, subprocess.CalledProcessError):
            pytest.skip("this machine does not let us make network namespaces")
        yield made


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    """A secret file for the ranks of both hosts, as on a shared file system."""
    path = tmp_path_factory.mktemp("shared") / "secret"
    path.write_text(token_hex(32))
    path.chmod(0o600)
    return str(path)


@contextlib.contextmanager
def recording(hosts: list[Host]) -> Iterator[list[Any]]:
    """Capture the traffic on the cable during the block; append the number of bytes, and which texts of a tensor, an
    object and messages it contained.
    """
    found: list[Any] = []
    with Helper(two_hosts_rank.listen, hosts[0].namespace) as helper:
        yield found
        found.extend(helper.ask("stop"))


@pytest.fixture(scope="module")
def recorded(hosts, secret):
    with recording(hosts) as found:
        seen = run_ranks(hosts, secret, "operations", address=ADDRESSES[0])
    return seen, found


@pytest.fixture(scope="module")
def seen(recorded):
    return recorded[0]


def test_traffic_on_the_cable_is_unreadable(recorded):
    num_bytes, readable = recorded[1]
    assert num_bytes > 1_000_000
    assert not readable


def test_every_operation_uses_memory_within_and_streams_between_hosts(seen):
    for rank, results in enumerate(seen):
        assert results["large"] == [10.0, 2_999_990.0]
        assert results["average"] == [1, -7]
        assert results["grouped"] == [[4.0, 4.0], [4.0]]
        assert results["allgather"] == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
        assert results["broadcast"] == [3.0, 3.0, 3.0]
        assert results["alltoall"] == [rank + 10 * sender for sender in range(4)]
        assert results["reducescatter"] == [[0.0, 10.0], [20.0, 30.0], [40.0], [50.0]][rank]
        assert results["adasum"] == [3.0, 3.0]
        assert results["object"] == {"from": 2}
        assert results["hosts"] == [[0, 1], [2, 3]]
        assert results["place"] == [rank % 2, 2, rank // 2, 2]
        assert results["transport"] == "shm+tcp"
    assert seen[0]["across"] == seen[2]["across"] == [2]
    assert seen[1]["three"] == seen[2]["three"] == seen[3]["three"] == [1, 2, 3]


def test_memory_is_shared_only_within_a_host(seen):
    memory = [set(results["memory"]) for results in seen]
    assert memory[0] & memory[1]
    assert memory[2] & memory[3]
    for here in (0, 1):
        for there in (2, 3):
            assert not memory[here] & memory[there]


def test_compressed_trainings_send_less_over_a_slow_link(hosts, secret):
    seen = run_ranks(hosts, secret, "slow links", address=ADDRESSES[0])
    for name in ("plain", "whole rank", "rank 2", "LocalSGD at last", "DiLoCo at last"):
        assert all(found[name] == seen[0][name] for found in seen), name
    assert seen[0]["whole rank"] == pytest.approx(seen[0]["plain"], abs=1e-4)
    assert seen[0]["rank 2"] != pytest.approx(seen[0]["plain"], abs=1e-4)
    for name in ("LocalSGD", "DiLoCo"):  # between exchanges each host has its own weights, which its ranks share
        assert seen[0][name] == seen[1][name]
        assert seen[2][name] == seen[3][name]
        assert seen[0][name] != seen[2][name]
    plain = seen[0]["plain, bytes"]
    assert plain > 8 * 4 * 2 * 128 * 512
    for name, times in (("rank 2", 10), ("LocalSGD", 3), ("DiLoCo", 10)):
        assert seen[0][f"{name}, bytes"] < plain / times, name


def test_a_killed_rank_is_reported_on_both_hosts(hosts, secret):
    """Runs without encryption, which proves that the capture finds readable text: numbers alone. Objects and control
    messages are encrypted regardless.
    """
    with recording(hosts) as found:
        seen = run_ranks(hosts, secret, "killed", address=ADDRESSES[0], lost=(3,), HORA_ENCRYPT="never")
    for rank in (0, 1, 2):
        assert "rank 3" in seen[rank]["error"]
    assert found[1] == [two_hosts_rank.TENSOR_TEXT]


def test_steady_training_steps_send_no_announcements_and_report_a_killed_rank(hosts, secret):
    seen = run_ranks(hosts, secret, "steady, then killed", address=ADDRESSES[0], lost=(3,))
    for rank in (0, 1, 2):
        assert seen[rank]["announced"] == [0, 0, 0]  # in about thirty reductions each
        assert seen[rank]["wrong"] == []
        assert "rank 3" in seen[rank]["error"]


def test_a_cut_cable_is_detected_on_both_sides(hosts, secret):
    first = hosts[0]
    try:
        seen = run_ranks(
            hosts,
            secret,
            "cut",
            address=ADDRESSES[0],
            then=lambda pids: first.run("ip", "link", "set", "cable", "down"),
        )
    finally:
        first.run("ip", "link", "set", "cable", "up")
    for rank, other_side in enumerate(((2, 3), (2, 3), (0, 1), (0, 1))):
        assert any(f"rank {peer} " in seen[rank]["error"] for peer in other_side)


@pytest.mark.slow
@pytest.mark.parametrize(
    "column", ["plain", "sharded", "per step", "int8", "PowerSGD", "LocalSGD", "DiLoCo", "DES-LOC"]
)
def test_habits_of_users_on_two_hosts(hosts, secret, column):
    """Run one column of the matrix in `tests/multiproc/habits.py` with two ranks on each host."""
    for rank, wrong in enumerate(run_ranks(hosts, secret, f"habits: {column}", address=ADDRESSES[0])):
        assert not wrong, f"rank {rank}: " + "\n".join(f"{cell}\n{text}" for cell, text in wrong.items())
