"""The summary of a test run lists skipped tests with reasons, and reruns are recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

def test_skipped(): pytest.skip("needs a dragon")

@pytest.mark.skip(reason="needs a dragon")
def test_skipped_too(): pass

seen = []

def test_flaky():
    seen.append(1)
    assert len(seen) > 1, "the first time"

@pytest.mark.containers
def test_of_a_target_of_its_own(): assert False
"""


def test_skips_are_counted_by_reason_and_reruns_are_written(pytester: pytest.Pytester):
    pytester.makeconftest((Path(__file__).parents[1] / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers =\n    containers: builds images\n")
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess("--reruns", "1", "-p", "no:xdist", "--rootdir", str(pytester.path), ".")
    result.assert_outcomes(passed=1, skipped=2, deselected=1)
    result.stdout.re_match_lines([r".*skipped, and why.*", r" +2  needs a dragon"])
    (line,) = (pytester.path / "out" / "reruns.txt").read_text().splitlines()
    assert line.endswith("::test_flaky\tAssertionError: the first time")


def test_tests_with_their_own_target_run_if_a_mark_or_a_path_names_them(pytester: pytest.Pytester):
    pytester.makeconftest((Path(__file__).parents[1] / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers =\n    containers: builds images\n")
    path = pytester.makepyfile("import pytest\n@pytest.mark.containers\ndef test_it(): pass\n")
    for arguments in (["-m", "containers", "."], [str(path)]):
        pytester.runpytest_inprocess("-p", "no:xdist", *arguments).assert_outcomes(passed=1)
