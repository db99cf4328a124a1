"""The native library as compiled C: a short run of the stress programs of `make sanitize`, and its struct layouts."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from hora.engine.shm import native
from hora.engine.transport import native_hosts  # noqa: F401 - describes its structures

ROOT = Path(__file__).parents[2]
FLAGS = ["-O2", "-std=gnu11", "-ffp-contract=off", "-pthread", f"-I{ROOT / 'src/hora/engine/shm'}"]
# Python flattens these structures.
FLATTENED = {
    **{("repeated", name): f"record.{name}" for name in ("ticket", "digest", "instance")},
    **{("message", name): f"header.{name}" for name in ("group", "tag", "num_bytes", "kind")},
    **{(kind, name): f"row.{name}" for kind in ("job", "hosts_job") for name in ("starts", "num_tensors")},
}

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")


@pytest.mark.parametrize(("program", "number", "operations"), [("ranks", 3, 2000), ("hosts", 3, 100)])
def test_all_sums_are_correct_on_all_ranks(tmp_path: Path, program: str, number: int, operations: int):
    built = tmp_path / program
    subprocess.run(["cc", *FLAGS, "-o", built, ROOT / "tests/native" / f"{program}.c"], check=True, timeout=200)
    done = subprocess.run([built, str(number), str(operations)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert f"{operations} operations: " in done.stdout


def test_structures_have_the_same_layout_in_python_and_c(tmp_path: Path):
    program, expected = ['#include <stdio.h>\n#include "native.c"\nint main(void) {'], []
    assert {"spin_policy", "hosts_job", "records"} <= native._structures.keys()
    for name, kind in native._structures.items():
        fields = [field for field, *_ in kind._fields_]
        places = [(f"offsetof(struct {name}, {FLATTENED.get((name, field), field)})", field) for field in fields]
        program += [f'printf("%zu\\n", {place});' for place, _ in (*places, (f"sizeof(struct {name})", ""))]
        expected += [(name, field, getattr(kind, field).offset) for _, field in places]
        expected.append((name, "size", ctypes.sizeof(kind)))
    source, built = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text("\n".join([*program, "}"]))
    subprocess.run(["cc", *FLAGS, "-w", "-o", built, source], check=True, timeout=200)
    found = subprocess.run([built], check=True, timeout=60, capture_output=True, text=True).stdout.split()
    assert [(*names, int(value)) for (*names, _), value in zip(expected, found, strict=True)] == expected
