"""The penguin lab's preparation in Spark: the same rows as from `penguins_pandas`. Called by `penguins`.

Everything up to the last step stays distributed; only the finished rows are collected.
"""

from __future__ import annotations

import csv as csv_reader
from collections import Counter
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from hora.labs import penguin_data as lab

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = ["load", "prepare", "read"]


def read(spark: SparkSession, csv: str | Path | None) -> DataFrame:
    """The lab's columns as text. The package's CSV is read on the driver: executors may lack the package."""
    from pyspark.sql import functions as sql

    if csv is None:
        with lab.package_csv().open(newline="") as file:
            header, *lines = csv_reader.reader(file)
        frame = spark.createDataFrame(lines, header)
    else:
        frame = spark.read.csv(str(csv), header=True)
    names = lab.lab_names(frame.columns, str(csv or lab.package_csv()))
    column_of = {new: old for old, new in names.items()}
    return frame.select(*(sql.trim(frame[f"`{column_of[new]}`"]).alias(new) for new in lab.COLUMNS))


def prepare(raw: DataFrame, steps: lab.Preparation) -> tuple[DataFrame, DataFrame, tuple[str, ...], tuple[str, ...]]:
    """(train, test, islands, species) from the lab's columns as text."""
    from pyspark.sql import functions as sql

    present = (sql.col(name).isNotNull() & ~sql.col(name).isin(*lab.MISSING) for name in lab.COLUMNS)
    text = sql.concat_ws("|", sql.lit(str(steps.seed)), *lab.COLUMNS)
    complete = raw.where(reduce(lambda a, b: a & b, present)).withColumn("key", sql.sha2(text, 256)).cache()
    try:
        islands, species, num_rows = _survey(complete)
        num_train = steps.num_train(num_rows)
        first_keys = complete.select("key").orderBy("key").limit(num_train)
        last_train_key = first_keys.agg(sql.max("key")).collect()[0][0]
    finally:
        complete.unpersist()
    values = [sql.col(name).cast("double") / lab.DIVISORS.get(name, 1.0) for name in lab.NUMBERS]
    ready = complete.select(
        "key",
        _position("Island", islands).cast("double").alias("Island"),
        *(value.alias(name) for value, name in zip(values, lab.NUMBERS, strict=True)),
        _position(lab.LABEL, species).cast("long").alias(lab.LABEL),
    )
    copy = raw.sparkSession.range(steps.copies).withColumnRenamed("id", "copy")
    train = ready.where(sql.col("key") <= last_train_key).crossJoin(copy).orderBy("copy", "key")
    test = ready.where(sql.col("key") > last_train_key).orderBy("key")
    return train.select(*lab.COLUMNS), test.select(*lab.COLUMNS), islands, species


def load(spark: SparkSession, csv: str | Path | None, steps: lab.Preparation) -> lab.Penguins:
    """Read, prepare, and hand over arrays."""
    train, test, islands, species = prepare(read(spark, csv), steps)
    return lab.Penguins(
        train=lab.rows_of(train.toPandas()),
        test=lab.rows_of(test.toPandas()),
        islands=islands,
        species=lab.species_names(species),
        prepared_by=f"Spark {spark.version}",
    )


def _survey(rows: DataFrame) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Islands and species, the most frequent first, and the number of rows, in one job.

    ValueError if a number column holds text.
    """
    from pyspark.sql import functions as sql

    wrong = (
        sql.min(sql.when(~sql.col(name).rlike(lab.NUMBER_PATTERN), sql.col(name))).alias(name) for name in lab.NUMBERS
    )
    groups = rows.groupBy("Island", lab.LABEL).agg(sql.count("*").alias("num_rows"), *wrong).collect()
    for name in lab.NUMBERS:
        for group in groups:
            if group[name] is not None:
                raise lab.not_a_number(name, group[name])
    counts = {column: Counter[str]() for column in ("Island", lab.LABEL)}
    for group in groups:
        for column, counter in counts.items():
            counter[group[column]] += group["num_rows"]
    islands, species = (lab.by_frequency(counter.items()) for counter in counts.values())
    return islands, species, sum(group["num_rows"] for group in groups)


def _position(column: str, names: tuple[str, ...]) -> Column:
    from pyspark.sql import functions as sql

    return sql.array_position(sql.array(*(sql.lit(name) for name in names)), sql.col(column)) - 1
