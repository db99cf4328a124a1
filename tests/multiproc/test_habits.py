"""The matrix of habits: every cell equals one process or is rejected with an explanation. `make test-habits`."""

from __future__ import annotations

import pytest
from habits import COLUMNS, ROWS, Row, compare
from torch import nn

import horovod.torch as hvd

# What programs do to the memory of parameters and gradients.
MEMORY = (
    "GradientsGivenData", "ParametersGivenData", "Converted", "SharedByTorch", "SentThroughAQueue", "KeptGradients",
    "CellCalledTwice",
)  # fmt: skip
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
        *MEMORY,
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
        *MEMORY,
    ),
    "per step": ("ExponentialMovingAverage", "Schedulers", "StateLoadedInTheMiddle", "KeptGradients"),
    "int8": ("ScalerInfinityOnOneRank", "KeptGradients"),
    "PowerSGD": ("ScalerInfinityEverywhere", "UnusedParameters", "SharedByTorch"),
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


class Wide(Row):
    """A bucket of which each rank reduces a slice, in the memory of all."""

    def model(self):
        return nn.Sequential(nn.Linear(6, 80), nn.Tanh(), nn.Linear(80, 600), nn.Tanh(), nn.Linear(600, 3))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("row", MEMORY)
def test_on_one_host_in_slices(row):
    hvd.init()
    try:
        compare(type(f"Wide{row}", (Wide, ROWS[row]), {}), COLUMNS["plain"])
        hvd.barrier()
    finally:
        hvd.shutdown()


@pytest.mark.ranks(2, env={"HORA_TRANSPORT": "tcp", "HORA_NATIVE": "0"})
@pytest.mark.parametrize("column", ["plain", "LocalSGD", "DiLoCo", "DES-LOC"])
def test_between_hosts_without_the_native_part(column):
    check(column, "Plain")


@pytest.mark.ranks(2, env={"HORA_TRANSPORT": "tcp"})
@pytest.mark.parametrize(("column", "row"), list(cells(between_hosts=True)))
def test_between_hosts(column, row):
    check(column, row)
