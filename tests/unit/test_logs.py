"""Log lines: their level, their stream, the rank, and an application's own handler."""

from __future__ import annotations

import logging

import pytest

from hora import logs


@pytest.fixture
def logger():
    return logging.getLogger("hora")  # as imported; see conftest.py


def test_low_levels_are_written_to_stdout_and_high_ones_to_stderr(logger, capsys):
    logs.set_up("debug", hide_time=True, rank=3)
    logger.info("hello")
    logger.warning("careful")
    out, err = capsys.readouterr()
    assert out == "[hora INFO rank 3] hello\n"
    assert err == "[hora WARNING rank 3] careful\n"


@pytest.mark.parametrize("level", ["warning", "WARNING"])
def test_messages_below_the_level_are_dropped(logger, capsys, level):
    logs.set_up(level, hide_time=True, rank=0)
    logger.info("hello")
    logger.error("bad")
    assert capsys.readouterr() == ("", "[hora ERROR rank 0] bad\n")


def test_an_unknown_level_counts_as_warning_and_is_named(logger, capsys):
    logs.set_up("nonsense", hide_time=True, rank=0)
    logger.info("hello")
    out, err = capsys.readouterr()
    assert out == ""
    assert "HOROVOD_LOG_LEVEL=nonsense is no level; the levels are trace, debug, " in err


def test_the_time_is_shown_unless_hidden(logger, capsys):
    logs.set_up("info", hide_time=False, rank=0)
    logger.info("hello")
    assert capsys.readouterr().out.startswith("[20")


def test_setting_up_twice_writes_once(logger, capsys):
    logs.set_up("info", hide_time=True, rank=0)
    logs.set_up("info", hide_time=True, rank=1)
    logger.info("once")
    assert capsys.readouterr().out == "[hora INFO rank 1] once\n"


def test_an_applications_handler_is_kept(logger, capsys):
    own = logging.NullHandler()
    logger.addHandler(own)
    logs.set_up("info", hide_time=True, rank=0)
    assert logger.handlers == [own]
