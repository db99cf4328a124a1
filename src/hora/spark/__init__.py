"""Spark integration: HorovodRunner, `horovod.spark.run`, TorchDistributor and the estimators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hora.spark.distributor import TorchDistributor

__all__ = ["TorchDistributor"]


def __getattr__(name: str) -> Any:
    # Lazily: it needs pyspark, and local jobs of HorovodRunner do not.
    if name == "TorchDistributor":
        from hora.spark.distributor import TorchDistributor

        return TorchDistributor
    raise AttributeError(f"module 'hora.spark' has no attribute {name!r}")
