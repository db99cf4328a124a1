"""The penguin lab's preparation in pandas: the same rows as from `penguins_spark`. Called by `penguins`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from hora.labs import penguin_data as lab

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["load", "prepare", "read"]


def read(csv: str | Path | None) -> pd.DataFrame:
    """The lab's columns as text."""
    import pandas as pd

    path = csv if csv is not None else lab.package_csv()
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    names = lab.lab_names(frame.columns, str(path))
    frame = frame[list(names)].rename(columns=names)[list(lab.COLUMNS)]
    return frame.apply(lambda column: column.str.strip(" "))


def prepare(
    raw: pd.DataFrame, steps: lab.Preparation
) -> tuple[pd.DataFrame, pd.DataFrame, tuple[str, ...], tuple[str, ...]]:
    """(train, test, islands, species) from the lab's columns as text."""
    complete = raw[~raw.isin(lab.MISSING).any(axis=1)]
    islands = lab.by_frequency(complete["Island"].value_counts().items())
    species = lab.by_frequency(complete[lab.LABEL].value_counts().items())
    ready = complete.assign(key=_keys(complete, steps.seed))
    for column in lab.NUMBERS:
        ready[column] = _numbers(complete[column]) / lab.DIVISORS.get(column, 1.0)
    ready["Island"] = complete["Island"].map(islands.index).astype("float64")
    ready[lab.LABEL] = complete[lab.LABEL].map(species.index).astype("int64")
    ready = ready.sort_values("key", kind="stable")
    last_train_key = ready["key"].iloc[steps.num_train(len(ready)) - 1]
    train = ready[ready["key"] <= last_train_key]
    test = ready[ready["key"] > last_train_key]
    return _oversampled(train, steps.copies), _columns(test), islands, species


def load(csv: str | Path | None, steps: lab.Preparation) -> lab.Penguins:
    """Read, prepare, and hand over arrays."""
    train, test, islands, species = prepare(read(csv), steps)
    return lab.Penguins(
        train=lab.rows_of(train),
        test=lab.rows_of(test),
        islands=islands,
        species=lab.species_names(species),
        prepared_by="pandas",
    )


def _keys(rows: pd.DataFrame, seed: int) -> list[str]:
    texts = ("|".join((str(seed), *values)) for values in rows.itertuples(index=False, name=None))
    return [hashlib.sha256(text.encode()).hexdigest() for text in texts]


def _numbers(column: pd.Series) -> pd.Series:
    wrong = column[~column.str.match(lab.NUMBER_PATTERN)]
    if len(wrong):
        raise lab.not_a_number(str(column.name), wrong.iloc[0])
    return column.astype("float64")


def _oversampled(rows: pd.DataFrame, copies: int) -> pd.DataFrame:
    import pandas as pd

    return _columns(pd.concat([rows] * copies))


def _columns(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[list(lab.COLUMNS)].reset_index(drop=True)
