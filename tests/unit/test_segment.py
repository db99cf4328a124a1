"""Shared memory within one process: sharing by descriptor, lifetime of views, rejection of oversized segments."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from hora.engine.shm import segment as segment_module
from hora.engine.shm.segment import PAGE_BYTES, Segment, SharedMemory, Window, aligned


def test_two_mappings_see_the_same_bytes():
    segment = Segment.create(100)
    other = Segment.attach(os.dup(segment.descriptor))
    segment.tensor(8, 4, torch.bfloat16).copy_(torch.arange(4))
    assert other.tensor(8, 4, torch.bfloat16).tolist() == [0, 1, 2, 3]
    assert other.num_bytes == PAGE_BYTES
    segment.close()
    other.close()


def test_a_view_outlives_the_segment():
    segment = Segment.create(2**20)
    view = segment.tensor(4096, 1000, torch.float32)
    view.fill_(3.0)
    segment.close()
    part = view[10:20]
    del view, segment
    assert part.tolist() == [3.0] * 10


def test_nothing_is_left_after_views_and_segment_are_gone():
    num_descriptors = len(os.listdir("/proc/self/fd"))
    segment = Segment.create(2**20, label="hora-test-left")
    view = segment.tensor(0, 10, torch.int64)
    segment.close()
    del view, segment
    with open("/proc/self/maps") as maps:
        assert "hora-test-left" not in maps.read()
    assert len(os.listdir("/proc/self/fd")) == num_descriptors


def test_empty_views_are_legal():
    segment = Segment.create(1)
    assert segment.tensor(0, 0, torch.float16).numel() == 0
    segment.close()


def test_a_segment_larger_than_memory_is_rejected_before_anything_is_reserved(monkeypatch):
    # A real request of that size would bring the machine down if the check were broken.
    monkeypatch.setattr(segment_module, "available_bytes", lambda: 2**20)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("memory was reserved"))
    with pytest.raises(MemoryError, match=r"cannot reserve 2\.0 MiB .* for hora: only 1 MiB are available"):
        Segment.create(2**21)


def test_a_full_memory_file_is_rejected_with_the_same_message(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "full")

    num_descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(MemoryError, match=r"cannot reserve 2\.0 MiB .* No space left on device"):
        Segment.create(2**21)
    assert len(os.listdir("/proc/self/fd")) == num_descriptors


def test_available_memory_is_positive_and_within_the_total():
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < segment_module.available_bytes() <= total_bytes


@pytest.mark.parametrize(("num_bytes", "expected"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_alignment(num_bytes, expected):
    assert aligned(num_bytes, 64) == expected


def test_a_window_shows_a_piece_until_its_values_are_kept():
    segment = Segment.create(3 * PAGE_BYTES)
    memory = SharedMemory(segment)
    memory.reserve(PAGE_BYTES)
    piece = memory.allocate(PAGE_BYTES // 2 + 3, torch.bfloat16, copied=False)
    window = Window(piece)
    view = window.tensor[5:].view(-1)
    piece.fill_(1.0)
    assert (view == 1).all()
    view[0] = 2.0
    assert piece[5] == 2.0
    window.keep()
    piece.fill_(3.0)
    assert (view[1:] == 1).all()
    view.fill_(4.0)
    assert (piece == 3).all()
    del window
    assert (view == 4).all()
    segment.close()


def test_nothing_is_left_after_a_windows_tensors_are_gone():
    def mapped() -> int:
        with open("/proc/self/maps") as maps:
            return maps.read().count("hora-test-window")

    segment = Segment.create(2**20, label="hora-test-window")
    piece = SharedMemory(segment).allocate(2**18, torch.float32, copied=False)
    view = Window(piece).tensor[1:]
    kept = Window(piece)
    kept.keep()
    assert mapped() == 2
    del view
    assert mapped() == 1
    segment.close()
    del piece, segment, kept
    assert mapped() == 0
