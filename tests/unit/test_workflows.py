"""The CI workflows only call existing make targets."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def steps():
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            for step in job["steps"]:
                yield f"{path.name} {name}", job, step.get("run", "")


def test_every_target_that_a_workflow_calls_exists():
    called = set()
    for place, job, command in steps():
        named = re.findall(r"\bmake ([a-z-]+|\"\$TARGET\")", command)
        for target in named:
            wanted = job["strategy"]["matrix"]["target"] if "$" in target else [target]
            assert set(wanted) <= TARGETS, f"{place}: {set(wanted) - TARGETS} not in the Makefile"
            called |= set(wanted)
    assert {"lint", "test-unit", "wheels"} <= called


def test_every_named_file_of_an_image_exists():
    for path in (ROOT / "containers").glob("Dockerfile.*"):
        copied = re.findall(r"^COPY (.+) \S+$", path.read_text(), re.MULTILINE)
        assert copied, path
        for name in " ".join(copied).split():
            assert (ROOT / name).exists(), f"{path.name} copies {name}"
