"""Fifty random programs of collectives in several threads, compared with a reference; in five, a rank dies.
Some random trainings, compared with one process.

A failing program is shrunk by the command named in the failure. `make fuzz` runs many more.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from stress.generate import generate
from stress.player import play_and_judge
from trainings import generate as generate_training
from trainings import play

LIMIT_S = 120.0


def _play(seed: int, folder: object, victim: int | None = None) -> None:
    num_ranks = int(os.environ["HOROVOD_SIZE"])
    try:
        play_and_judge(generate(seed, num_ranks, victim=victim).to_text(), str(folder), LIMIT_S)
    except AssertionError as wrong:
        death = "" if victim is None else f" --victim {victim}"
        command = f"python tests/fuzz/engine.py --seed {seed} --ranks {num_ranks}{death}"
        raise AssertionError(f"{wrong}\n\nto see it again, and shrunk: {command}") from None


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.ranks(2, 3, 4)
def test_program(seed, tmp_path):
    _play(seed, tmp_path)


@pytest.mark.parametrize("seed", [100, 101])
@pytest.mark.ranks(3, lost=(0,))
def test_rank_0_dies(seed, tmp_path):
    _play(seed, tmp_path, victim=0)


@pytest.mark.parametrize("seed", [102, 103, 104])
@pytest.mark.ranks(3, lost=(2,))
def test_rank_2_dies(seed, tmp_path):
    _play(seed, tmp_path, victim=2)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.ranks(3)
def test_training(seed):
    """Run the first random trainings of `tests/fuzz/trainings.py` that fit on three ranks of one host."""
    play(replace(generate_training(seed, ("one host",)), num_ranks=3).to_text())
