"""Public exceptions are sent from workers to the caller, so they survive pickling."""

from __future__ import annotations

import pickle

import pytest

from hora import errors


@pytest.mark.parametrize(
    "error",
    [
        errors.JobFailedError("why", rank=1, exit_code=2, remote_traceback="Traceback …", log_tail="last line"),
        errors.HorovodVersionMismatchError("torch", "2.3", "2.4"),
        errors.HostsUpdatedInterrupt(skip_sync=True),
        errors.HorovodInternalError("rank 1 is lost"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_public_exceptions_survive_pickling(error, protocol):
    found = pickle.loads(pickle.dumps(error, protocol))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)
