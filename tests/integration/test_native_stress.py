"""The stress programs of `make sanitize`, briefly and without a sanitizer: they fit the native part as it is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = ["-O2", "-std=gnu11", "-ffp-contract=off", "-pthread", f"-I{ROOT / 'src/hora/engine/shm'}"]


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
@pytest.mark.parametrize(("program", "number", "operations"), [("ranks", 3, 2000), ("hosts", 3, 100)])
def test_every_member_has_every_sum_right(tmp_path: Path, program: str, number: int, operations: int):
    built = tmp_path / program
    subprocess.run(["cc", *FLAGS, "-o", built, ROOT / "tests/native" / f"{program}.c"], check=True, timeout=200)
    done = subprocess.run([built, str(number), str(operations)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert f"{operations} operations: " in done.stdout
