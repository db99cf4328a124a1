"""Jobs as citizens of Spark: names on its pages, its reasons, its shared variables, and no second driver."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import horovod.spark
from sparkdl import HorovodRunner
from waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("by_value")]


def last_job(spark):
    """Return the description of Spark's last job, and the name of its stage, as its pages show them."""
    store = spark.sparkContext._jsc.sc().statusStore()
    jobs = store.jobsList(None)
    job = max((jobs.apply(number) for number in range(jobs.size())), key=lambda job: job.jobId())
    return job.description().isDefined() and job.description().get(), store.lastStageAttempt(
        job.stageIds().apply(0)
    ).name()


def train_penguins():
    return "done"


def test_jobs_and_stages_are_named_by_function_line_and_ranks(spark):
    runner = HorovodRunner(np=2)
    assert runner.run(train_penguins) == "done"
    description, stage = last_job(spark)
    assert description.startswith("train_penguins (test_spark_citizens.py:")
    assert description.endswith("): 2 processes")
    assert stage == description.replace("2 processes", "ranks 0 to 1")
    horovod.spark.run(train_penguins, num_proc=1)
    assert last_job(spark)[0].startswith("train_penguins (test_spark_citizens.py:")
    spark.sparkContext.parallelize([1], 1).collect()
    assert last_job(spark)[1].startswith("collect at ")  # others' jobs have their own names


def test_a_broadcast_variable_has_its_value_in_ranks(spark):
    table = spark.sparkContext.broadcast({"a": [1, 2, 3]})

    def main():
        return sum(table.value["a"])

    assert HorovodRunner(np=2).run(main) == 6
    assert horovod.spark.run(lambda given: given.value["a"][0], args=(table,), num_proc=2) == [1, 1]
    table.destroy()


def test_an_accumulator_is_rejected_with_what_to_do(spark):
    counter = spark.sparkContext.accumulator(0)

    def main():
        counter.add(1)

    with pytest.raises(TypeError, match=r"accumulator of Spark.*hvd\.allreduce"):
        HorovodRunner(np=2).run(main)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_session_in_a_rank_is_an_error_instead_of_a_second_cluster(spark, is_loaded):
    def main(is_loaded):
        if is_loaded:
            import pyspark.core.context  # noqa: F401
        from pyspark.sql import SparkSession

        try:
            SparkSession.builder.master("local[1]").getOrCreate()
        except RuntimeError as error:
            return str(error)
        return "it has started a JVM"

    assert "a rank has no Spark" in HorovodRunner(np=2).run(main, is_loaded=is_loaded)


@pytest.mark.parametrize("begun", [True, False])
def test_a_cancelled_job_is_reported_with_sparks_reason_in_a_line(spark, begun, tmp_path):
    context, started = spark.sparkContext, threading.Event()

    def main(path):
        import pathlib
        import time

        pathlib.Path(path).touch()
        time.sleep(300)

    def hold(_):
        import time

        time.sleep(300)
        return iter(())

    with ThreadPoolExecutor() as threads:
        if not begun:  # another job has both slots
            threads.submit(lambda: started.set() or context.parallelize(range(2), 2).foreachPartition(hold))
            wait_until("the other job runs", lambda: len(context.statusTracker().getActiveJobsIds()) == 1, 60)
        job = threads.submit(HorovodRunner(np=2).run, main, path=str(tmp_path / "begun"))
        if begun:
            wait_until("a rank runs", (tmp_path / "begun").exists, 120)
        else:
            wait_until("the job waits", lambda: len(context.statusTracker().getActiveJobsIds()) == 2, 60)
        context.cancelAllJobs()
        with pytest.raises(RuntimeError, match=r"Job \d+ cancelled") as caught:
            job.result(120)
    reason = next(line for line in str(caught.value).splitlines() if "cancelled" in line)
    assert "cancelAllJobs" in reason or "cancellation of all jobs" in reason
    assert "at org.apache" not in str(caught.value)
