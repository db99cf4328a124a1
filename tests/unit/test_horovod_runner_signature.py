"""HorovodRunner's public signatures, which old code and tests inspect."""

from __future__ import annotations

import inspect

import numpy
import pytest

import sparkdl
from sparkdl import HorovodRunner


def test_constructor_takes_keywords_only_with_exactly_these_names() -> None:
    spec = inspect.getfullargspec(HorovodRunner.__init__)
    assert spec.args == ["self"]
    assert spec.varargs is None
    assert spec.varkw is None
    assert spec.kwonlyargs == ["np", "driver_log_verbosity", "dashboard", "py_files", "resources"]
    assert spec.kwonlydefaults == {
        "driver_log_verbosity": "log_callback_only",
        "dashboard": None,
        "py_files": None,
        "resources": None,
    }
    assert spec.annotations == {}


def test_run_takes_main_and_its_keywords() -> None:
    spec = inspect.getfullargspec(HorovodRunner.run)
    assert spec.args == ["self", "main"]
    assert spec.varargs is None
    assert spec.varkw == "kwargs"
    assert spec.defaults is None
    assert spec.kwonlyargs == []
    assert spec.annotations == {}


def test_positional_np_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        HorovodRunner(2)  # type: ignore[misc]


def test_np_is_kept_as_num_processor() -> None:
    assert HorovodRunner(np=-3).num_processor == -3
    assert type(HorovodRunner(np=numpy.int64(4)).num_processor) is int


@pytest.mark.parametrize("np", ["2", 2.0, None, True])
def test_np_must_be_an_integer(np: object) -> None:
    with pytest.raises((TypeError, ValueError), match="np must be an integer"):
        HorovodRunner(np=np)


@pytest.mark.parametrize("verbosity", ["ALL", "", None, "none"])
def test_unknown_verbosity_names_both_choices(verbosity: object) -> None:
    with pytest.raises(ValueError, match=r"log_callback_only.*all|all.*log_callback_only"):
        HorovodRunner(np=-1, driver_log_verbosity=verbosity)


def test_main_must_be_callable() -> None:
    with pytest.raises(ValueError, match="main must be a function"):
        HorovodRunner(np=-1).run("train.py")


def test_keywords_that_main_does_not_take_are_named_before_anything_starts() -> None:
    def main(epochs: int) -> int:
        return epochs

    with pytest.raises(TypeError, match="rate"):
        HorovodRunner(np=-4).run(main, epochs=1, rate=0.1)
    with pytest.raises(ValueError, match="epochs"):
        HorovodRunner(np=-4).run(main)


def test_np_minus_one_runs_in_the_calling_process() -> None:
    seen: list[int] = []
    assert HorovodRunner(np=-1).run(lambda: 42) == 42
    assert HorovodRunner(np=-1).run(lambda value: seen.append(value), value=7) is None
    assert seen == [7]


def test_np_minus_one_passes_the_functions_own_error_through() -> None:
    with pytest.raises(ZeroDivisionError):
        HorovodRunner(np=-1).run(lambda: 1 // 0)


def test_log_to_driver_outside_a_job_prints_and_truncates(capsys: pytest.CaptureFixture[str]) -> None:
    from sparkdl.horovod import log_to_driver

    log_to_driver("hello")
    log_to_driver("x" * 5000)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "hello"
    assert len(lines[1]) == 4000


def test_the_package_has_a_version() -> None:
    assert sparkdl.__version__
