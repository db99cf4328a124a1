"""Loads the penguins as arrays, prepared by pandas or by Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hora.labs.penguins.steps import FEATURES, Penguins, Preparation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["FEATURES", "load_penguins"]


def load_penguins(
    csv: str | Path | None = None, *, spark: SparkSession | None = None, preparation: Preparation | None = None
) -> Penguins:
    """Read and prepare the penguins: with Spark DataFrames if a session is given, else with pandas."""
    chosen = preparation or Preparation()
    if spark is not None:
        from hora.labs.penguins import spark_steps

        return spark_steps.load(spark, csv, chosen)
    from hora.labs.penguins import pandas_steps

    return pandas_steps.load(csv, chosen)
