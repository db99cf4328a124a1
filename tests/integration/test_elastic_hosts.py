"""Elastic jobs whose discovery script adds and removes hosts. All hosts are names of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from elastic_job import ElasticJob, assert_good_ending

from waiting import wait_until

A, B, C = "localhost", "127.0.0.1", "127.0.0.2"


class Hosts:
    """A discovery script with a configurable output."""

    def __init__(self, work: Path, text: str) -> None:
        self.file = work / "hosts"
        self.say(text)

    def say(self, text: str) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(text.replace(",", "\n") + "\n")
        new.replace(self.file)

    @property
    def script(self) -> str:
        return f"cat {self.file}"


def wait_for_size(job: ElasticJob, size: int) -> None:
    """Wait until a step is committed in a world of this size."""

    def reached() -> bool:
        progress = job.folder / "progress"
        return (progress.exists() and progress.read_text().endswith(f" {size}")) or job.process.poll() is not None

    try:
        wait_until(f"the world has {size} ranks", reached)
    except AssertionError as error:
        raise AssertionError(f"{error}; the job so far:\n{job.text()}") from None
    assert job.process.poll() is None, job.text()


def changes(sizes: list[int]) -> list[int]:
    """Return the sizes without consecutive repetitions."""
    return [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] != size]


def test_a_host_joins_during_an_epoch_and_the_first_one_leaves(tmp_path: Path):
    hosts = Hosts(tmp_path, f"{A}:2")
    plan = {"samples": 2000, "epochs": 1, "pause_s": 0.05}
    job = ElasticJob(
        tmp_path, plan, num_proc=2, min_num_proc=1, max_num_proc=4, host_discovery_script=hosts.script, verbose=True
    )
    wait_for_size(job, 2)
    hosts.say(f"{A}:2,{B}:2")
    wait_for_size(job, 4)
    hosts.say(f"{B}:2")
    wait_for_size(job, 2)
    stop_soon(job)
    results = job.results()
    assert_equal(results)
    assert changes(results[0]["sizes"]) == [2, 4, 2]
    assert results[0]["starts"] == [f"{B}/2", f"{B}/3"], "led by the worker that began as rank 2"
    assert len(job.notes()) == 2 + 4 + 2


def test_a_host_is_replaced(tmp_path: Path):
    hosts = Hosts(tmp_path, f"{A}:1,{B}:1")
    plan = {"samples": 2000, "epochs": 1, "pause_s": 0.05}
    job = ElasticJob(tmp_path, plan, num_proc=2, min_num_proc=2, host_discovery_script=hosts.script)
    job.wait_for_step(3)
    hosts.say(f"{B}:1,{C}:1")
    wait_until("the third host has joined", lambda: f"as {C}/2" in "".join(job.notes()))
    stop_soon(job)
    results = job.results()
    assert_equal(results)
    assert results[0]["starts"] == [f"{B}/1", f"{C}/2"]
    assert set(results[0]["sizes"]) == {2}


@pytest.mark.parametrize("per_step", [pytest.param(False, marks=pytest.mark.slow), True])
def test_all_hosts_are_replaced_before_the_new_ones_have_the_state(tmp_path: Path, per_step: bool):
    hosts = Hosts(tmp_path, f"{A}:2")
    plan = {"samples": 2000, "epochs": 1, "pause_s": 0.05, "per_step": per_step}
    job = ElasticJob(tmp_path, plan, num_proc=2, min_num_proc=1, host_discovery_script=hosts.script, verbose=True)
    job.wait_for_step(3)
    hosts.say(f"{A}:2,{B}:1,{C}:1")
    job.wait_for_text(f"the hosts are now {A}:2,{B}:1,{C}:1")
    hosts.say(f"{B}:1")
    wait_for_size(job, 1)
    stop_soon(job)
    results = job.results()
    assert_equal(results)
    (start,) = results[0]["starts"]
    assert start.startswith(f"{B}/")
    assert results[0]["steps"] == len(results[0]["sizes"]) > 3, "no step was lost"
    assert results[0]["sizes"][:3] == [2, 2, 2]


def stop_soon(job: ElasticJob) -> None:
    """End the training at its next step."""
    (job.folder / "stop").touch()


def assert_equal(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["weights"] == results[0]["weights"]
        assert result["momentum"] == results[0]["momentum"]
        seen = [i for _, indices in result["seen"] for i in indices]
        assert len(seen) == len(set(seen)), "no sample was seen twice"


@pytest.mark.slow
def test_the_death_of_rank_0_blacklists_its_host(tmp_path: Path):
    plan = {"faults": [{"rank": 0, "step": 3, "how": "kill"}]}
    job = ElasticJob(tmp_path, plan, num_proc=4, min_num_proc=2, hosts=f"{A}:2,{B}:2")
    results = job.results()
    assert_good_ending(job, results)
    assert results[0]["starts"] == [f"{B}/2", f"{B}/3"]
    assert changes(results[0]["sizes"]) == [4, 2]


def test_the_job_fails_when_every_host_is_blacklisted(tmp_path: Path):
    plan = {"faults": [{"rank": 0, "step": 3, "how": "kill"}, {"rank": 1, "step": 3, "how": "exit"}]}
    job = ElasticJob(tmp_path, plan, num_proc=2, min_num_proc=1, hosts=f"{A}:1,{B}:1")
    assert job.wait() == 1
    job.assert_nothing_left()
    assert "Horovod detected that one or more processes exited with non-zero status" in job.text()
    assert f"Process name: {A}[0]" in job.text() or f"Process name: {B}[0]" in job.text()


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("echo broken >&2; exit 3", {}, ["failed with exit status 3", "broken"]),
        ("echo localhost", {}, ["without slots", "--slots-per-host"]),
        ("true", {}, ["Timed out waiting for 2 slots", "no host"]),
        ("echo localhost:1", {}, ["Timed out waiting for 2 slots", "localhost:1"]),
    ],
)
def test_a_useless_discovery_script(tmp_path: Path, script: str, arguments: dict[str, Any], words: list[str]):
    environment = {"HOROVOD_ELASTIC_TIMEOUT": "2"}
    job = ElasticJob(tmp_path, {}, environment, num_proc=2, host_discovery_script=script, **arguments)
    assert job.wait() == 1
    job.assert_nothing_left()
    for text in words:
        assert text in job.text()
