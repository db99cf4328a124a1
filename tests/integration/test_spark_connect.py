"""HorovodRunner, `horovod.spark.run`, the estimator and the converter through real Spark Connect: on a server, and
inside the client's process as started by `remote("local[2]")`.

All tests share one client process per kind, which runs `connect_client.py`. `make test` runs the first scenarios on a
server; `make test-slow` runs all.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyspark
import pytest
from spark_cluster import ConnectServer, LocalConnect, connect_python

from waiting import wait_until

pytest.importorskip("grpc_status")
pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(600),
    pytest.mark.skipif(pyspark.__version__ < "3.5", reason="Connect has barrier stages since Spark 3.5"),
    pytest.mark.skipif(
        connect_python() is None, reason="a Connect server comes with Spark 4: HORA_TEST_CONNECT_SERVER"
    ),
]

FIRST = ("runner", "files", "failure", "too_few", "elastic")
MORE = ("warm", "run", "large", "estimator", "converter", "workers")
LAST = ("wait_for_interrupt",)
SCENARIOS = {"server": FIRST + LAST, "server, more": MORE + LAST, "local": FIRST + MORE + LAST}
LIMIT_S = 500.0


Connect = ConnectServer | LocalConnect


class Seen(NamedTuple):
    """The client's results by scenario, and its whole output."""

    found: dict[str, Any]
    text: str


class Client:
    """A process that runs the scenarios on a cluster."""

    def __init__(self, cluster: Connect, scenarios: Sequence[str]) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._folder = Path(self._directory.name)
        program = str(Path(__file__).parent / "connect_client.py")
        argv = [sys.executable, program, cluster.url, str(self._folder), *scenarios]
        with open(self._folder / "output", "w") as output:
            self._process = subprocess.Popen(
                argv, env=cluster.environment, cwd=self._folder, stdout=output, stderr=subprocess.STDOUT
            )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._directory.cleanup()

    def finish(self) -> Seen:
        started = [self._folder / f"rank{rank}" for rank in range(2)]
        # The last scenario waits for Ctrl-C once both of its ranks run.
        wait_until(
            "the client has come to its end, or waits to be interrupted",
            lambda: self._process.poll() is not None or all(path.exists() for path in started),
            LIMIT_S,
        )
        self._process.send_signal(signal.SIGINT)
        self._process.wait(120)
        text = (self._folder / "output").read_text()
        print(text)
        found: dict[str, Any] = {}
        for line in text.splitlines():
            if line.startswith("{"):
                found |= json.loads(line)
        return Seen(found, text)


def local_connect() -> LocalConnect:
    if connect_python() != sys.executable:
        pytest.skip("this Spark comes without a Connect server")
    return LocalConnect()


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest) -> Iterator[tuple[Connect, Client]]:
    is_local = request.param == "local"
    with local_connect() if is_local else ConnectServer(python=connect_python() or sys.executable) as cluster:
        with Client(cluster, SCENARIOS[request.param]) as client:
            yield cluster, client


def of_clients(*names: str) -> pytest.MarkDecorator:
    """Parametrize a test with these clients; all but the first are marked slow."""
    values = [pytest.param(name, marks=[pytest.mark.slow] if name != "server" else []) for name in names]
    return pytest.mark.parametrize("both", values, indirect=True, scope="module")


first = of_clients("server", "local")
more = of_clients("server, more", "local")


@pytest.fixture(scope="module")
def cluster(both: tuple[Connect, Client]) -> Connect:
    return both[0]


@pytest.fixture(scope="module")
def seen(both: tuple[Connect, Client]) -> Seen:
    return both[1].finish()


@first
def test_the_runner_returns_rank_0s_value_and_shows_log_to_driver_messages(seen):
    assert seen.found["runner"] == [11.0, 2]
    assert "hello from rank 0\n" in seen.text
    assert "hello from rank 1\n" in seen.text
    assert "not shown" not in seen.text


@first
def test_modules_and_files_of_the_client_reach_the_ranks(seen):
    assert seen.found["files"] == [7, "hello"]


@more
def test_ranks_are_forked_from_a_process_unaffected_by_udfs(seen):
    states, num_seeds = seen.found["warm"]
    assert states == [[True, False, True]] * 4
    assert num_seeds == 4  # different random numbers on every rank and in every job


@first
def test_a_failing_rank_is_an_error_with_its_traceback_and_its_exception_as_the_cause(seen):
    kind, text, cause, words = seen.found["failure"]
    assert kind == "JobFailedError"
    assert "Process name: 1\nExit code: 1\n" in text
    assert 'raise KeyError("no such shard")' in text
    assert (cause, words) == ("KeyError", "'no such shard'")


@more
def test_every_ranks_value_and_prefixed_lines(seen):
    values, sizes, lines = seen.found["run"]
    assert values == [["0", "1"], ["1", "1"]]
    assert sizes == [600_000] * 2
    assert lines == ["", "[0]<stdout>:a line", "[1]<stdout>:a line"]


@more
def test_calls_and_values_larger_than_a_message(seen):
    assert seen.found["large"] == [True, True]


@first
def test_too_few_slots_are_an_error_at_once(seen):
    (runner, words), (run, more) = seen.found["too_few"]
    assert (runner, run) == ("ValueError", "StartTimeoutError")
    assert "np=3" in words
    assert "has 2" in words
    assert more.startswith("Timed out waiting for Spark tasks to start.")


@first
def test_elastic_jobs_are_rejected_with_an_alternative(seen):
    assert "classic mode" in seen.found["elastic"]


@more
def test_an_estimator_is_fitted_saved_loaded_and_predicts(seen):
    assert seen.found["estimator"] == [2, 20, True]


@more
def test_a_converters_rows_reach_every_rank_once(seen):
    assert seen.found["converter"] == [list(range(10)), 10, True]


@more
def test_workers_run_on_the_cluster_and_report_their_exit(seen):
    told, own, num_running, refused, states = seen.found["workers"]
    assert told == [["succeeded", 0, "127.0.0.1"], ["failed", 3, "127.0.0.1"]]
    assert own == [True]
    assert num_running == 2
    assert refused == "a Spark task slot was requested, but 0 of 2 are free"
    assert states == ["succeeded", "failed", "stopped", "running"]


@of_clients("server, more", "local")
def test_a_notebook_over_connect(cluster, tmp_path, monkeypatch):
    """Run in a real kernel: the cell shows the ranks' output, and the next cell rank 0's value."""
    import nbclient
    import nbformat

    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)  # of the kernel
    cells = [
        f"from pyspark.sql import SparkSession\nspark = SparkSession.builder.remote({cluster.url!r}).getOrCreate()",
        "def train(rate):\n"
        "    import torch\n"
        "    import horovod.torch as hvd\n"
        "    hvd.init()\n"
        "    print('rank', hvd.rank(), 'of', hvd.size(), flush=True)\n"
        "    return rate * hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum).item()\n"
        "from sparkdl import HorovodRunner\n"
        "value = HorovodRunner(np=2, driver_log_verbosity='all').run(train, rate=0.5)",
        "value, int(spark.range(5).count())",
        "spark.stop()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    shown = "".join(output.get("text", "") for output in notebook.cells[1].outputs)
    assert all(f"rank {rank} of 2" in shown for rank in range(2))
    assert notebook.cells[2].outputs[0]["data"]["text/plain"] == "(1.0, 5)"


@first
def test_an_interrupt_ends_the_job_and_frees_its_slots(seen, cluster):
    assert seen.found["wait_for_interrupt"] == [1, 1]
    assert cluster.leftovers() == []
