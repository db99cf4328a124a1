"""Each mutant of restore, sync, vote and copy is noticed by a training that fails and recovers."""

from __future__ import annotations

import pytest
from hvd_session import session
from test_per_step import Training as StepByStep
from test_per_step import assert_same
from test_recovery import FRONTS, Training, assert_close

import horovod.torch as hvd
from mutants import OF_COMMITS, OF_SLICES, OF_STEPS, mutated

pytestmark = pytest.mark.ranks(2)

BROKEN = hvd.HorovodInternalError("injected")


def assert_noticed(name, train, compare) -> None:
    """Check that a training with the mutant `name` differs from one that never failed, on some rank."""
    wanted, said = train(False), ""
    try:
        with mutated(name):
            compare(train(True), wanted)
    except (AssertionError, RuntimeError, ValueError) as error:
        said = repr(error)
    assert any(hvd.allgather_object(said)), f"nothing notices that {name}"


@pytest.mark.parametrize("name", OF_COMMITS)
def test_a_training_that_goes_back_to_a_commit_notices(name):
    faults = {(7, "unscaled"): BROKEN, (9, "pass"): BROKEN, (13, "updated"): BROKEN, (15, "pass"): BROKEN}

    def train(is_disturbed):
        return Training(FRONTS["plain"], faults if is_disturbed else {}, (1, 4, 8, 11)).run()

    session(lambda: assert_noticed(name, train, lambda found, wanted: assert_close(found, wanted, 1e-6)))()


@pytest.mark.parametrize("name", OF_STEPS)
def test_a_training_that_goes_back_to_the_last_step_notices(name):
    """One rank misses a step that the other has applied; a later step fails on both in the middle of backward."""
    _check_steps(name, {2: [1], 4: "backward"}, {3: "between", 4: "between"})


@pytest.mark.parametrize("name", OF_SLICES)
def test_a_training_of_slices_notices(name):
    """All ranks have stepped their slices, but none knows that the others have: the step is rolled back."""
    _check_steps(name, {2: [0, 1]}, {2: "between"}, sharded=True)


def _check_steps(name, faults, same, **options):
    def train(is_disturbed):
        return StepByStep(faults if is_disturbed else same, **options).run()

    session(lambda: assert_noticed(name, train, assert_same))()
