"""Every extra has wheels for x86_64 and aarch64 and for each Python: its own requirements, as the index lists them."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

EXTRAS = ("", "spark", "connect", "lightning", "ray", "tensorflow", "dashboard", "examples")
SOURCE_ONLY = {"pyspark"}  # pure Python, published without a wheel
# No wheels for these Pythons yet, or not for both machines.
NOT_YET = {("tensorflow", "3.14"), ("tensorflow-cpu", "3.14"), ("ray", "3.14")}
GLIBC = ("2_17", "2_24", "2_26", "2_27", "2_28", "2_34")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@cache
def _versions(package: str, machine: str, python: str) -> tuple[str, ...]:
    """Versions with a wheel for this machine and Python; none if there are none."""
    platforms = [f"manylinux_{glibc}_{machine}" for glibc in GLIBC] + [f"manylinux2014_{machine}"]
    command = [sys.executable, "-m", "pip", "index", "versions", package, "--only-binary", ":all:"]
    command += ["--python-version", python, *(f"--platform={platform}" for platform in platforms)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    if found is None and "No matching distribution" not in done.stderr:
        pytest.skip(f"no package index answers: {done.stderr[-200:]}")
    return tuple(found[1].split(", ")) if found else ()


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("extra", EXTRAS)
def test_each_requirement_of_an_extra_has_a_wheel(extra, machine, python):
    target = {"platform_machine": machine, "python_version": python, "python_full_version": f"{python}.0"}
    missing = []
    for line in requires("hora") or ():
        wanted = Requirement(line)
        with_it = wanted.marker is None or wanted.marker.evaluate(target | {"extra": extra})
        without = extra and (wanted.marker is None or wanted.marker.evaluate(target | {"extra": ""}))
        if not with_it or without or wanted.name in SOURCE_ONLY | {"hora"}:
            continue
        if (wanted.name, python) in NOT_YET:
            continue
        if not any(wanted.specifier.contains(Version(one)) for one in _versions(wanted.name, machine, python)):
            missing.append(str(wanted))
    assert not missing, f"hora[{extra}] on {machine}, Python {python}: no wheels for {missing}"
