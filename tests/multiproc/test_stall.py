"""The stall report warns, names the missing rank and tensor, and shuts down only on request."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading

import psutil
import pytest
import torch

import horovod.torch as hvd
from hora import engine
from hora.engine import Kind, control_tree
from waiting import wait_until

WARN = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}
SHUTDOWN = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
TCP = {"HORA_TRANSPORT": "tcp"}


class Records(logging.Handler):
    """Collects log records; calls `when_told` with each text."""

    def __init__(self, when_told) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._when_told = when_told

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname} {record.getMessage()}")
        self._when_told(self.texts[-1])


def listen(when_told=lambda text: None) -> Records:
    records = Records(when_told)
    logging.getLogger("hora").addHandler(records)
    return records


def _late_rank_is_reported(late: int, place) -> None:
    """Let the late rank submit once rank 0 has reported it."""

    def told(text: str) -> None:
        for name in ("known", "new"):
            if f"\n{late}: [allreduce.{name}]" in text:
                place.store.set(name, "reported")

    hvd.init()
    rank, records = hvd.rank(), listen(told)
    hvd.allreduce(torch.ones(1), name="known", op=hvd.Sum)  # known tensors are watched like new ones
    for name in ("known", "new"):
        if hvd.rank() == late:
            wait_until(f"{name} has been reported", lambda name=name: place.store.check([name]))
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
def test_a_late_rank_is_reported_and_survives(place):
    _late_rank_is_reported(2, place)


@pytest.mark.ranks(2, env=WARN)
def test_the_coordinator_reports_itself(place):
    _late_rank_is_reported(0, place)


@pytest.mark.ranks(3, env=WARN | TCP)
def test_stalls_are_reported_without_shared_memory(place):
    _late_rank_is_reported(1, place)


@pytest.mark.ranks(3, env=SHUTDOWN)
def test_a_stall_ends_the_job_on_request(place):
    hvd.init()
    records = listen()
    hvd.allreduce(torch.ones(1), name="fine")
    if hvd.rank() == 1:
        place.store.wait(["ended on 0", "ended on 2"])
    with pytest.raises(hvd.HorovodInternalError, match=r"rank\(s\) 1 stalled for more than 2 s.*shut down"):
        hvd.allreduce(torch.ones(1), name="late")
    place.store.set(f"ended on {hvd.rank()}", "")
    logging.getLogger("hora").removeHandler(records)
    if hvd.rank() == 0:
        assert any(text.startswith("ERROR") and "\n1!: [allreduce.late]" in text for text in records.texts)
    hvd.shutdown()


@pytest.mark.ranks(2, env={"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_CHECK_DISABLE": "1"})
def test_stall_checks_can_be_disabled(place):
    hvd.init()
    records, looked = listen(), _count_looks()
    if hvd.rank() == 1:
        # Three checks, a second apart: with stall checks, the second one would have caused a warning.
        wait_until("it would have been reported", lambda: len(looked) >= 3)
    hvd.allreduce(torch.ones(1), name="late")
    logging.getLogger("hora").removeHandler(records)
    assert records.texts == []
    hvd.shutdown()


def _stop_inside_a_reduction() -> None:
    """Stop this process in mid-batch; its peer resumes it after the report."""
    # A signal to the process might be delivered to another thread while this one continues for a moment.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


@pytest.mark.ranks(2, env=SHUTDOWN)
def test_a_rank_stopped_inside_a_collective_ends_the_job_on_request():
    hvd.init()
    hvd.allreduce(torch.ones(1), name="fine")
    pids = hvd.allgather_object(os.getpid())
    if hvd.rank() == 1:
        transport = engine.current_runtime().sets.queue(0).transport()
        original = transport.allreduce
        transport.allreduce = lambda *a, **k: (_stop_inside_a_reduction(), original(*a, **k))
        with contextlib.suppress(hvd.HorovodInternalError):  # rank 0 has done its part, so this may even succeed
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
def test_checking_for_stalls_never_executes_a_collective(place):
    """The checking thread also hands shared memory to other ranks, so executing the first collective would deadlock.
    This happened once in many thousand starts.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_tree, "_TICK_S", 0.001)
        hvd.init()
        looked = _count_looks()
        value = torch.ones(3)
        request = engine.current_runtime().submit(Kind.ALLREDUCE, [value], outputs=[value], background=False)
        place.gather("all have submitted")
        if hvd.rank() == 0:  # here no thread waits for the collective yet
            before = len(looked)
            wait_until("it has been looked at many times", lambda: len(looked) > before + 100)
        request.result()
        assert value.tolist() == [3.0] * 3
        hvd.shutdown()


def _count_looks() -> list[int]:
    """Return a list that grows whenever the control tree's thread checks for stalls."""
    queue, looked = engine.current_runtime().sets.queue(0), []
    inspect = queue.inspect
    queue.inspect = lambda: (inspect(), looked.append(1))
    return looked
