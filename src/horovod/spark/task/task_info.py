"""What a function can ask about its Spark task, under the older name. Re-exports only."""

from hora.launch.spark.variables import assigned_gpus as get_available_devices

__all__ = ["get_available_devices"]
