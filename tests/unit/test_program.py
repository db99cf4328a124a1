"""Which commands can run in a forked process, and what their source is."""

from __future__ import annotations

from pathlib import Path

import pytest

from hora.launch.program import Program


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("python train.py --lr 1", Program("train.py", False, ("--lr", "1"))),
        ("/opt/env/bin/python3.12 -u train.py", Program("train.py", False, ())),
        ("python3 -m package.train -x", Program("package.train", True, ("-x",))),
        ("python", None),
        ("python -c pass", None),
        ("python -m", None),
        ("sh train.sh", None),
        ("pythonic train.py", None),
    ],
)
def test_the_program_of_a_command(command: str, program: Program | None):
    assert Program.of(command.split()) == program


def test_the_source_of_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package/train.py").write_bytes(b"import torch")
    (tmp_path / "package/__main__.py").write_bytes(b"import horovod.torch")
    assert Program("package/train.py", False, ()).text() == b"import torch"
    assert Program("package.train", True, ()).text() == b"import torch"
    assert Program("package", True, ()).text() == b"import horovod.torch"
    assert Program("elsewhere", True, ()).text() == b""
