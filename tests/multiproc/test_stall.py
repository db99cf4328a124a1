"""The stall report: it really warns, names the missing rank and tensor, and shuts down only if asked to."""

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
    """What is logged here; `when_told` is called with each text."""

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
    """The late rank comes when rank 0 has complained about it."""

    def told(text: str) -> None:
        for name in ("known", "new"):
            if f"\n{late}: [allreduce.{name}]" in text:
                place.store.set(name, "reported")

    hvd.init()
    rank, records = hvd.rank(), listen(told)
    hvd.allreduce(
        torch.ones(1), name="known", op=hvd.Sum
    )  # a tensor that was agreed on before is watched like a new one
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
def test_a_rank_that_only_sleeps_is_reported_and_lives(place):
    _late_rank_is_reported(2, place)


@pytest.mark.ranks(2, env=WARN)
def test_the_coordinator_reports_itself(place):
    _late_rank_is_reported(0, place)


@pytest.mark.ranks(3, env=WARN | TCP)
def test_without_shared_memory_too(place):
    _late_rank_is_reported(1, place)


@pytest.mark.ranks(3, env=SHUTDOWN)
def test_a_stall_ends_the_job_when_asked_to(place):
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
def test_it_can_be_switched_off(place):
    hvd.init()
    records, looked = listen(), _count_looks()
    if hvd.rank() == 1:
        # Three looks, a second apart: another world would have been told after the second.
        wait_until("it would have been reported", lambda: len(looked) >= 3)
    hvd.allreduce(torch.ones(1), name="late")
    logging.getLogger("hora").removeHandler(records)
    assert records.texts == []
    hvd.shutdown()


def _stop_inside_a_reduction() -> None:
    """The process stops itself in mid-batch and is woken by its peer after the verdict."""
    # A signal to the process may be taken by another thread, while this one goes on for a moment.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


@pytest.mark.ranks(2, env=SHUTDOWN)
def test_a_rank_stopped_inside_a_collective_ends_the_job_when_asked_to():
    hvd.init()
    hvd.allreduce(torch.ones(1), name="fine")
    pids = hvd.allgather_object(os.getpid())
    if hvd.rank() == 1:
        transport = engine.current_runtime().sets.queue(0).transport()
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
def test_looking_for_stalls_never_takes_part_in_a_collective(place):
    """The thread that looks also hands shared memory to the other ranks: were it to carry out the first collective,
    they would wait for it and it for them. That happened, once in many thousand starts.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_tree, "_TICK_S", 0.001)
        hvd.init()
        looked = _count_looks()
        value = torch.ones(3)
        request = engine.current_runtime().submit(Kind.ALLREDUCE, [value], outputs=[value], background=False)
        place.gather("all have submitted")
        if hvd.rank() == 0:  # where no thread waits for it yet
            before = len(looked)
            wait_until("it has been looked at many times", lambda: len(looked) > before + 100)
        request.result()
        assert value.tolist() == [3.0] * 3
        hvd.shutdown()


def _count_looks() -> list[int]:
    """A list that grows whenever the control tree's thread looks for stalls."""
    queue, looked = engine.current_runtime().sets.queue(0), []
    inspect = queue.inspect
    queue.inspect = lambda: (inspect(), looked.append(1))
    return looked
