"""A job's secret in a user's file: accepted if only the user can read it, rejected with a reason otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hora.errors import AuthenticationError
from hora.net.keys import read_secret_file

TEXT = "0123456789abcdef" * 4


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.secret"
    path.write_text(TEXT + "\n")
    path.chmod(0o600)
    return path


def test_the_secret_ignores_the_line_end(file: Path):
    first = read_secret_file(str(file))
    assert len(first) == 32
    file.write_text(TEXT)
    assert read_secret_file(str(file)) == first
    file.write_text(TEXT[::-1])
    assert read_secret_file(str(file)) != first


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o660, 0o666])
def test_a_file_that_others_can_read_or_change_is_rejected(file: Path, mode: int):
    file.chmod(mode)
    with pytest.raises(AuthenticationError, match=f"HORA_SECRET_FILE={file}.*{mode:04o}.*chmod 600"):
        read_secret_file(str(file))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_group_may_read_roots_file_and_files_of_other_users_are_rejected(file: Path):
    file.chmod(0o440)
    assert read_secret_file(str(file)) == read_secret_file(str(file))
    os.chown(file, 12345, 12345)
    with pytest.raises(AuthenticationError, match="belongs to user 12345"):
        read_secret_file(str(file))


def test_invalid_files_are_rejected(tmp_path: Path, file: Path):
    file.write_text("too short")
    with pytest.raises(AuthenticationError, match=r"--secret-file=.*9 bytes.*openssl"):
        read_secret_file(str(file), named="--secret-file")
    file.write_text("x" * 70_000)
    with pytest.raises(AuthenticationError, match="a secret needs 32 to 65536"):
        read_secret_file(str(file))
    os.mkfifo(tmp_path / "pipe", 0o600)
    for other in (tmp_path / "pipe", Path("/dev/null"), tmp_path):
        with pytest.raises(AuthenticationError, match="not a regular file"):
            read_secret_file(str(other))
    for missing in (str(tmp_path / "none"), "odd\0name"):
        with pytest.raises(AuthenticationError, match="cannot read the job's secret"):
            read_secret_file(missing)
