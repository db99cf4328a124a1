"""Faults on a cluster, classic and through Connect: too few slots, two jobs at once, a model of 200 MB, a killed
executor, a silent one, Ctrl-C.

Each variant starts a cluster of two slots; the client runs `fault_client.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyspark
import pytest
from fault_client import IMPATIENT
from spark_cluster import ConnectServer, StandaloneCluster, connect_python

from waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(1800)]

SCENARIOS = ("slots_too_few", "two_jobs_at_once", "large_model", "executor_killed", "executor_silent", "interrupted")
LIMIT_S = 600.0


@pytest.fixture(scope="module", params=["classic", "connect"])
def found(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    python = sys.executable
    if request.param == "connect":
        pytest.importorskip("grpc_status")
        python = connect_python() or pytest.skip("a Connect server comes with Spark 4: HORA_TEST_CONNECT_SERVER")
        if pyspark.__version__ < "3.5":
            pytest.skip("Connect has barrier stages since Spark 3.5")
    with StandaloneCluster(num_workers=2, cores=1, memory="2g", python=python) as cluster:
        if request.param == "classic":
            yield _play(cluster.url, cluster)
            return
        memory = {"spark.executor.memory": "1g", "spark.driver.memory": "2g"}
        settings = {"spark.master": cluster.url, **memory, **IMPATIENT}
        with ConnectServer(settings=settings, python=python) as server:
            yield _play(server.url, cluster)


def _play(url: str, cluster: StandaloneCluster) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name not in ("SPARK_REMOTE", "SPARK_HOME")}
    program = str(Path(__file__).parent / "fault_client.py")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        stopped: list[psutil.Process] = []
        argv = [sys.executable, program, url, folder, *SCENARIOS]
        client = subprocess.Popen(argv, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=folder)
        try:
            _hurt(client, Path(folder), lambda: cluster.executors()[0].kill())
            _wait_for_the_end(client, Path(folder))
            _hurt(client, Path(folder), lambda: stopped.extend(_silence(cluster.executors()[0])))
            _wait_for_the_end(client, Path(folder))
            _resume(stopped)
            _hurt(client, Path(folder), lambda: client.send_signal(signal.SIGINT))
            client.wait(LIMIT_S)
        finally:
            _resume(stopped)
            client.kill()
            client.wait()
            output.seek(0)
            text = output.read()
            print(text)
    answers: dict[str, Any] = {"left": cluster.leftovers()}
    for line in text.splitlines():
        if line.startswith("{"):
            answers |= json.loads(line)
    return answers


def _silence(executor: psutil.Process) -> list[psutil.Process]:
    """Stop the executor's processes: none of them answers or exits."""
    stopped = [executor, *executor.children(recursive=True)]
    for process in stopped:
        process.suspend()
    return stopped


def _resume(stopped: list[psutil.Process]) -> None:
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    stopped.clear()


def _wait_for_the_end(client: subprocess.Popen[bytes], folder: Path) -> None:
    survived = folder / "survived"
    wait_until("the job has ended", lambda: _over(client) or survived.exists(), LIMIT_S)
    survived.unlink(missing_ok=True)


def _over(client: subprocess.Popen[bytes]) -> bool:
    return client.poll() is not None


def _hurt(client: subprocess.Popen[bytes], folder: Path, hurt: Any) -> None:
    """Call `hurt` once both ranks of a job run."""
    ranks = [folder / f"rank{rank}" for rank in range(2)]
    wait_until("both ranks run", lambda: _over(client) or all(path.exists() for path in ranks), LIMIT_S)
    if not _over(client):
        hurt()


def test_too_few_slots_are_an_error_at_once(found):
    (runner, words), (run, more) = found["slots_too_few"]
    assert (runner, run) == ("ValueError", "StartTimeoutError")
    assert "np=3" in words
    assert "has 2" in words
    assert more.startswith("Timed out waiting for Spark tasks to start.")


def test_two_jobs_run_concurrently(found):
    assert found["two_jobs_at_once"] == [["a", ["a"]], ["b", ["b"]]]


def test_a_model_of_200_mb_is_sent_and_returned(found):
    assert found["large_model"] == [200_000_000, True]


def test_a_lost_executor_ends_the_job_with_the_reason_and_the_next_job_runs(found):
    words, again = found["executor_killed"]
    assert "executor" in words
    assert again == [1, 1]


def test_a_silent_executor_ends_the_job_with_the_reason_and_the_next_job_runs(found):
    words, again = found["executor_silent"]
    assert "heartbeat" in words.lower() or "executor" in words.lower()
    assert again == [1, 1]


def test_an_interrupted_driver_leaves_free_slots_and_nothing_else(found):
    assert found["interrupted"] == [1, 1]
    assert found["left"] == []
