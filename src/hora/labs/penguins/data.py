"""Loads the penguins as arrays, prepared by pandas or by Spark: the same rows in the same order.

The steps: 1. read every column as text, under the lab's names; 2. drop rows with missing values;
3. index island and species by frequency, ties by name; 4. flipper / 10, mass / 100; 5. split 70/30;
6. oversample the training rows.

The split orders rows by a hash of (seed, the row's text), so it needs no row number, is the same in pandas and Spark,
and puts identical birds on the same side. Only training rows are repeated, so no copy of a test bird is trained on.
"""

from __future__ import annotations

import csv as csv_reader
import hashlib
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession

FEATURES = ("Island", "CulmenLength", "CulmenDepth", "FlipperLength", "BodyMass")
LABEL = "Species"
COLUMNS = (*FEATURES, LABEL)
NUMBERS = FEATURES[1:]
SEED = 0  # of the split
TRAIN_FRACTION = 0.7
COPIES = 4  # of every training row
DIVISORS = {"FlipperLength": 10.0, "BodyMass": 100.0}
_MISSING = ("", "NA", "NaN", "nan", "null", "None")
_NUMBER_PATTERN = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"

# The palmerpenguins package's names of the lab's columns.
_PACKAGE_NAMES = {
    "island": "Island",
    "bill_length_mm": "CulmenLength",
    "bill_depth_mm": "CulmenDepth",
    "flipper_length_mm": "FlipperLength",
    "body_mass_g": "BodyMass",
    "species": "Species",
}
# Some copies of the lab's CSV contain codes instead of names.
_SPECIES_CODES = {"0": "Adelie", "1": "Gentoo", "2": "Chinstrap"}


@dataclass(frozen=True)
class Examples:
    """Observations as arrays: float32 features (one column per name in FEATURES) and int64 labels."""

    features: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True)
class Penguins:
    """Training and test rows, and the names of the island and species numbers."""

    train: Examples
    test: Examples
    islands: tuple[str, ...]
    species: tuple[str, ...]
    prepared_by: str

    @property
    def num_train_birds(self) -> int:
        """Number of distinct rows among the oversampled training rows."""
        return len(np.unique(self.train.features, axis=0))


def load_penguins(csv: str | Path | None = None, *, spark: SparkSession | None = None) -> Penguins:
    """Read and prepare the penguins: with Spark DataFrames if a session is given, else with pandas."""
    if spark is None:
        *frames, islands, species = prepare(read(csv))
    else:
        train, test, islands, species = prepare_in_spark(read_in_spark(spark, csv))
        frames = [train.toPandas(), test.toPandas()]
    features, labels = ([frame[name] for frame in frames] for name in (list(FEATURES), LABEL))
    examples = [Examples(x.to_numpy(np.float32), y.to_numpy(np.int64)) for x, y in zip(features, labels, strict=True)]
    return Penguins(
        train=examples[0],
        test=examples[1],
        islands=islands,
        species=species_names(species),
        prepared_by="pandas" if spark is None else f"Spark {spark.version}",
    )


# ---- pandas ----------------------------------------------------------------------------------------------------------


def read(csv: str | Path | None) -> pd.DataFrame:
    """Return the lab's columns as text."""
    import pandas as pd

    path = csv if csv is not None else _package_csv()
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    frame = frame.rename(columns=_lab_names(frame.columns, path))[list(COLUMNS)]
    return frame.apply(lambda column: column.str.strip(" "))


def prepare(raw: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, tuple[str, ...], tuple[str, ...]]:
    """Return (train, test, islands, species) from the lab's columns as text."""
    import pandas as pd

    complete = raw[~raw.isin(_MISSING).any(axis=1)]
    islands = by_frequency(complete["Island"].value_counts().items())
    species = by_frequency(complete[LABEL].value_counts().items())
    texts = ("|".join((str(SEED), *values)) for values in complete.itertuples(index=False, name=None))
    ready = complete.assign(key=[hashlib.sha256(text.encode()).hexdigest() for text in texts])
    for name in NUMBERS:
        wrong = ready[name][~ready[name].str.match(_NUMBER_PATTERN)]
        _check_number(name, wrong.iloc[0] if len(wrong) else None)
        ready[name] = ready[name].astype("float64") / DIVISORS.get(name, 1.0)
    ready["Island"] = ready["Island"].map(islands.index).astype("float64")
    ready[LABEL] = ready[LABEL].map(species.index).astype("int64")
    ready = ready.sort_values("key", kind="stable")
    last_train_key = ready["key"].iloc[_num_train(len(ready)) - 1]
    train = pd.concat([ready[ready["key"] <= last_train_key]] * COPIES)
    test = ready[ready["key"] > last_train_key]
    train, test = (rows[list(COLUMNS)].reset_index(drop=True) for rows in (train, test))
    return train, test, islands, species


# ---- Spark -----------------------------------------------------------------------------------------------------------


def read_in_spark(spark: SparkSession, csv: str | Path | None) -> DataFrame:
    """Return the same as `read`. The package's CSV is read on the driver: executors may lack the package."""
    from pyspark.sql import functions as sql

    if csv is None:
        with _package_csv().open(newline="") as file:
            header, *lines = csv_reader.reader(file)
        frame = spark.createDataFrame(lines, header)
    else:
        frame = spark.read.csv(str(csv), header=True)
    column_of = {new: old for old, new in _lab_names(frame.columns, csv or _package_csv()).items()}
    return frame.select(*(sql.trim(frame[f"`{column_of[new]}`"]).alias(new) for new in COLUMNS))


def prepare_in_spark(raw: DataFrame) -> tuple[DataFrame, DataFrame, tuple[str, ...], tuple[str, ...]]:
    """Return the same as `prepare`."""
    from pyspark.sql import functions as sql

    def names(column: str) -> tuple[str, ...]:
        return by_frequency((name, count) for name, count in complete.groupBy(column).count().collect())

    def position(column: str, names: Sequence[str]) -> Any:
        # Not array_position: before Spark 4 it does not accept a column as the value.
        return sql.coalesce(*(sql.when(sql.col(column) == name, index) for index, name in enumerate(names)))

    present = (sql.col(name).isNotNull() & ~sql.col(name).isin(*_MISSING) for name in COLUMNS)
    text = sql.concat_ws("|", sql.lit(str(SEED)), *COLUMNS)
    complete = raw.where(reduce(lambda a, b: a & b, present)).withColumn("key", sql.sha2(text, 256)).cache()
    try:
        texts = (sql.when(~sql.col(name).rlike(_NUMBER_PATTERN), sql.col(name)) for name in NUMBERS)
        num_rows, *wrong = complete.agg(sql.count("*"), *map(sql.min, texts)).collect()[0]
        for name, value in zip(NUMBERS, wrong, strict=True):
            _check_number(name, value)
        islands, species = names("Island"), names(LABEL)
        first_keys = complete.select("key").orderBy("key").limit(_num_train(num_rows))
        last_train_key = first_keys.agg(sql.max("key")).collect()[0][0]
    finally:
        complete.unpersist()
    ready = complete.select(
        "key",
        position("Island", islands).cast("double").alias("Island"),
        *((sql.col(name).cast("double") / DIVISORS.get(name, 1.0)).alias(name) for name in NUMBERS),
        position(LABEL, species).cast("long").alias(LABEL),
    )
    copy = raw.sparkSession.range(COPIES).withColumnRenamed("id", "copy")
    train = ready.where(sql.col("key") <= last_train_key).crossJoin(copy).orderBy("copy", "key")
    test = ready.where(sql.col("key") > last_train_key).orderBy("key")
    return train.select(*COLUMNS), test.select(*COLUMNS), islands, species


# ---- both ------------------------------------------------------------------------------------------------------------


def _package_csv() -> Path:
    """Return the CSV of the installed `palmerpenguins` package, without importing it."""
    spec = importlib.util.find_spec("palmerpenguins")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "data" / "penguins.csv"
        if path.exists():
            return path
    raise ValueError(
        f"no penguin data: pip install palmerpenguins, or pass a CSV with the columns {', '.join(COLUMNS)}"
    )


def _lab_names(header: Iterable[str], source: str | Path) -> dict[str, str]:
    """Map a file's columns to the lab's: {file's name: lab's name}."""
    found = {name: _PACKAGE_NAMES.get(name.strip().lower(), name.strip()) for name in header}
    missing = [lab for lab in COLUMNS if lab not in found.values()]
    if missing:
        raise ValueError(
            f"{source} has no column {', '.join(missing)}; it needs {', '.join(COLUMNS)} and has {', '.join(found)}"
        )
    return {name: lab for name, lab in found.items() if lab in COLUMNS}


def _num_train(num_rows: int) -> int:
    """Return the number of distinct rows for training."""
    count = int(num_rows * TRAIN_FRACTION)
    if not 0 < count < num_rows:
        raise ValueError(f"{num_rows} complete rows cannot be split {TRAIN_FRACTION:.0%} / rest; add more rows")
    return count


def by_frequency(counts: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Return names, the most frequent first, ties in alphabetical order: a name's position is its index."""
    return tuple(name for name, _ in sorted(counts, key=lambda item: (-item[1], item[0])))


def species_names(values: Sequence[str]) -> tuple[str, ...]:
    """Return the species of a column's values: codes become names, names stay."""
    if all(value in _SPECIES_CODES for value in values):
        return tuple(_SPECIES_CODES[value] for value in values)
    return tuple(values)


def _check_number(column: str, wrong: str | None) -> None:
    """Raise ValueError if a number column holds text, `wrong`."""
    if wrong is not None:
        raise ValueError(
            f"column {column} holds {wrong!r}, which is not a number; correct the row or leave the value empty"
        )
