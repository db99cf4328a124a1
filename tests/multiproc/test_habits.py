"""The matrix of habits: every cell equals one process or is rejected with an explanation. `make test-habits`."""

from __future__ import annotations

import pytest
from habits import COLUMNS, ROWS, compare

import horovod.torch as hvd

# The cells that `make test` runs; `make test-habits` runs the others.
QUICK = {
    "plain": (
        "HooksAfter",
        "TwoOptimizers",
        "RankDependentUse",
        "PassesSetInTheMiddle",
        "GroupAddedInTheMiddle",
        "StateLoadedInTheMiddle",
        "SchedulerMadeFirst",
    ),
    "sharded": (
        "Clipping",
        "ChannelsLast",
        "FreezeAndThaw",
        "PassesSetInTheMiddle",
        "GroupAddedInTheMiddle",
        "StateLoadedInTheMiddle",
        "StepHook",
        "SteppedTwice",
        "ClearedInPlace",
        "MomentumSwitchedOn",
        "SchedulerMadeFirst",
    ),
    "per step": ("ExponentialMovingAverage", "Schedulers", "StateLoadedInTheMiddle"),
    "int8": ("ScalerInfinityOnOneRank",),
    "PowerSGD": ("ScalerInfinityEverywhere", "UnusedParameters"),
    "LocalSGD": ("ScalerInfinityOnOneRank", "Float64"),
    "DiLoCo": ("AddedGroup", "TwoOptimizers"),
    "DES-LOC": ("FreezeAndThaw", "UnusedParameters"),
}


def cells(*, between_hosts: bool):
    for name, column in COLUMNS.items():
        if column.between_hosts is between_hosts:
            for row in ROWS:
                marks = [] if row in QUICK[name] else [pytest.mark.slow]
                yield pytest.param(name, row, id=f"{name}, {row}", marks=marks)


def check(column: str, row: str) -> None:
    hvd.init()
    try:
        compare(ROWS[row], COLUMNS[column])
        hvd.barrier()
    finally:
        hvd.shutdown()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("column", "row"), list(cells(between_hosts=False)))
def test_on_one_host(column, row):
    check(column, row)


@pytest.mark.ranks(2, env={"HORA_TRANSPORT": "tcp", "HORA_NATIVE": "0"})
@pytest.mark.parametrize("column", ["plain", "LocalSGD", "DiLoCo", "DES-LOC"])
def test_between_hosts_without_the_native_part(column):
    check(column, "Plain")


@pytest.mark.ranks(2, env={"HORA_TRANSPORT": "tcp"})
@pytest.mark.parametrize(("column", "row"), list(cells(between_hosts=True)))
def test_between_hosts(column, row):
    check(column, row)
