"""Finding the Spark that is there: the active session's classic SparkContext. Starts one only when asked to.

Called by `HorovodRunner` and `horovod.spark.run`, on the driver.
"""

from __future__ import annotations

from typing import Any

__all__ = ["active_context", "context_or_new"]


def active_context() -> Any | None:
    """The running SparkContext, or None. ValueError under Spark Connect, which has none."""
    try:
        from pyspark import SparkContext
    except ImportError as error:
        raise ImportError("running on Spark needs pyspark: pip install 'hora[spark]'") from error
    context = SparkContext._active_spark_context
    if context is not None and context._jsc is not None:
        return context
    _refuse_connect()
    return None


def context_or_new() -> Any:
    """The running SparkContext; a new session's where none runs (its master comes from Spark's
    configuration).
    """
    context = active_context()
    if context is not None:
        return context
    from pyspark.sql import SparkSession

    session = SparkSession.builder.appName("HorovodRunner").getOrCreate()
    _refuse_connect(session)
    return session.sparkContext


def _refuse_connect(session: Any = None) -> None:
    """A Connect client has no SparkContext: it cannot count slots or start a stage of plain tasks, and its
    executors
    have no settled way back to the machine it runs on."""
    if session is None:
        from pyspark.sql import SparkSession

        session = SparkSession.getActiveSession()
    if session is not None and type(session).__module__.startswith("pyspark.sql.connect"):
        raise ValueError(
            "this SparkSession is a Spark Connect client, and processes cannot be started through it: run "
            "the driver in classic mode (a master such as spark://host:7077 instead of sc://…, without "
            "SPARK_REMOTE), or use np=-n for processes on this machine"
        )
