"""Commits on disk: complete or absent, the last few kept, damage detected, and no code run by reading them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hora.torch.elastic.durable import DurableCommits
from hora.torch.elastic.torch_state import TorchState


def write(folder: Path, *steps: int, keep: int = 3) -> DurableCommits:
    commits = DurableCommits(folder, keep=keep)
    for step in steps:
        commits.write({"step": step, "weights": torch.full((4,), float(step))})
        commits.finish()
    return commits


def test_the_last_commits_are_kept(tmp_path: Path):
    write(tmp_path, 1, 2, 3, 4, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "00000003.ckpt",
        "00000003.json",
        "00000004.ckpt",
        "00000004.json",
    ]
    content = DurableCommits(tmp_path, keep=2).read_last()
    assert content is not None
    assert content["step"] == 4
    assert torch.equal(content["weights"], torch.full((4,), 4.0))


def test_an_empty_folder_has_no_commit(tmp_path: Path):
    assert DurableCommits(tmp_path / "new", keep=1).read_last() is None


@pytest.mark.parametrize("damage", ["cut", "changed", "no manifest", "other manifest", "no payload"])
def test_a_damaged_commit_is_skipped(tmp_path: Path, damage: str):
    write(tmp_path, 1, 2)
    payload, manifest = tmp_path / "00000002.ckpt", tmp_path / "00000002.json"
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


def test_the_remains_of_a_killed_writer_are_ignored(tmp_path: Path):
    write(tmp_path, 1)
    (tmp_path / ".partial.ckpt").write_bytes(b"half")
    (tmp_path / "00000002.ckpt").write_bytes(b"killed before its manifest was there")
    commits = write(tmp_path, 2)
    content = commits.read_last()
    assert content is not None
    assert content["step"] == 2
    assert not list(tmp_path.glob(".partial*"))


class Custom:
    """A type that a commit cannot hold."""


class Spy:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return print, ("code was run",)


def test_reading_a_commit_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    commits = DurableCommits(tmp_path, keep=1)
    commits.write({"spy": Spy()})
    commits.finish()
    with pytest.raises(ValueError, match=r"00000001\.ckpt holds .*: no commit does, so the file was modified"):
        commits.read_last()
    assert "code was run" not in capsys.readouterr().out


def test_a_failed_write_is_logged_and_the_next_commit_succeeds(tmp_path: Path, caplog):
    commits = DurableCommits(tmp_path / "folder", keep=1)
    (tmp_path / "folder").rmdir()
    commits.write({"step": 1})
    commits.wait()
    assert "a commit could not be written to" in caplog.text
    (tmp_path / "folder").mkdir()
    commits.write({"step": 2})
    commits.finish()
    assert commits.read_last() == {"step": 2}


def test_training_fails_without_its_last_commit(tmp_path: Path):
    state = TorchState(step=1)
    state._rank = lambda: 0
    assert not state.persist(tmp_path / "folder")
    (tmp_path / "folder").rmdir()
    state._write(state._durable)
    with pytest.raises(RuntimeError, match="the last commit could not be written"):
        state.flush()
    (tmp_path / "folder").mkdir()
    state._num_unwritten = 1
    state.flush()
    assert state._durable.read_last()["plain"]["step"] == 1


def test_a_state_rejects_commits_of_another_state(tmp_path: Path):
    write_state(tmp_path, TorchState(model=torch.nn.Linear(2, 1), epoch=1))
    with pytest.raises(
        ValueError, match=r"belong to another state: their plain values are .*'epoch'.* this state's are .*'step'"
    ):
        TorchState(model=torch.nn.Linear(2, 1), step=1).persist(tmp_path)
    with pytest.raises(ValueError, match="their handled values are"):
        TorchState(net=torch.nn.Linear(2, 1), model=None, epoch=1).persist(tmp_path)


def write_state(folder: Path, state: TorchState) -> None:
    assert not state.persist(folder)
    state._write(state._durable)
    state._durable.finish()


def test_a_state_loads_the_newest_commit(tmp_path: Path):
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    write_state(tmp_path, TorchState(model=net, optimizer=optimizer, epoch=3, names=["a"]))
    other = torch.nn.Linear(2, 1)
    state = TorchState(model=other, optimizer=torch.optim.Adam(other.parameters()), epoch=0, names=[])
    assert state.persist(tmp_path)
    assert (state.epoch, state.names) == (3, ["a"])
    assert torch.equal(other.weight, net.weight)
    assert state.optimizer.state[other.weight]["step"] == 1


@pytest.mark.parametrize("arguments", [{"keep": 0}, {"every": 0}])
def test_numbers_below_one_are_rejected(tmp_path: Path, arguments: dict[str, int]):
    with pytest.raises(ValueError, match="must be at least 1, but it is 0"):
        TorchState(epoch=0).persist(tmp_path, **arguments)


def test_values_that_cannot_be_read_back_are_rejected(tmp_path: Path):
    with pytest.raises(ValueError, match="where cannot be part of a durable commit: it is a Custom"):
        TorchState(where=Custom()).persist(tmp_path)


def test_a_snapshot_does_not_overwrite_one_that_is_being_written(tmp_path: Path):
    net = torch.nn.Linear(2, 1)
    state = TorchState(model=net)
    state.persist(tmp_path)
    handler = state._handlers["model"]
    first = handler.committed["weight"]
    state.save()
    assert handler.committed["weight"] is first, "buffers are used again"
    handler.lent = lambda: True
    state.save()
    assert handler.committed["weight"] is not first
