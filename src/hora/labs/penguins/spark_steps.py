"""The penguins lab's preparation in Spark; returns the same rows as pandas in `data`."""

from __future__ import annotations

import csv as csv_reader
from collections import Counter
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from hora.labs.penguins import steps

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


def read(spark: SparkSession, csv: str | Path | None) -> DataFrame:
    """Return the lab's columns as text. The package's CSV is read on the driver: executors may lack the package."""
    from pyspark.sql import functions as sql

    if csv is None:
        with steps.package_csv().open(newline="") as file:
            header, *lines = csv_reader.reader(file)
        frame = spark.createDataFrame(lines, header)
    else:
        frame = spark.read.csv(str(csv), header=True)
    names = steps.lab_names(frame.columns, str(csv or steps.package_csv()))
    column_of = {new: old for old, new in names.items()}
    return frame.select(*(sql.trim(frame[f"`{column_of[new]}`"]).alias(new) for new in steps.COLUMNS))


def prepare(raw: DataFrame) -> tuple[DataFrame, DataFrame, tuple[str, ...], tuple[str, ...]]:
    """Return (train, test, islands, species) from the lab's columns as text."""
    from pyspark.sql import functions as sql

    present = (sql.col(name).isNotNull() & ~sql.col(name).isin(*steps.MISSING) for name in steps.COLUMNS)
    text = sql.concat_ws("|", sql.lit(str(steps.SEED)), *steps.COLUMNS)
    complete = raw.where(reduce(lambda a, b: a & b, present)).withColumn("key", sql.sha2(text, 256)).cache()
    try:
        islands, species, num_rows = _survey(complete)
        first_keys = complete.select("key").orderBy("key").limit(steps.num_train(num_rows))
        last_train_key = first_keys.agg(sql.max("key")).collect()[0][0]
    finally:
        complete.unpersist()
    values = [sql.col(name).cast("double") / steps.DIVISORS.get(name, 1.0) for name in steps.NUMBERS]
    ready = complete.select(
        "key",
        _position("Island", islands).cast("double").alias("Island"),
        *(value.alias(name) for value, name in zip(values, steps.NUMBERS, strict=True)),
        _position(steps.LABEL, species).cast("long").alias(steps.LABEL),
    )
    copy = raw.sparkSession.range(steps.COPIES).withColumnRenamed("id", "copy")
    train = ready.where(sql.col("key") <= last_train_key).crossJoin(copy).orderBy("copy", "key")
    test = ready.where(sql.col("key") > last_train_key).orderBy("key")
    return train.select(*steps.COLUMNS), test.select(*steps.COLUMNS), islands, species


def _survey(rows: DataFrame) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Return islands and species, the most frequent first, and the number of rows; ValueError for invalid numbers."""
    from pyspark.sql import functions as sql

    wrong = (
        sql.min(sql.when(~sql.col(name).rlike(steps.NUMBER_PATTERN), sql.col(name))).alias(name)
        for name in steps.NUMBERS
    )
    groups = rows.groupBy("Island", steps.LABEL).agg(sql.count("*").alias("num_rows"), *wrong).collect()
    for name in steps.NUMBERS:
        for group in groups:
            if group[name] is not None:
                raise steps.not_a_number(name, group[name])
    counts = {column: Counter[str]() for column in ("Island", steps.LABEL)}
    for group in groups:
        for column, counter in counts.items():
            counter[group[column]] += group["num_rows"]
    islands, species = (steps.by_frequency(counter.items()) for counter in counts.values())
    return islands, species, sum(group["num_rows"] for group in groups)


def _position(column: str, names: tuple[str, ...]) -> Column:
    from pyspark.sql import functions as sql

    # Not array_position: before Spark 4 it does not accept a column as the value.
    return sql.coalesce(*(sql.when(sql.col(column) == name, index) for index, name in enumerate(names)))
