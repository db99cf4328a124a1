"""Shared fixtures: one standalone Spark cluster and one SparkSession for the whole test run.

The cluster has two workers with one core each. Tests that kill executors must wait until both slots are free
again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
from job_process import kill_what_is_left
from spark_cluster import StandaloneCluster, spark_session


@pytest.fixture(autouse=True)
def _every_job_ends_with_its_test() -> Iterator[None]:
    yield
    kill_what_is_left()


@pytest.fixture(scope="session")
def spark_cluster() -> Iterator[StandaloneCluster]:
    with StandaloneCluster(num_workers=2, cores=1) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def spark(spark_cluster: StandaloneCluster) -> Iterator[Any]:
    """The only SparkSession of the test run, on the standalone cluster. Functions of test modules are pickled by
    value."""
    with spark_session(spark_cluster.url, **{"spark.decommission.enabled": "true"}) as session:
        yield session


@pytest.fixture
def by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Pickle functions and classes of the test module by value, like those of a notebook."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)
