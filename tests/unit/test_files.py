"""Files are replaced in one step, and new ones belong to their writer alone."""

from __future__ import annotations

import os
import stat

import pytest

import other_user
from hora.files import new_file, replaced


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


def _write(path):
    with os.fdopen(new_file(path), "wb") as file:
        file.write(b"mine")


def test_a_new_file_replaces_what_lies_there(tmp_path):
    old, other, path = (tmp_path / "old").open("w+b"), tmp_path / "other", tmp_path / "old"
    with old:
        old.write(b"precious")
        old.flush()
        os.link(path, other)
        path.chmod(0o666)
        _write(path)
        assert (path.read_bytes(), other.read_bytes()) == (b"mine", b"precious")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert os.fstat(old.fileno()).st_ino != path.stat().st_ino


def test_links_of_this_user_are_followed_and_devices_opened(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/link")
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "file")
    _write(tmp_path / "link")
    assert (tmp_path / "file").read_bytes() == b"mine"
    assert (tmp_path / "link").is_symlink()
    _write("/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_new_file_needs_a_place(tmp_path):
    (tmp_path / "round").symlink_to("round")
    for path, error in (("round", OSError), ("", IsADirectoryError), ("none/file", FileNotFoundError)):
        with pytest.raises(error):
            _write(tmp_path / path)


@pytest.mark.skipif(not other_user.possible, reason=other_user.WHY_NOT)
def test_links_of_others_are_replaced(tmp_path):
    victim, link = tmp_path / "precious", tmp_path / "link"
    victim.write_bytes(b"precious")
    link.symlink_to(victim)
    os.lchown(link, other_user.UID, other_user.UID)
    _write(link)
    assert (victim.read_bytes(), link.read_bytes(), link.is_symlink()) == (b"precious", b"mine", False)
