"""A name for the place whose processes can share memory. Re-exports only."""

from hora.launch.spark.task import host_hash

__all__ = ["host_hash"]
