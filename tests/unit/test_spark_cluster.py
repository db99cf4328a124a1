"""Which Spark is there, and which is refused."""

from __future__ import annotations

import pytest

from hora.launch.spark import cluster


class ConnectSession:
    """Stands in for Spark Connect's session, whose module cannot be imported without its extra packages."""

    __module__ = "pyspark.sql.connect.session"


def test_a_connect_session_is_refused_with_a_way_out(monkeypatch):
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    monkeypatch.setattr(SparkSession, "getActiveSession", ConnectSession)
    with pytest.raises(ValueError, match=r"Spark Connect.*classic mode.*on this machine"):
        cluster.active_context()


def test_no_session_is_no_context(monkeypatch):
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)
    assert cluster.active_context() is None
