"""Autotune races settings in rounds: a clear winner or the default is chosen, identically on all ranks."""

from __future__ import annotations

import random

import pytest

from hora.config import EngineConfig
from hora.torch.optimizer.autotune import DEFAULT, Autotuner, Setting

MB = 2**20
ALL = Setting(200 * MB, overlap=True)
LATE = Setting(4 * MB, overlap=False)
SETTINGS = (DEFAULT, *(Setting(size * MB, overlap=True) for size in (1, 16, 64)), ALL, LATE)
FLAT = dict.fromkeys(SETTINGS, 100.0)


def _tuner(*, num_bytes=200 * MB, num_members=2, **options):
    config = EngineConfig(**{f"autotune_{name}": value for name, value in options.items()})
    return Autotuner(config, tells=True, num_bytes=num_bytes, num_members=num_members)


def _tune(times_ms, *, noise=lambda: 0.0, num_members=2, **options):
    """Tune a model of 200 MB whose step takes `times_ms[setting]`; return the tuner and the settings it tried."""
    tuner = _tuner(num_members=num_members, **options)
    tried = []
    while not tuner.done:
        tried.append(tuner.setting)
        while (mine := tuner.step(times_ms[tuner.setting] / 1e3 * (1 + noise()))) is None:
            pass
        tuner.record([num_members, num_members * mine])
    return tuner, tried


def _moods(seed):
    """Return the noise of a machine whose steps vary by 5 % and which is occasionally half as fast for some steps."""
    chance, slow_steps = random.Random(seed), 0

    def noise():
        nonlocal slow_steps
        if slow_steps == 0 and chance.random() < 0.01:
            slow_steps = chance.randrange(5, 40)
        slow_steps = max(slow_steps - 1, 0)
        return chance.uniform(0, 0.05) + (1.0 if slow_steps else 0.0)

    return noise


@pytest.mark.parametrize("best", SETTINGS, ids=str)
def test_the_best_setting_is_found(best):
    assert _tune(FLAT | {best: 80.0})[0].setting == best


def test_a_gain_below_two_per_cent_keeps_the_default():
    assert _tune(FLAT | {ALL: 98.5})[0].setting == DEFAULT


def test_a_noisy_machine_finds_clear_gains_and_is_never_clearly_worse_than_the_default():
    better, worse = FLAT | {ALL: 94.0}, dict.fromkeys(SETTINGS, 104.0) | {DEFAULT: 100.0}
    assert sum(_tune(better, noise=_moods(seed))[0].setting == ALL for seed in range(50)) >= 45
    assert all(_tune(worse, noise=_moods(seed))[0].setting == DEFAULT for seed in range(50))


def test_noise_alone_keeps_the_default():
    assert all(_tune(FLAT, noise=_moods(seed))[0].setting == DEFAULT for seed in range(50))


def test_it_warms_up_then_races_in_alternating_rounds_and_stops():
    _, tried = _tune(FLAT | {ALL: 80.0, LATE: 90.0}, warmup_samples=2)
    field = list(SETTINGS)
    assert tried[:14] == [DEFAULT] * 2 + field + [DEFAULT, ALL, LATE, *SETTINGS[1:4]][::-1]
    assert tried[14:20] == [DEFAULT, ALL, LATE, LATE, ALL, DEFAULT]
    assert tried[20:] == [DEFAULT, ALL]
    assert len(tried) == 2 + 20


@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 50])
def test_trials_stay_within_the_limit(most):
    tuner, tried = _tune(FLAT, warmup_samples=0, max_samples=most)
    assert len(tried) <= most
    assert tuner.setting == DEFAULT


def test_a_small_model_has_one_bucket_and_nothing_to_tune():
    tuner = _tuner(num_bytes=MB // 2)
    assert tuner.done
    assert tuner.setting == DEFAULT


def test_a_rank_that_has_joined_ends_tuning_with_the_best_setting_so_far():
    tuner = _tuner(num_members=3, warmup_samples=0, steps_per_sample=1)
    tuner.record([3, 3000])
    assert tuner.setting != DEFAULT
    tuner.record([2, 2000])
    assert tuner.done
    assert tuner.setting == DEFAULT


def test_the_log_has_horovods_columns_and_ends_with_the_best_setting(tmp_path):
    log = tmp_path / "log.csv"
    _tune(FLAT | {LATE: 50.0}, log=str(log), max_samples=6, warmup_samples=1)
    header, *rows = log.read_text().splitlines()
    assert header == (
        "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,"
        "tensor_fusion_threshold,score,overlap"
    )
    assert len(rows) == 7
    assert rows[-1] == rows[5] == "0,0,0,1,0,4,4194.3,0"
