"""What a function can ask about the Spark task that carries its rank. Re-exports only."""

from __future__ import annotations

from hora.launch.spark.variables import assigned_gpus as get_available_devices

__all__ = ["get_available_devices"]
