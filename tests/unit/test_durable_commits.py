"""Commits on disk: complete or absent, the last few kept, damage recognised, no code run when they are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hora.torch.elastic.durable import DurableCommits


def write(folder: Path, *steps: int, keep: int = 3) -> DurableCommits:
    commits = DurableCommits(folder, keep=keep)
    for step in steps:
        commits.write({"step": step, "weights": torch.full((4,), float(step))})
        commits.finish()
    return commits


def test_the_last_commits_are_kept(tmp_path: Path):
    write(tmp_path, 1, 2, 3, 4, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "00000003.commit",
        "00000003.json",
        "00000004.commit",
        "00000004.json",
    ]
    content = DurableCommits(tmp_path, keep=2).read_last()
    assert content is not None
    assert content["step"] == 4
    assert torch.equal(content["weights"], torch.full((4,), 4.0))


def test_an_empty_folder_has_no_commit(tmp_path: Path):
    assert DurableCommits(tmp_path / "new", keep=1).read_last() is None


@pytest.mark.parametrize("damage", ["cut", "changed", "no manifest", "other manifest", "no payload"])
def test_a_damaged_commit_is_passed_over(tmp_path: Path, damage: str):
    write(tmp_path, 1, 2)
    payload, manifest = tmp_path / "00000002.commit", tmp_path / "00000002.json"
    if damage == "cut":
        payload.write_bytes(payload.read_bytes()[:-1])
    elif damage == "changed":
        data = bytearray(payload.read_bytes())
        data[len(data) // 2] ^= 1
        payload.write_bytes(data)
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "other manifest":
        manifest.write_text("[]")
    else:
        payload.unlink()
    content = DurableCommits(tmp_path, keep=3).read_last()
    assert content is not None
    assert content["step"] == 1


def test_a_killed_writers_remains_do_no_harm(tmp_path: Path):
    write(tmp_path, 1)
    (tmp_path / ".partial.commit").write_bytes(b"half")
    (tmp_path / "00000002.commit").write_bytes(b"killed before its manifest was there")
    commits = write(tmp_path, 2)
    content = commits.read_last()
    assert content is not None
    assert content["step"] == 2
    assert not list(tmp_path.glob(".partial*"))


class Spy:
    """Unpickling it would run code."""

    def __reduce__(self):
        return print, ("code was run",)


def test_no_code_is_run_when_a_commit_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    commits = DurableCommits(tmp_path, keep=1)
    commits.write({"spy": Spy()})
    commits.finish()
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        commits.read_last()
    assert "code was run" not in capsys.readouterr().out


def test_a_disk_that_cannot_be_written_is_told_at_the_next_commit(tmp_path: Path):
    commits = DurableCommits(tmp_path / "folder", keep=1)
    (tmp_path / "folder").rmdir()
    commits.write({"step": 1})
    with pytest.raises(RuntimeError, match="the last commit could not be written"):
        commits.finish()
