"""Autotune: every size is tried in turns, the best one wins clearly or the default stays, and all ranks decide the same."""

from __future__ import annotations

import random

import pytest

from hora.torch.optimizer.autotune import Autotuner, TuningOptions

MB = 2**20


def _tune(times_ms, *, noise=0.0, num_members=2, seed=0, **options):
    """Tune a model of 200 MB whose step takes `times_ms[bucket size]`; the tuner, and the sizes that were tried."""
    tuner = Autotuner(TuningOptions(**options), num_bytes=200 * MB, num_members=num_members)
    chance, tried = random.Random(seed), []
    while not tuner.done:
        tried.append(tuner.bucket_bytes)
        while (mine := tuner.step(times_ms[tuner.bucket_bytes] / 1e3 * (1 + chance.uniform(0, noise)))) is None:
            pass
        tuner.take([num_members, num_members * mine])
    return tuner, tried


FLAT = {4 * MB: 100.0, MB: 100.0, 16 * MB: 100.0, 64 * MB: 100.0, 200 * MB: 100.0}


def test_the_best_size_is_found():
    tuner, _ = _tune(FLAT | {16 * MB: 80.0})
    assert tuner.bucket_bytes == 16 * MB


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_does_not_move_the_default(seed):
    assert _tune(FLAT, noise=0.05, seed=seed)[0].bucket_bytes in (4 * MB, *FLAT)
    assert _tune(FLAT, noise=0.01, seed=seed)[0].bucket_bytes == 4 * MB


@pytest.mark.parametrize("seed", range(20))
def test_a_tenth_is_found_in_noise(seed):
    assert _tune(FLAT | {64 * MB: 90.0}, noise=0.05, seed=seed)[0].bucket_bytes == 64 * MB


def test_it_warms_up_then_tries_in_turns_and_stops():
    _, tried = _tune(FLAT, warmup_samples=2, max_samples=10)
    assert tried == [4 * MB] * 2 + [4 * MB, MB, 16 * MB, 64 * MB, 200 * MB] * 2


def test_a_small_model_has_one_bucket_and_nothing_to_tune():
    tuner = Autotuner(TuningOptions(), num_bytes=MB // 2, num_members=2)
    assert tuner.done
    assert tuner.bucket_bytes == MB // 2


def test_a_rank_that_has_joined_ends_it():
    tuner = Autotuner(TuningOptions(), num_bytes=200 * MB, num_members=3)
    tuner.take([2, 2000])
    assert tuner.done


def test_the_log_has_horovods_columns_and_ends_with_the_best(tmp_path):
    log = tmp_path / "log.csv"
    _tune(FLAT | {16 * MB: 50.0}, log_file=str(log), max_samples=5, warmup_samples=1)
    header, *rows = log.read_text().splitlines()
    assert header == (
        "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,"
        "tensor_fusion_threshold,score"
    )
    assert len(rows) == 6
    assert rows[-1] == rows[2] == "0,0,0,1,0,16,4194.3"
