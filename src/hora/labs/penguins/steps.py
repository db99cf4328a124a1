"""Preparation of the penguins data: the steps' definitions, columns and results, shared by both implementations.

`data` (pandas) and `spark_steps` implement the steps, with the same rows in the same order:
1. read every column as text, under the lab's names; 2. drop rows with missing values;
3. index island and species by frequency, ties by name; 4. flipper / 10, mass / 100; 5. split 70/30;
6. oversample the training rows.

The split orders rows by a hash of (seed, the row's text), so it needs no row number, is the same in pandas and Spark,
and puts identical birds on the same side. Only training rows are repeated, so no copy of a test bird is trained on.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FEATURES = ("Island", "CulmenLength", "CulmenDepth", "FlipperLength", "BodyMass")
LABEL = "Species"
COLUMNS = (*FEATURES, LABEL)
NUMBERS = FEATURES[1:]
SEED = 0  # of the split
TRAIN_FRACTION = 0.7
COPIES = 4  # of every training row
DIVISORS = {"FlipperLength": 10.0, "BodyMass": 100.0}
MISSING = ("", "NA", "NaN", "nan", "null", "None")
NUMBER_PATTERN = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"

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


def package_csv() -> Path:
    """Return the CSV of the installed `palmerpenguins` package, without importing it."""
    spec = importlib.util.find_spec("palmerpenguins")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "data" / "penguins.csv"
        if path.exists():
            return path
    raise ValueError(
        f"no penguin data: pip install palmerpenguins, or pass a CSV with the columns {', '.join(COLUMNS)}"
    )


def lab_names(header: Iterable[str], source: str) -> dict[str, str]:
    """Map a file's columns to the lab's: {file's name: lab's name}."""
    found = {name: _PACKAGE_NAMES.get(name.strip().lower(), name.strip()) for name in header}
    chosen = {name: lab for name, lab in found.items() if lab in COLUMNS}
    missing = [lab for lab in COLUMNS if lab not in chosen.values()]
    if missing:
        raise ValueError(
            f"{source} has no column {', '.join(missing)}; it needs {', '.join(COLUMNS)} and has {', '.join(found)}"
        )
    return chosen


def num_train(num_rows: int) -> int:
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


def not_a_number(column: str, value: str) -> ValueError:
    """Return the error for text in a number column."""
    return ValueError(
        f"column {column} holds {value!r}, which is not a number; correct the row or leave the value empty"
    )


def examples_of(frame: Any) -> Examples:
    """Return the arrays of a pandas frame with the lab's columns."""
    return Examples(frame[list(FEATURES)].to_numpy(dtype=np.float32), frame[LABEL].to_numpy(dtype=np.int64))
