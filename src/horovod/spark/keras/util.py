"""Models as text, under the old module name. Re-exports only."""

from hora.spark.keras.packing import TFKerasUtil

__all__ = ["TFKerasUtil"]
