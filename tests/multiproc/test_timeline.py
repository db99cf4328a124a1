"""The timeline is a valid Chrome trace at every moment and shows every tensor."""

from __future__ import annotations

import json
import os
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import horovod.torch as hvd

DYNAMIC = {"HOROVOD_TIMELINE": "DYNAMIC"}


def read(path: Path) -> list[dict]:
    return json.loads(path.read_text())


def names(events: list[dict]) -> dict[int, str]:
    return {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name" and "name" in e["args"]}


@pytest.mark.ranks(1, 2, 3, env=DYNAMIC)
def test_started_and_stopped_by_the_program():
    hvd.init()
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "first.json"), Path(folder, "second.json")
        hvd.start_timeline(str(first), mark_cycles=True)
        hvd.allreduce(torch.ones(3, 4), name="a")
        hvd.grouped_allreduce([torch.ones(2), torch.ones(3)], name="g")
        hvd.barrier()
        if hvd.rank() == 0:
            read(first)  # valid while it is being written
        hvd.start_timeline(str(second))
        hvd.broadcast(torch.ones(2), 0, name="b")
        hvd.stop_timeline()
        hvd.stop_timeline()
        hvd.allreduce(torch.ones(1), name="unseen")
        if hvd.rank() == 0:
            check_first(read(first))
            check_format(read(second))
            assert "broadcast.b" in names(read(second)).values()
            assert "unseen" not in second.read_text()
        else:
            assert not first.exists()
    hvd.barrier()
    hvd.shutdown()


def check_format(events: list[dict]) -> None:
    """Check the rules of Chrome's trace events that Perfetto and chrome://tracing rely on."""
    open_spans: dict[int, list[str]] = {}
    latest: dict[int, int] = {}
    for event in events:
        phase, pid = event["ph"], event.get("pid", -1)
        assert isinstance(pid, int)
        assert isinstance(event["name"] if phase != "E" else "", str)
        assert isinstance(event.get("args", {}), dict)
        if phase == "M":
            assert event["name"] in ("process_name", "process_sort_index")
            continue
        assert isinstance(event["ts"], int)
        assert event["ts"] >= latest.get(pid, 0), event
        latest[pid] = event["ts"]
        if phase == "B":
            open_spans.setdefault(pid, []).append(event["name"])
        elif phase == "E":
            open_spans[pid].pop()
        elif phase == "X":
            assert event["dur"] >= 0
        else:
            assert (phase, event["s"]) == ("i", "g")
    assert not any(open_spans.values()), open_spans


def check_first(events: list[dict]) -> None:
    check_format(events)
    assert "start_time_since_epoch_in_micros" in events[0]["args"]
    by_pid = names(events)
    assert {"allreduce.a", "grouped_allreduce.g_1of2", "grouped_allreduce.g_2of2"} <= set(by_pid.values())
    pid = next(pid for pid, name in by_pid.items() if name == "allreduce.a")
    mine = [e for e in events if e.get("pid") == pid and e["ph"] != "M"]
    begins = [e["name"] for e in mine if e["ph"] == "B"]
    assert begins[:2] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"]
    assert sum(e["ph"] == "B" for e in mine) == sum(e["ph"] == "E" for e in mine)
    assert {e["name"] for e in mine if e["ph"] == "X"} == {str(r) for r in range(hvd.size())}
    assert mine[-1]["args"] == {"dtype": "float32", "shape": "[3, 4]"}
    assert all(a["ts"] <= b["ts"] for a, b in pairwise(mine))
    assert any(e.get("name") == "CYCLE_START" for e in events)


@pytest.mark.ranks(2)
def test_a_timeline_must_be_enabled_for_dynamic_starts():
    hvd.init()
    with pytest.raises(ValueError, match="HOROVOD_TIMELINE=DYNAMIC"):
        hvd.start_timeline("never.json")
    hvd.stop_timeline()
    hvd.shutdown()
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.start_timeline("never.json")


@pytest.mark.ranks(2)
def test_a_file_named_by_the_environment():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace", "t.json")
        os.environ["HOROVOD_TIMELINE"] = str(path)
        try:
            hvd.init()
            hvd.allreduce(torch.ones(2), name="x")
            hvd.barrier()
            hvd.shutdown()
        finally:
            del os.environ["HOROVOD_TIMELINE"]
        if int(os.environ["HOROVOD_RANK"]) == 0:
            assert "allreduce.x" in names(read(path)).values()
