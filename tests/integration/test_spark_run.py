"""`horovod.spark.run` on a real standalone cluster."""

from __future__ import annotations

import inspect
import io
import os
import sys

import pytest

import horovod.spark
from hora.errors import StartTimeoutError
from horovod.spark import conf

pytestmark = pytest.mark.spark


def test_every_ranks_result_in_rank_order(spark):
    def fn(base, *, factor):

        return base + factor * int(os.environ["HOROVOD_RANK"]), os.environ["HOROVOD_HOSTNAME"]

    results = horovod.spark.run(fn, args=(10,), kwargs={"factor": 5})
    assert [value for value, _ in results] == [10, 15]  # two ranks: Spark's default parallelism
    assert len({host for _, host in results}) == 1


def test_streams_get_prefixed_lines_and_ranks_only_the_given_env(spark, monkeypatch):
    monkeypatch.setenv("ONLY_IN_THE_DRIVER", "1")

    def fn():
        import sys

        print("out", os.environ.get("GIVEN"), os.environ.get("ONLY_IN_THE_DRIVER"))
        print("err", file=sys.stderr)

    stdout, stderr = io.StringIO(), io.StringIO()
    horovod.spark.run(fn, num_proc=2, env={"GIVEN": "yes"}, stdout=stdout, stderr=stderr)
    assert sorted(stdout.getvalue().splitlines()) == [f"[{rank}]<stdout>:out yes None" for rank in (0, 1)]
    assert sorted(stderr.getvalue().splitlines()) == [f"[{rank}]<stderr>:err" for rank in (0, 1)]


def test_ranks_use_the_given_executable(spark, tmp_path):
    wrapper = tmp_path / "my-python"
    wrapper.write_text(f'#!/bin/sh\nMY_PYTHON=1 exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)

    def fn():

        return os.environ.get("MY_PYTHON")

    assert horovod.spark.run(fn, num_proc=1, executable=str(wrapper)) == ["1"]


def test_too_few_slots_raise_an_error_at_once(spark):
    tracker = spark.sparkContext.statusTracker()
    before = tracker.getJobIdsForGroup(None)
    # Uses the default start timeout of ten minutes: the error must not wait for it.
    with pytest.raises(StartTimeoutError, match=r"^Timed out waiting for Spark tasks to start\..*need 4 .* has 2"):
        horovod.spark.run(lambda: None, num_proc=4)
    assert tracker.getJobIdsForGroup(None) == before
    assert horovod.spark.run(lambda: 1, num_proc=2) == [1, 1]


def test_a_failing_rank_is_a_runtime_error_with_name_and_code(spark):
    def fn():

        if os.environ["HOROVOD_RANK"] == "1":
            raise OSError("no such shard")
        return 0

    with pytest.raises(RuntimeError, match=r"(?s)Process name: 1.*Exit code: 1") as caught:
        horovod.spark.run(fn, num_proc=2, verbose=0)
    assert "no such shard" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


def test_the_job_runs_in_its_own_group(spark, monkeypatch):
    groups = []
    set_group = spark.sparkContext.setJobGroup

    def noted(group, *more, **named):
        groups.append(group)
        set_group(group, *more, **named)

    monkeypatch.setattr(spark.sparkContext, "setJobGroup", noted)
    assert horovod.spark.run(lambda: 3, num_proc=2) == [3, 3]
    (group,) = groups
    prefix, _, number = group.rpartition(".")
    assert prefix == "horovod.spark.run"
    assert number.isdigit()
    assert spark.sparkContext.statusTracker().getJobIdsForGroup(group), "Spark knows of no job of this group"


def test_no_devices_where_spark_has_none(spark):
    def fn():
        from horovod.spark.task import get_available_devices

        return get_available_devices()

    assert horovod.spark.run(fn, num_proc=2) == [[], []]


def test_invalid_arguments_raise_helpful_errors(spark):
    with pytest.raises(ValueError, match="num_proc must be an integer"):
        horovod.spark.run(lambda: None, num_proc=0)
    with pytest.raises(ValueError, match="fn must be a function"):
        horovod.spark.run("fn")
    with pytest.raises(ValueError, match="MPI"):
        horovod.spark.run(lambda: None, use_mpi=True)


def test_a_missing_spark_context_is_reported(monkeypatch):
    from pyspark import SparkContext

    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    with pytest.raises(Exception, match="Could not find an active SparkContext"):
        horovod.spark.run(lambda: None)


def test_signature():
    assert list(inspect.signature(horovod.spark.run).parameters) == [
        "fn",
        "args",
        "kwargs",
        "num_proc",
        "start_timeout",
        "use_mpi",
        "use_gloo",
        "extra_mpi_args",
        "env",
        "stdout",
        "stderr",
        "verbose",
        "nics",
        "prefix_output_with_timestamp",
        "executable",
    ]


def test_conf_pairs_are_valid_spark_settings(spark):
    found = [getattr(conf, name) for name in dir(conf) if name.startswith("SPARK_CONF_")]
    pairs = [pair for pair in found if isinstance(pair, tuple)]
    assert {key for key, _ in pairs} == set(conf.SPARK_CONF_DEFAULT_VALUES)
    entries = spark.sparkContext._jvm.org.apache.spark.internal.config.ConfigEntry
    for key in conf.SPARK_CONF_DEFAULT_VALUES:
        assert entries.findEntry(key) is not None, f"Spark knows no setting {key}"
