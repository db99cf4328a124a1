"""Detection of the Spark cluster, and rejection of unsupported ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hora.launch.providers.spark import cluster


class ConnectSession:
    """Replaces Spark Connect's session, whose module cannot be imported without its extra packages."""

    __module__ = "pyspark.sql.connect.session"


def test_a_connect_session_is_rejected_with_an_alternative(monkeypatch):
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    monkeypatch.setattr(SparkSession, "getActiveSession", ConnectSession)
    with pytest.raises(ValueError, match=r"Spark Connect.*classic mode.*on this machine"):
        cluster.active_context()


def test_the_context_of_a_connect_server_in_this_process_is_not_mistaken_for_a_classic_one(monkeypatch):
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    session = ConnectSession()
    monkeypatch.setattr(SparkContext, "_active_spark_context", SimpleNamespace(_jsc=object(), master="local[2]"))
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: session)
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    assert cluster.active_cluster() is session
    assert cluster.is_local(session)
    with pytest.raises(ValueError, match=r"Spark Connect.*classic mode"):
        cluster.active_context()


def test_without_a_session_there_is_no_context(monkeypatch):
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)
    assert cluster.active_context() is None


class Context:
    """Replaces a SparkContext whose executors register late."""

    master, applicationId = "spark://here:7077", "app"  # noqa: N815 - Spark's name
    startTime = 0  # noqa: N815 - long ago

    def __init__(self, **settings):
        self._settings = {name.replace("_", "."): value for name, value in settings.items()}

    def getConf(self):  # noqa: N802 - Spark's name
        return self._settings


def test_missing_executors_are_waited_for_with_a_message(monkeypatch, caplog):
    found = iter([0, 0, 0, 2])
    monkeypatch.setattr(cluster, "count_slots", lambda context, resources=None: next(found))
    monkeypatch.setattr(cluster, "_NOTICE_AFTER_S", 0.0)
    assert cluster.require_slots(Context(), 2) == 2
    assert "waiting for Spark executors to register with spark://here:7077: 0 of 2 task slots" in caplog.text


def test_after_the_first_executor_the_others_are_waited_for(monkeypatch):
    found = iter([0, 1, 1, 1, 2])
    monkeypatch.setattr(cluster, "count_slots", lambda context, resources=None: next(found))
    monkeypatch.setattr(cluster, "_most_seen", {})
    assert cluster.require_slots(Context(), 2) == 2


def test_a_lost_executor_is_waited_for_as_long_as_tasks_may_take_to_start(monkeypatch, caplog):
    found = iter([2, 1, 1, 2])
    monkeypatch.setattr(cluster, "count_slots", lambda context, resources=None: next(found))
    monkeypatch.setattr(cluster, "_most_seen", {})
    monkeypatch.setattr(cluster, "_NOTICE_AFTER_S", 0.0)
    assert cluster.require_slots(Context(), 2) == 2
    assert not caplog.text
    assert cluster.require_slots(Context(), 2) == 2
    assert "waiting for an executor in place of a lost one" in caplog.text
    assert "1 of 2 task slots are there, for 600 s more at most (HOROVOD_SPARK_START_TIMEOUT)" in caplog.text

    monkeypatch.setattr(cluster, "count_slots", lambda context, resources=None: 1)
    monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", "0.3")
    with pytest.raises(ValueError, match=r"np=2 .* has 1 .*waited 0 s for a lost executor \(HOROVOD_SPARK_START"):
        cluster.require_slots(Context(), 2)


def test_a_cluster_without_executors_times_out(monkeypatch):
    monkeypatch.setattr(cluster, "count_slots", lambda context, resources=None: 0)
    with pytest.raises(ValueError, match="no Spark executor has registered"):
        cluster.require_slots(Context(), 2, limit_s=0.2)


def test_too_few_slots_of_a_settled_cluster_are_an_error_at_once(monkeypatch):
    monkeypatch.setattr(cluster, "count_slots", lambda context, resources=None: 1)
    monkeypatch.setattr(cluster, "_most_seen", {})
    with pytest.raises(ValueError, match=r"np=2 .* has 1 .* use np=1"):
        cluster.require_slots(Context(), 2)


@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        ({}, (None, None)),
        ({"minExecutors": "1", "maxExecutors": "4"}, (2, 8)),
        ({"minExecutors": "0"}, (1, None)),
        ({"maxExecutors": "infinity"}, (None, None)),
    ],
)
def test_limits_of_dynamic_allocation(settings, limits):
    conf = {f"spark_dynamicAllocation_{name}": value for name, value in settings.items()}
    assert cluster.dynamic_limits(Context(**conf)) == (None, None)  # not enabled
    on = {"spark_dynamicAllocation_enabled": "true", "spark_executor_cores": "2", **conf}
    assert cluster.dynamic_limits(Context(**on)) == limits


@pytest.mark.parametrize("most", ["infinity", "4"])
def test_executors_on_demand_count_as_available(monkeypatch, most):
    conf = {"spark_dynamicAllocation_enabled": "true", "spark_executor_cores": "1"}
    context = Context(**conf, spark_dynamicAllocation_maxExecutors=most)
    monkeypatch.setattr(cluster, "count_slots", lambda context, resources=None: 1)
    assert cluster.require_slots(context, 4) == 4
    if most == "4":
        with pytest.raises(ValueError, match=r"np=5 .* has 4 .*maxExecutors=4"):
            cluster.require_slots(context, 5)


def test_loopback_stays_loopback():
    assert cluster.listening_address("127.0.0.1") == ("127.0.0.1", "127.0.0.1")
    assert cluster.listening_address("no-such-host.invalid") == ("0.0.0.0", "no-such-host.invalid")
