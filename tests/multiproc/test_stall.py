"""The stall report: it really warns, names the missing rank and tensor, and shuts down only if asked to."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time

import psutil
import pytest
import torch

import horovod.torch as hvd
from hora import engine
from hora.engine import Kind, hub

WARN = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}
SHUTDOWN = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
GLOO = {"HORA_TRANSPORT": "gloo"}


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname} {record.getMessage()}")


def listen() -> Records:
    records = Records()
    logging.getLogger("hora").addHandler(records)
    return records


def _late_rank_is_reported(late: int) -> None:
    hvd.init()
    rank, records = hvd.rank(), listen()
    hvd.allreduce(torch.ones(1), name="known")  # a tensor that was agreed on before is watched like a new one
    for name in ("known", "new"):
        if hvd.rank() == late:
            time.sleep(2.6)
        assert hvd.allreduce(torch.ones(1), name=name, op=hvd.Sum).item() == hvd.size()
    hvd.barrier()
    logging.getLogger("hora").removeHandler(records)
    hvd.shutdown()
    found = "\n".join(records.texts)
    if rank == 0:
        assert "WARNING" in found
        assert f"\n{late}: [allreduce.known]" in found
        assert f"\n{late}: [allreduce.new]" in found
    else:
        assert found == ""


@pytest.mark.ranks(3, env=WARN)
def test_a_rank_that_only_sleeps_is_reported_and_lives():
    _late_rank_is_reported(2)


@pytest.mark.ranks(2, env=WARN)
def test_the_coordinator_reports_itself():
    _late_rank_is_reported(0)


@pytest.mark.ranks(3, env=WARN | GLOO)
def test_without_shared_memory_too():
    _late_rank_is_reported(1)


@pytest.mark.ranks(3, env=SHUTDOWN)
def test_a_stall_ends_the_job_when_asked_to():
    hvd.init()
    records = listen()
    hvd.allreduce(torch.ones(1), name="fine")
    if hvd.rank() == 1:
        time.sleep(5)
    with pytest.raises(hvd.HorovodInternalError, match=r"rank\(s\) 1 stalled for more than 2 s.*shut down"):
        hvd.allreduce(torch.ones(1), name="late")
    logging.getLogger("hora").removeHandler(records)
    if hvd.rank() == 0:
        assert any(text.startswith("ERROR") and "\n1!: [allreduce.late]" in text for text in records.texts)
    hvd.shutdown()


@pytest.mark.ranks(2, env={"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_CHECK_DISABLE": "1"})
def test_it_can_be_switched_off():
    hvd.init()
    records = listen()
    if hvd.rank() == 1:
        time.sleep(2.5)
    hvd.allreduce(torch.ones(1), name="late")
    logging.getLogger("hora").removeHandler(records)
    assert records.texts == []
    hvd.shutdown()


def _stop_inside_a_reduction() -> None:
    """The process stops itself in mid-batch and is woken by its peer after the verdict."""
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.ranks(2, env=SHUTDOWN)
def test_a_rank_stopped_inside_a_collective_ends_the_job_when_asked_to():
    hvd.init()
    hvd.allreduce(torch.ones(1), name="fine")
    pids = hvd.allgather_object(os.getpid())
    if hvd.rank() == 1:
        transport = engine.current_runtime().process_sets.queue(0).transport()
        original = transport.allreduce
        transport.allreduce = lambda *a, **k: (_stop_inside_a_reduction(), original(*a, **k))
        with contextlib.suppress(hvd.HorovodInternalError):  # rank 0 has done its part: this may even succeed
            hvd.allreduce(torch.ones(1), name="stopped")
        with pytest.raises(hvd.HorovodInternalError, match="waiting for more than 2 s"):
            hvd.allreduce(torch.ones(1), name="later")
    else:
        try:
            with pytest.raises(hvd.HorovodInternalError, match=r"rank\(s\) 1 .*waiting for more than 2 s"):
                hvd.allreduce(torch.ones(1), name="stopped")
        finally:
            psutil.Process(pids[1]).resume()
    hvd.shutdown()


@pytest.mark.ranks(3)
def test_looking_for_stalls_never_takes_part_in_a_collective(monkeypatch):
    """The thread that looks also hands shared memory to the other ranks: were it to carry out the first collective, they
    would wait for it and it for them. That happened, once in many thousand starts."""
    monkeypatch.setattr(hub, "_TICK_S", 0.001)
    hvd.init()
    value = torch.ones(3)
    handle = engine.current_runtime().submit(Kind.ALLREDUCE, [value], outputs=[value], background=False)
    if hvd.rank() == 0:
        time.sleep(0.5)  # all have submitted, and on this rank nobody waits for it yet
    engine.current_runtime().synchronize(handle)
    assert value.tolist() == [3.0] * 3
    hvd.shutdown()
