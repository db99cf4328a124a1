"""Files are replaced in one step."""

from __future__ import annotations

import os

import pytest

from hora.files import replaced


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with replaced(path, unfinished="f.partial") as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"new", ["f"])


def test_a_failed_writer_leaves_only_the_old_file(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), replaced(path, unfinished="f.partial") as file:
        file.write("text where bytes belong")
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"old", ["f"])


def test_the_remains_of_a_killed_writer_are_replaced(tmp_path):
    (tmp_path / "f.partial").write_bytes(b"half of something that was longer")
    with replaced(tmp_path / "f", unfinished="f.partial") as file:
        file.write(b"whole")
    assert ((tmp_path / "f").read_bytes(), os.listdir(tmp_path)) == (b"whole", ["f"])


def test_a_symbolic_link_under_the_unfinished_name_is_not_followed(tmp_path):
    """Others can guess the unfinished name in a folder that they can write to."""
    victim = tmp_path / "precious"
    victim.write_bytes(b"precious")
    (tmp_path / "f.partial").symlink_to(victim)
    with replaced(tmp_path / "f", unfinished="f.partial") as file:
        file.write(b"whole")
    assert victim.read_bytes() == b"precious"
    assert not (tmp_path / "f").is_symlink()
    assert (tmp_path / "f").read_bytes() == b"whole"
