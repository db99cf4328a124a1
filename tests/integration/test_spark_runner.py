"""HorovodRunner on a real standalone cluster: results, ranks, logs, failures, and no leftovers."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import zipfile
from pathlib import Path

import pytest

from hora.errors import JobFailedError
from hora.launch.providers.spark.cluster import count_slots
from sparkdl import HorovodRunner

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def _nothing_is_left(spark, spark_cluster):
    """Check after every test that no process of Hora runs on the cluster and that both slots are free."""
    yield
    assert spark_cluster.leftovers() == []
    assert spark.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(lambda it: it).collect() == [
        0,
        1,
    ]


def test_the_runner_returns_rank_0s_value_and_ranks_know_their_place():
    def main(greeting):
        import os

        import horovod.torch as hvd

        hvd.init()
        place = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), os.environ["HOROVOD_RANK"])
        return greeting, hvd.allgather_object(place)

    greeting, places = HorovodRunner(np=2).run(main, greeting="hello")
    assert greeting == "hello"
    # Both executors run on this host, so the ranks share a host although Spark counts two workers.
    assert places == [(0, 2, 0, 2, "0"), (1, 2, 1, 2, "1")]


def test_driver_and_ranks_listen_at_the_ports_that_the_user_allows(monkeypatch):
    def main():
        import psutil

        import horovod.torch as hvd

        def listening():
            return {one.laddr.port for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"}

        before = listening()
        hvd.init()
        ranks = hvd.allgather_object(sorted(listening() - before))
        others = {one.raddr.port for one in psutil.Process().net_connections("tcp") if one.raddr}
        return ranks, others & set(range(20760, 20770))

    monkeypatch.setenv("HORA_PORTS", "20760-20769")
    monkeypatch.setenv("HORA_TRANSPORT", "tcp")
    ranks, of_driver = HorovodRunner(np=2).run(main)
    assert [len(ports) for ports in ranks] == [1, 1]
    assert {port for ports in ranks for port in ports} <= set(range(20760, 20770))
    assert of_driver, "the rendezvous is at no allowed port"
    monkeypatch.setenv("HORA_PORTS", "20760-20763")
    with pytest.raises(ValueError, match=r"this job needs 5 ports on a host \(.*2 for the ranks on"):
        HorovodRunner(np=2).run(main)


def test_all_slots_with_np_0():
    def main():
        import os

        return os.environ["HOROVOD_SIZE"]

    with pytest.warns(DeprecationWarning, match="np=0"):
        assert HorovodRunner(np=0).run(main) == "2"


def test_too_few_slots_is_an_error_before_anything_is_submitted(spark):
    tracker = spark.sparkContext.statusTracker()
    before = tracker.getJobIdsForGroup(None)
    with pytest.raises(ValueError, match=r"np=3 .* has 2 .*use np=2"):
        HorovodRunner(np=3).run(lambda: None)
    assert tracker.getJobIdsForGroup(None) == before


def test_settings_of_the_driver_reach_the_ranks(monkeypatch, tmp_path):
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "timeline.json"))
    monkeypatch.setenv("UNRELATED_SETTING", "1")

    def main():
        import os

        import torch

        import horovod.torch as hvd

        hvd.init()
        hvd.allreduce(torch.ones(3), name="recorded")
        hvd.shutdown()
        return os.environ.get("UNRELATED_SETTING")

    assert HorovodRunner(np=2).run(main) is None
    assert any("recorded" in str(event) for event in json.loads((tmp_path / "timeline.json").read_text()))


def test_the_runner_waits_for_busy_slots(spark, tmp_path, caplog):
    """Another Spark job holds a slot until the runner logs that it is waiting."""
    release = tmp_path / "release"
    hold = threading.Thread(target=lambda: spark.sparkContext.parallelize([0], 1).map(_hold(release)).collect())

    class Releaser(logging.Handler):
        def emit(self, record):
            if "waiting for 2 free Spark task slots" in record.getMessage():
                release.touch()

    handler = Releaser()
    logging.getLogger("hora.launch").addHandler(handler)
    hold.start()
    try:
        assert HorovodRunner(np=2).run(lambda: "after all") == "after all"
    finally:
        release.touch()
        hold.join(60)
        logging.getLogger("hora.launch").removeHandler(handler)


def _hold(release):
    path = str(release)

    def until_released(_):
        import os
        import time

        limit = time.time() + 60
        while not os.path.exists(path) and time.time() < limit:
            time.sleep(0.05)

    return until_released


def test_a_rank_can_print_large_output_that_is_not_utf_8():
    def main():
        import os

        if os.environ["HOROVOD_RANK"] == "1":
            for _ in range(200):
                os.write(1, b"\xff\xfe" + b"x" * 49_997 + b"\n")
        return os.environ["HOROVOD_RANK"]

    shown = io.BytesIO()
    with contextlib.redirect_stdout(io.TextIOWrapper(shown, write_through=True)):
        assert HorovodRunner(np=2, driver_log_verbosity="all").run(main) == "0"
        lines = shown.getvalue().splitlines()
    assert lines == [b"[1]<stdout>:\xff\xfe" + b"x" * 49_997] * 200


def chatty_main():
    import os
    import sys

    from sparkdl.horovod import log_to_driver

    rank = os.environ["HOROVOD_RANK"]
    log_to_driver(f"message of rank {rank}")
    log_to_driver("x" * 5000)
    print(f"printed by rank {rank}")
    print(f"complaint of rank {rank}", file=sys.stderr)


@pytest.mark.parametrize("verbosity", ["log_callback_only", "all"])
def test_output_shown_by_the_driver(verbosity, by_value):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        HorovodRunner(np=2, driver_log_verbosity=verbosity).run(chatty_main)
    text = shown.getvalue()
    assert "message of rank 0" in text
    assert "message of rank 1" in text
    assert "x" * 4000 in text
    assert "x" * 4001 not in text
    for line in ("printed by rank 1", "complaint of rank 0"):
        assert (line in text) == (verbosity == "all")


class ModelError(Exception):
    """An exception that only the test module defines."""

    def __init__(self, epoch, loss):
        super().__init__(epoch, loss)
        self.epoch, self.loss = epoch, loss


def test_a_failing_rank_is_shown_with_its_own_traceback_and_type(by_value):
    def main():
        import os
        import time

        if os.environ["HOROVOD_RANK"] == "1":
            print("about to diverge")
            raise ModelError(3, float("inf"))
        time.sleep(100)

    with pytest.raises(JobFailedError, match="ModelError") as caught:
        HorovodRunner(np=2).run(main)
    assert caught.value.rank == 1
    assert "raise ModelError(3" in str(caught.value)
    assert isinstance(caught.value.__cause__, ModelError)
    assert caught.value.__cause__.epoch == 3


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_dead_rank_is_reported(how):
    def main(how):
        import os
        import signal
        import time

        if os.environ["HOROVOD_RANK"] == "1":
            print("last words", flush=True)
            os._exit(7) if how == "exit" else os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)

    with pytest.raises(JobFailedError) as caught:
        HorovodRunner(np=2).run(main, how=how)
    assert caught.value.rank == 1
    assert caught.value.exit_code == (7 if how == "exit" else 137)
    assert "last words" in str(caught.value)


def test_an_unpicklable_result_is_reported():
    def main():
        import threading

        return threading.Lock()

    with pytest.raises(JobFailedError, match=r"(?s)rank 0.*lock"):
        HorovodRunner(np=2).run(main)

    def only_rank_0_counts():
        import os
        import threading

        return 5 if os.environ["HOROVOD_RANK"] == "0" else threading.Lock()

    assert HorovodRunner(np=2).run(only_rank_0_counts) == 5


def test_a_large_result_is_returned():
    def main():
        import os

        return bytes(200 * 1024 * 1024) if os.environ["HOROVOD_RANK"] == "0" else None

    assert len(HorovodRunner(np=2).run(main)) == 200 * 1024 * 1024


def test_an_interrupt_ends_the_job(spark):
    def main():
        import time

        from sparkdl.horovod import log_to_driver

        log_to_driver("running")
        time.sleep(100)

    with (
        pytest.raises(KeyboardInterrupt),
        _when_shown("running", lambda: os.kill(os.getpid(), signal.SIGINT)),
    ):
        HorovodRunner(np=2).run(main)


def test_a_killed_executor_is_an_error_and_the_cluster_recovers(spark, spark_cluster):
    def main():
        import time

        from sparkdl.horovod import log_to_driver

        log_to_driver("running")
        time.sleep(100)

    with pytest.raises(JobFailedError, match="executor was lost"):
        with _when_shown("running", lambda: spark_cluster.executors()[0].kill()):
            HorovodRunner(np=2).run(main)
    assert spark_cluster.leftovers() == []
    # The Spark worker starts another executor, and the next job waits for it.
    assert HorovodRunner(np=2).run(lambda: "again") == "again"
    assert count_slots(spark.sparkContext) == 2


def test_a_dead_driver_leaves_nothing(tmp_path, spark_cluster):
    """The driver has its own executors (local mode) and is killed with SIGKILL while two ranks run."""
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        sys.path.insert(0, sys.argv[1])
        from spark_cluster import spark_session
        from sparkdl import HorovodRunner

        def main():
            import time
            from sparkdl.horovod import log_to_driver
            log_to_driver("running")
            time.sleep(100)

        with spark_session("local[2]"):
            HorovodRunner(np=2).run(main)
        """)
    )
    mark = {"SPARK_TEST_CLUSTER": spark_cluster.name, "SPARK_LOCAL_DIRS": str(tmp_path)}
    driver = subprocess.Popen(
        [sys.executable, str(script), str(Path(__file__).parents[2] / "testbeds")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=dict(os.environ) | mark,
        cwd=tmp_path,
    )
    try:
        assert any("running" in line for line in driver.stdout)
        assert spark_cluster.leftovers(within_s=0) != [], "the check below would find nothing"
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
    assert spark_cluster.leftovers() == []


def test_a_job_leaves_no_trace_in_the_next_one():
    """Ranks are forked from warm processes; changes that a training makes to its process must not leak."""

    def vandal():
        import os
        import sys

        import torch

        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.manual_seed(7)
        os.environ["LEFT_BEHIND"] = "1"
        sys.modules["left_behind"] = torch

    def witness():
        import os
        import random
        import sys

        import numpy
        import torch

        import horovod.torch as hvd

        hvd.init()
        state = torch.get_default_dtype() is torch.float32, torch.is_grad_enabled()
        left = "LEFT_BEHIND" in os.environ, "left_behind" in sys.modules
        return state, left, hvd.allgather_object((numpy.random.rand(), random.random(), torch.initial_seed()))

    HorovodRunner(np=2).run(vandal)
    first, second = HorovodRunner(np=2).run(witness), HorovodRunner(np=2).run(witness)
    assert first[:2] == second[:2] == ((True, True), (False, False))
    # Every rank of every job has different random numbers.
    for generator in zip(*first[2], *second[2], strict=True):
        assert len(set(generator)) == 4


def test_modules_that_only_the_driver_has_travel(tmp_path, monkeypatch):
    module, package = tmp_path / "lone_module.py", tmp_path / "lone_package"
    module.write_text("value = 1")
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("value = 10")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("lone_module")
    monkeypatch.undo()  # ranks of this machine would find the folder

    def main():
        import lone_module
        from lone_package import part

        return lone_module.value + part.value

    with pytest.raises(JobFailedError, match=r"module lone_module, .*py_files=\['.*/lone_module.py'\]") as failure:
        HorovodRunner(np=2).run(main)
    assert isinstance(failure.value.__cause__, ModuleNotFoundError)
    path = list(sys.path)
    assert HorovodRunner(np=2, py_files=[module, package]).run(main) == 11
    module.write_text("value = 2")
    assert HorovodRunner(np=2, py_files=[module, package]).run(main) == 12
    assert sys.path == path
    with pytest.raises(ValueError, match=r"there is no .*absent.py"):
        HorovodRunner(np=2, py_files="absent.py")


def test_files_of_the_application_are_found_in_ranks(spark, tmp_path_factory):
    words = tmp_path_factory.getbasetemp() / "words.txt"  # Spark serves it until the session ends
    words.write_text("hello")
    spark.sparkContext.addFile(str(words))
    with zipfile.ZipFile(words.with_name("many.zip"), "w") as archive:
        archive.writestr("inside.txt", " you")
    spark.sparkContext.addArchive(f"{words.with_name('many.zip')}#many")

    def main():
        from pyspark import SparkFiles

        with open(SparkFiles.get("words.txt")) as file, open(SparkFiles.get("many/inside.txt")) as inside:
            return file.read() + inside.read()

    assert HorovodRunner(np=2).run(main) == "hello you"


def test_udfs_do_not_run_in_workers_with_a_fork_server(spark):
    def of_task(_):
        import os
        import sys

        return "HORA_SPARK_WORKER" in os.environ, "hora.launch.providers.spark.warm_pool" in sys.modules

    HorovodRunner(np=2).run(lambda: None)
    assert spark.sparkContext.parallelize(range(2), 2).map(of_task).collect() == [(False, False)] * 2


@contextlib.contextmanager
def _when_shown(text, act):
    """Call `act` once when the text is first printed."""

    class Watch(io.StringIO):
        def write(self, data):
            if text in data and not done.is_set():
                done.set()
                threading.Thread(target=act).start()
            return len(data)

    done = threading.Event()
    with contextlib.redirect_stdout(Watch()):
        yield
    assert done.is_set()
