"""A Ray cluster on this machine for all tests of a file: a head node and a second node, each a set of processes.

The nodes share one address, so each also has a resource of its own (`node:host-1`, …) that identifies it as a host.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from waiting import wait_until

# Drop a silent node after about 10 seconds instead of Ray's 30.
_IMPATIENT = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 4,
    "worker_register_timeout_seconds": 300,  # a busy machine is slow to start processes
}
_STORE_BYTES = 80_000_000


class RayCluster:
    """Use as a context manager; this process becomes the driver. `address`: for further drivers.

    `by_value`: modules whose functions are pickled by value, like those of a notebook.
    """

    def __init__(self, num_nodes: int = 2, cpus: int = 2, gpus: int = 4, by_value: Sequence[str] = ()) -> None:
        self._num_nodes, self._cpus, self._gpus = num_nodes, cpus, gpus
        self._by_value = [*by_value, "ray_training"]
        self._last_node = 0

    def __enter__(self) -> RayCluster:
        import ray
        from ray.cluster_utils import Cluster

        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        self._cluster = Cluster()
        self.add_node(num_gpus=self._gpus, include_dashboard=False, _system_config=_IMPATIENT)
        for _ in range(self._num_nodes - 1):
            self.add_node()
        self.address = self._cluster.address
        for name in self._by_value:
            ray.cloudpickle.register_pickle_by_value(importlib.import_module(name))
        ray.init(address=self.address, log_to_driver=False, logging_level="warning")
        return self

    def add_node(self, **options: Any) -> Any:
        self._last_node += 1
        own = {"num_cpus": self._cpus, "resources": {f"node:host-{self._last_node}": 1}}
        return self._cluster.add_node(object_store_memory=_STORE_BYTES, **{**own, **options})

    @contextlib.contextmanager
    def another_node(self) -> Iterator[tuple[str, Any]]:
        """Add a node for the duration of the block; yield its host name and Ray's node object."""
        node = self.add_node()
        try:
            yield f"host-{self._last_node}", node
        finally:
            self._cluster.remove_node(node, allow_graceful=False)

    def __exit__(self, *_: object) -> None:
        import ray

        ray.shutdown()
        for name in self._by_value:
            ray.cloudpickle.unregister_pickle_by_value(sys.modules[name])
        self._cluster.shutdown()


def nothing_is_left() -> None:
    """Wait until Ray lists no living actor and no placement group."""
    wait_until("all actors have ended", lambda: not living_actors())
    wait_until("all placement groups are gone", lambda: not living_groups())


def living_actors() -> list[int]:
    """Return the processes of all actors that are running or pending, but for those that Ray Data keeps for itself."""
    from ray._private.state import actors

    found = [facts for facts in actors().values() if facts["State"] != "DEAD"]
    return [facts["Pid"] for facts in found if not facts.get("ActorClassName", "").startswith("_")]


def living_groups() -> list[str]:
    from ray.util import placement_group_table

    return [facts["state"] for facts in placement_group_table().values() if facts["state"] != "REMOVED"]
