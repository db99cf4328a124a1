"""Detection of stragglers from waiting times alone: named when persistent, released on recovery."""

from __future__ import annotations

import random

import pytest

from hora.watch.model import Run
from simulated_run import Simulation, Slowness


def _watched(simulation: Simulation, duration_s: float) -> tuple[Run, dict[float, list[int]]]:
    """Return the run, and the ranks that it named in each second."""
    run, named, second = Run(simulation.facts), {}, 1.0
    for entry in simulation.entries(duration_s):
        run.apply(entry)
        if entry.at - run.began >= second:
            run.look(entry.at)
            named[second] = [straggler.rank for straggler in run.stragglers]
            second += 1.0
    return run, named


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_rank_that_is_a_fifth_slower_is_the_only_one_named_within_ten_seconds(seed, num_ranks):
    guilty = random.Random(seed).randrange(num_ranks)
    slow = Slowness(guilty, 1.2, part="data", begin=20.0)
    simulation = Simulation(num_ranks=num_ranks, slow=[slow], seed=seed, noise=0.05)
    _, named = _watched(simulation, 40.0)
    assert not any(named[second] for second in named if second < 20.0)
    assert all(named[second] == [guilty] for second in named if second >= 30.0)


def test_the_description_of_a_straggler():
    slow = Slowness(5, 1.31, part="data", begin=20.0)
    run, _ = _watched(Simulation(slow=[slow]), 60.0)
    (straggler,) = run.stragglers
    assert straggler.rank == 5
    assert straggler.slowdown == pytest.approx(1.31, abs=0.03)
    assert straggler.lateness == pytest.approx(0.31 / 1.31, abs=0.05)
    assert straggler.main_part == "data"
    assert straggler.excess["data"] > 0.9
    assert straggler.since - run.began == pytest.approx(20.0, abs=3.0)


@pytest.mark.parametrize("part", ["forward", "backward", "between", "optimizer"])
def test_the_slow_part_of_a_step_is_named(part):
    run, _ = _watched(Simulation(slow=[Slowness(1, 1.4, part=part)]), 30.0)
    assert [straggler.main_part for straggler in run.stragglers] == [part]


def test_two_of_four_may_be_slow():
    _, named = _watched(Simulation(num_ranks=4, slow=[Slowness(0, 1.3), Slowness(3, 1.4)]), 20.0)
    assert set(named[19.0]) == {0, 3}


def test_a_straggler_that_recovers_is_released():
    _, named = _watched(Simulation(slow=[Slowness(2, 1.3, begin=10.0, end=30.0)]), 60.0)
    assert named[25.0] == [2]
    assert named[45.0] == []


def test_one_long_step_is_no_straggler():
    """Rank 0 writes a checkpoint."""
    _, named = _watched(Simulation(slow=[Slowness(0, 12.0, part="forward", begin=20.0, end=20.2)]), 60.0)
    assert not any(named.values())


def test_noise_alone_names_no_rank():
    for seed in range(10):
        _, named = _watched(Simulation(noise=0.15, seed=seed), 60.0)
        assert not any(named.values())
