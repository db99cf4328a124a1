"""A timeline on a full disk: a valid, shorter trace, and no error in training."""

import json
import resource

import pytest

from hora.events import Timeline


@pytest.fixture
def small_files():
    """Limit files of this process to a few kilobytes, to simulate a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_ends_only_the_timeline(tmp_path, caplog, small_files):
    path = tmp_path / "new folder" / "t.json"
    timeline = Timeline(str(path))
    for number in range(100):
        with timeline.running([f"tensor {number}"], ["ALLREDUCE"], [{}]):
            pass
    timeline.close()
    events = json.loads(path.read_text())
    assert any(event.get("args") == {"name": "tensor 5"} for event in events)
    assert len(caplog.records) == 1
    assert f"cannot write the timeline {path}: File too large" in caplog.text


def test_a_device_that_accepts_no_data(caplog):
    timeline = Timeline("/dev/full")
    with timeline.running(["tensor"], ["ALLREDUCE"], [{}]):
        pass
    timeline.close()
    assert "cannot write the timeline /dev/full: No space left on device" in caplog.text
