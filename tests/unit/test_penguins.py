"""Preparation of the penguin data: the lab's steps, in pandas. (tests/integration compares it with Spark.)"""

import numpy as np
import pytest

from hora.labs.penguins.data import COLUMNS, by_frequency, load_penguins, read, species_names

HEADER = "Island,CulmenLength,CulmenDepth,FlipperLength,BodyMass,Species\n"


def _csv(tmp_path, rows, header=HEADER):
    path = tmp_path / "penguins.csv"
    path.write_text(header + "\n".join(rows) + "\n")
    return path


def test_steps_of_the_lab():
    raw = read(None)
    assert len(raw) == 344
    data = load_penguins()
    num_complete = 342
    assert len(data.test) == num_complete - int(num_complete * 0.7)
    assert len(data.train) == 4 * int(num_complete * 0.7)
    assert data.islands == ("Biscoe", "Dream", "Torgersen")
    assert data.species == ("Adelie", "Gentoo", "Chinstrap")
    assert data.train.features.dtype == np.float32
    assert data.train.features.shape[1] == 5
    flipper, mass = data.train.features[:, 3], data.train.features[:, 4]
    assert 17 < flipper.min() < flipper.max() < 24
    assert 26 < mass.min() < mass.max() < 64


def test_no_test_row_is_in_the_training_set():
    data = load_penguins()
    train = {tuple(row) for row in data.train.features.tolist()}
    assert not any(tuple(row) in train for row in data.test.features.tolist())


def test_the_seed_determines_the_split(monkeypatch):
    first, again = load_penguins(), load_penguins()
    monkeypatch.setattr("hora.labs.penguins.data.SEED", 1)
    other = load_penguins()
    assert np.array_equal(first.train.features, again.train.features)
    assert not np.array_equal(first.train.features, other.train.features)


def test_copies_are_concatenated():
    rows = load_penguins().train.features
    assert np.array_equal(rows, np.concatenate([rows[: len(rows) // 4]] * 4))


def test_codes_in_the_csv_become_names(tmp_path):
    rows = [f"{i % 2},4{i}.5,17,18{i},370{i},{i % 3}" for i in range(8)]
    data = load_penguins(_csv(tmp_path, rows))
    assert data.species == ("Adelie", "Gentoo", "Chinstrap")
    assert len(data.test) == 3


def test_incomplete_rows_are_dropped(tmp_path):
    rows = ["Dream,40,17,180,3700,Adelie", "Dream,,17,180,3700,Adelie", "Dream,41,NA,180,3700,Adelie"]
    rows += ["Biscoe,50,15,220,5000,Gentoo", "Biscoe,51,15,221,5000,Gentoo"]
    data = load_penguins(_csv(tmp_path, rows))
    assert data.num_train_birds + len(data.test) == 3


def test_a_missing_column_is_named(tmp_path):
    path = _csv(tmp_path, ["Dream,40"], header="Island,CulmenLength\n")
    with pytest.raises(ValueError, match=r"has no column CulmenDepth, FlipperLength, BodyMass, Species"):
        load_penguins(path)


def test_text_in_a_number_column_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"column BodyMass holds 'heavy', which is not a number"):
        load_penguins(_csv(tmp_path, ["Dream,40,17,180,heavy,Adelie", "Dream,41,17,180,3000,Adelie"]))


def test_too_few_rows(tmp_path):
    with pytest.raises(ValueError, match="1 complete rows cannot be split"):
        load_penguins(_csv(tmp_path, ["Dream,40,17,180,3700,Adelie"]))


def test_without_the_package_the_error_names_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install palmerpenguins"):
        load_penguins()


def test_categories_are_ordered_by_frequency_then_name():
    assert by_frequency([("b", 2), ("a", 2), ("c", 9)]) == ("c", "a", "b")
    assert species_names(("Adelie", "Gentoo")) == ("Adelie", "Gentoo")
    assert len(COLUMNS) == 6
