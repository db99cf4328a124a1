"""Loads the penguins as arrays, prepared by Spark (`spark_steps`) or, here, by pandas; both return the same rows."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from hora.labs.penguins import steps
from hora.labs.penguins.steps import FEATURES

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import SparkSession

__all__ = ["FEATURES", "load_penguins", "prepare", "read"]


def load_penguins(csv: str | Path | None = None, *, spark: SparkSession | None = None) -> steps.Penguins:
    """Read and prepare the penguins: with Spark DataFrames if a session is given, else with pandas."""
    if spark is None:
        train, test, islands, species = prepare(read(csv))
    else:
        from hora.labs.penguins import spark_steps

        *frames, islands, species = spark_steps.prepare(spark_steps.read(spark, csv))
        train, test = (frame.toPandas() for frame in frames)
    return steps.Penguins(
        train=steps.examples_of(train),
        test=steps.examples_of(test),
        islands=islands,
        species=steps.species_names(species),
        prepared_by="pandas" if spark is None else f"Spark {spark.version}",
    )


def read(csv: str | Path | None) -> pd.DataFrame:
    """Return the lab's columns as text."""
    import pandas as pd

    path = csv if csv is not None else steps.package_csv()
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    names = steps.lab_names(frame.columns, str(path))
    frame = frame[list(names)].rename(columns=names)[list(steps.COLUMNS)]
    return frame.apply(lambda column: column.str.strip(" "))


def prepare(raw: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, tuple[str, ...], tuple[str, ...]]:
    """Return (train, test, islands, species) from the lab's columns as text."""
    import pandas as pd

    complete = raw[~raw.isin(steps.MISSING).any(axis=1)]
    islands = steps.by_frequency(complete["Island"].value_counts().items())
    species = steps.by_frequency(complete[steps.LABEL].value_counts().items())
    ready = complete.assign(key=_keys(complete))
    for column in steps.NUMBERS:
        ready[column] = _numbers(complete[column]) / steps.DIVISORS.get(column, 1.0)
    ready["Island"] = complete["Island"].map(islands.index).astype("float64")
    ready[steps.LABEL] = complete[steps.LABEL].map(species.index).astype("int64")
    ready = ready.sort_values("key", kind="stable")
    last_train_key = ready["key"].iloc[steps.num_train(len(ready)) - 1]
    train = pd.concat([ready[ready["key"] <= last_train_key]] * steps.COPIES)
    test = ready[ready["key"] > last_train_key]
    return _columns(train), _columns(test), islands, species


def _keys(rows: pd.DataFrame) -> list[str]:
    texts = ("|".join((str(steps.SEED), *values)) for values in rows.itertuples(index=False, name=None))
    return [hashlib.sha256(text.encode()).hexdigest() for text in texts]


def _numbers(column: pd.Series) -> pd.Series:
    wrong = column[~column.str.match(steps.NUMBER_PATTERN)]
    if len(wrong):
        raise steps.not_a_number(str(column.name), wrong.iloc[0])
    return column.astype("float64")


def _columns(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[list(steps.COLUMNS)].reset_index(drop=True)
