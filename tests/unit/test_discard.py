"""Letting go of a broken gloo group: its destructor may take minutes, and must never run in the caller's thread."""

from __future__ import annotations

import threading
from unittest import mock

from hora.engine.transport.gloo import GlooGroup


class ProcessGroup:
    """Tells where it was destroyed."""

    def __init__(self, destroyed_in: list[str]) -> None:
        self._destroyed_in = destroyed_in

    def __del__(self) -> None:
        self._destroyed_in.append(threading.current_thread().name)


def test_the_group_is_destroyed_in_a_thread_of_its_own_even_if_that_is_faster():
    destroyed_in: list[str] = []
    group = GlooGroup.__new__(GlooGroup)
    group._process_group = ProcessGroup(destroyed_in)
    group._connections = mock.Mock()
    start = threading.Thread.start

    def start_and_lose_the_race(thread: threading.Thread) -> None:
        start(thread)
        thread.join(10)

    with mock.patch.object(threading.Thread, "start", start_and_lose_the_race):
        group.discard()
    assert destroyed_in == ["hora-discard"]
    group._connections.shut_down.assert_called_once_with()
    group.discard()  # there is nothing left to discard
    group._connections.shut_down.assert_called_once_with()
