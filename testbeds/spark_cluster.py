"""A real Spark standalone cluster for tests and benchmarks: a master and workers as child processes, on loopback only.

`StandaloneCluster` is a context manager, not a fixture (see `conftest.py`), and does not depend on Hora.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pyspark

_START_LIMIT_S = 240.0
# Daemons end with the process that started them, even if that is killed, as by an interrupted `make test`.
_ENDS_WITH_US = ("setpriv", "--pdeathsig", "TERM", "--")
# Java that starts fast instead of running fast: these processes live for minutes and compute nothing.
_QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class StandaloneCluster:
    """A master and `num_workers` workers with `cores` cores each. `url`: for `SparkSession.builder.master`. `python`:
    the interpreter whose Spark is used and which runs the tasks. `several_hosts`: each worker has its own address.
    """

    def __init__(
        self,
        *,
        num_workers: int = 2,
        cores: int = 1,
        memory: str = "1g",
        settings: Mapping[str, str] | None = None,
        python: str = sys.executable,
        several_hosts: bool = False,
    ) -> None:
        self.url = ""
        self._several_hosts = several_hosts
        self._python = python
        self._settings = dict(settings or {})
        self._num_workers = num_workers
        self._cores = cores
        self._memory = memory
        self._processes: list[subprocess.Popen[str]] = []
        self._directory = Path(tempfile.mkdtemp(prefix="spark-cluster-"))
        self.name = self._directory.name

    def __enter__(self) -> StandaloneCluster:
        try:
            self._start_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start_all(self) -> None:
        file = self._directory / "spark.conf"
        file.write_text("".join(f"{key} {value}\n" for key, value in self._settings.items()))
        ports = ("--port", "0", "--webui-port", "0", "--properties-file", str(file))
        size = ("--cores", str(self._cores), "--memory", self._memory)
        self.url = self._start("master.Master", "--host", "127.0.0.1", *ports, found=r"master at (spark://\S+)")()
        waits = []
        for index in range(self._num_workers):
            work = ("--work-dir", str(self._directory / f"work{index}"))
            host = f"127.0.0.{1 + index * self._several_hosts}"
            arguments = ("--host", host, *ports, *size, *work, self.url)
            waits.append(self._start("worker.Worker", *arguments, found=r"(Successfully registered) with"))
        for wait in waits:
            wait()

    def __exit__(self, *exc_info: object) -> None:
        # Workers first: on SIGTERM each ends its executors, and these end their Python workers.
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=20)
        shutil.rmtree(self._directory, ignore_errors=True)

    def executors(self) -> list[psutil.Process]:
        """Return the executors' Java processes."""
        return [process for process in self._family() if "CoarseGrainedExecutorBackend" in _command(process)]

    def leftovers(self, *, within_s: float = 20.0) -> list[str]:
        """Wait until no process of Hora runs on the cluster; return those still running after `within_s`."""
        deadline = time.monotonic() + within_s
        while True:
            found = [_command(process) for process in self._family() if _is_horas(process)]
            if not found or time.monotonic() > deadline:
                return found
            threading.Event().wait(0.05)

    def _family(self) -> Iterator[psutil.Process]:
        # By environment, not by parent, so that orphans are found too.
        for process in psutil.process_iter():
            try:
                if f"SPARK_TEST_CLUSTER={self.name}".encode() in Path(
                    f"/proc/{process.pid}/environ"
                ).read_bytes().split(b"\0"):
                    yield process
            except OSError:  # it ended meanwhile
                continue

    def _start(self, name: str, *arguments: str, found: str, memory: str = "256m") -> Callable[[], str]:
        """Start one daemon. The returned function waits until its log shows `found` and returns the match."""
        spark_class = spark_home(self._python) / "bin" / "spark-class"
        process = subprocess.Popen(
            [*_ENDS_WITH_US, str(spark_class), f"org.apache.spark.deploy.{name}", *arguments],
            env=cluster_environment(self._python)
            | {
                "SPARK_LOCAL_DIRS": str(self._directory),
                "SPARK_TEST_CLUSTER": self.name,
                "SPARK_DAEMON_MEMORY": memory,
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=self._directory,
        )
        self._processes.append(process)
        matched = threading.Event()
        lines: list[str] = []
        reader = threading.Thread(
            target=_follow, args=(process, found, lines, matched), name=f"log of {name}", daemon=True
        )
        reader.start()

        def wait() -> str:
            if not matched.wait(_START_LIMIT_S) or not lines[-1].startswith("\0"):
                raise RuntimeError(
                    f"Spark's {name} did not start within {_START_LIMIT_S:g} s; its log:\n" + "".join(lines)
                )
            return lines[-1][1:]

        return wait


class ConnectServer(StandaloneCluster):
    """A Spark Connect server with its own two task slots. `url`: for `SparkSession.builder.remote`.

    `environment`: of the client.
    """

    def _start_all(self) -> None:
        settings = {
            "spark.master": "local[2]",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": "0",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "1g",
            "spark.driver.extraJavaOptions": _QUICK_JAVA,
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.codegen.wholeStage": "false",
            "spark.sql.warehouse.dir": str(self._directory / "warehouse"),
            **self._settings,
        }
        self.environment = {k: v for k, v in os.environ.items() if k not in ("SPARK_REMOTE", "SPARK_HOME")}
        chosen = [part for key, value in settings.items() for part in ("--conf", f"{key}={value}")]
        server = "org.apache.spark.sql.connect.service.SparkConnectServer"
        found = r"Spark Connect server started at: [\d.]+:(\d+)"
        arguments = ("--class", server, *chosen, "spark-internal")
        port = self._start("SparkSubmit", *arguments, found=found, memory="1g")()
        self.url = f"sc://127.0.0.1:{port}"


class LocalConnect(StandaloneCluster):
    """Spark Connect with its server inside the client's process: `remote("local[2]")`, as in Spark's tutorials."""

    def _start_all(self) -> None:
        settings = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.driver.memory": "1g",
            "spark.driver.extraJavaOptions": f"'{_QUICK_JAVA}'",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(self._directory / "warehouse"),
        }
        self.url = "local[2]"
        self.environment = cluster_environment(self._python) | {
            "SPARK_TEST_CLUSTER": self.name,
            "SPARK_LOCAL_DIRS": str(self._directory),
            "SPARK_TESTING": "1",  # picks a free port instead of 15002
            "PYSPARK_SUBMIT_ARGS": " ".join(f"--conf {key}={value}" for key, value in settings.items())
            + " pyspark-shell",
        }


def _is_horas(process: psutil.Process) -> bool:
    try:
        # Ranks are forked from Spark's Python workers and keep their command line, but have their own process name.
        forked = Path(f"/proc/{process.pid}/comm").read_text().startswith("hora-")
    except OSError:  # it ended meanwhile
        return False
    return (forked or "hora.launch" in _command(process).replace("/", ".")) and not _stands_by(process)


def _stands_by(process: psutil.Process) -> bool:
    """Whether the process is a warm standby (`providers.spark.warm_pool`) of a living Python worker of Spark: it exits
    with that worker.
    """
    try:
        parent = process.parent()
        return process.name() == "hora-warm" and parent is not None and "pyspark.daemon" in _command(parent)
    except psutil.Error:  # it ended meanwhile
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it ended meanwhile
        return ""


def _follow(process: subprocess.Popen[str], found: str, lines: list[str], matched: threading.Event) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if matched.is_set():
            continue  # read on, so that the daemon never blocks on a full pipe
        lines.append(line)
        if match := re.search(found, line):
            lines.append("\0" + match.group(1))
            matched.set()
    matched.set()


def connect_python() -> str | None:
    """Return the interpreter whose Spark has a Connect server: this one, unless its pyspark package lacks the server,
    as Spark 3's does.

    Otherwise return HORA_TEST_CONNECT_SERVER, whose Spark may be newer than the client's, or None if it is not set.
    """
    if any((spark_home(sys.executable) / "jars").glob("spark-connect_*.jar")):
        return sys.executable
    return os.environ.get("HORA_TEST_CONNECT_SERVER") or None


@functools.cache
def spark_home(python: str) -> Path:
    """Return the directory of this interpreter's Spark."""
    if python == sys.executable:
        return Path(pyspark.__file__).parent
    code = "import importlib.util; print(importlib.util.find_spec('pyspark').origin)"
    return Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()).parent


def cluster_environment(python: str = sys.executable) -> dict[str, str]:
    """Return the environment of Spark's own processes: loopback, and `python` for Python workers."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "HORA_"))}
    environment["SPARK_LOCAL_IP"] = "127.0.0.1"
    environment["PYSPARK_PYTHON"] = python
    environment["SPARK_NO_DAEMONIZE"] = "1"
    environment["SPARK_DAEMON_JAVA_OPTS"] = _QUICK_JAVA
    return environment


@contextlib.contextmanager
def spark_session(master: str, *, keep_java: bool = False, **conf: str) -> Iterator[object]:
    """The driver's SparkSession on `master`, with small limits, stopped at the end.

    `keep_java`: keep the JVM for a following session.
    """
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName("hora tests")
    defaults = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.driver.memory": "1g",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.codegen.wholeStage": "false",  # compiling a query takes longer than a test's few rows
        "spark.sql.warehouse.dir": tempfile.gettempdir() + "/hora-warehouse",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": _QUICK_JAVA,
        "spark.executor.extraJavaOptions": _QUICK_JAVA,
    }
    for key, value in (defaults | conf).items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    gateway = session.sparkContext._gateway
    try:
        yield session
    finally:
        session.stop()
        if not keep_java:
            _end_java(gateway)


def _end_java(gateway: Any) -> None:
    """End the JVM, which by design outlives its session."""
    process = gateway.proc
    gateway.shutdown()
    process.stdin.close()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
    from pyspark import SparkContext

    SparkContext._gateway = SparkContext._jvm = None
