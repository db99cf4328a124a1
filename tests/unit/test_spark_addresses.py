"""The addresses on which the driver listens for its executors: no wider than Spark's own."""

from __future__ import annotations

import pytest

from hora.launch.providers.spark.cluster import driver_addresses


class Context:
    """Implements the two members of SparkContext that the code uses."""

    def __init__(self, master: str, **conf: str) -> None:
        self.master = master
        self._conf = {f"spark.driver.{name}": value for name, value in conf.items()}

    def getConf(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        return self._conf


@pytest.mark.parametrize(
    ("context", "addresses"),
    [
        (Context("local[4]", host="192.0.2.77"), ("127.0.0.1", "127.0.0.1")),
        (Context("spark://127.0.0.1:7077", host="127.0.0.1"), ("127.0.0.1", "127.0.0.1")),
        # A service's address in front of a pod, and a name that this machine cannot resolve.
        (Context("k8s://x", host="198.51.100.1"), ("0.0.0.0", "198.51.100.1")),
        (Context("k8s://x", host="driver.invalid"), ("0.0.0.0", "driver.invalid")),
        (Context("k8s://x", host="198.51.100.1", bindAddress="127.0.0.1"), ("127.0.0.1", "198.51.100.1")),
    ],
)
def test_addresses(context: Context, addresses: tuple[str, str]) -> None:
    assert driver_addresses(context) == addresses
