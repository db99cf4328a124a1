"""Misspelt options, commands, keys, variables and log levels are named with the word that is meant."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest

from hora import logs
from hora.cli.dispatch import main
from hora.config import misspelt_variables
from hora.launch.options import read_config_file

SOURCES = Path(__file__).parents[2] / "src"


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("run --dashbord -np 2 python train.py", "--dashboard"),
        ("run --min-nump=2 -np 2 python train.py", "--min-np"),
        ("workers list --jsn", "--json"),
        ("workrs list", "workers"),
    ],
)
def test_on_the_command_line(capsys, monkeypatch, line, meant):
    monkeypatch.setattr(sys, "argv", ["hora", *line.split()])
    try:
        status = main()
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_in_a_config_file(tmp_path):
    path = tmp_path / "hora.yml"
    path.write_text("params:\n  fusion_treshold_mb: 3\ntimelne:\n  filename: x\n")
    with pytest.warns(UserWarning, match="has no effect") as found:
        read_config_file(str(path))
    texts = [str(one.message) for one in found]
    assert "did you mean params.fusion_threshold_mb?" in texts[0]
    assert "did you mean timeline?" in texts[1]


def test_variables():
    (text,) = misspelt_variables({"HORA_ENCRYP": "never", "HORA_NATIVE": "0", "HOROVOD_CYCLE_TIME": "1"})
    assert text == "the variable HORA_ENCRYP has no effect; did you mean HORA_ENCRYPT?"


def test_no_variable_of_ours_is_taken_for_a_misspelt_one():
    used = {
        name
        for path in SOURCES.rglob("*.py")
        for name in re.findall(r"\b(?:HORA|HOROVOD)_[A-Z0-9_]+\b", path.read_text())
    }
    assert len(used) > 50
    assert [*misspelt_variables(dict.fromkeys(used, ""))] == []


def test_log_levels(capsys):
    logger = logging.getLogger("hora")
    level = logger.level
    try:
        logs.set_up("debgu", hide_time=True, rank=0)
        assert "HOROVOD_LOG_LEVEL=debgu is no level; did you mean debug?" in capsys.readouterr().err
    finally:
        logger.setLevel(level)
