"""The small public tools of `horovod.common.util`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from types import SimpleNamespace

import pytest
import torch

from horovod.common import util
from horovod.common.exceptions import HorovodVersionMismatchError


def test_extensions():
    assert util.EXTENSIONS == ["tensorflow", "torch", "mxnet"]
    tensorflow = importlib.util.find_spec("tensorflow") is not None
    assert [util.extension_available(name) for name in util.EXTENSIONS] == [tensorflow, True, False]
    assert util.gpu_available("torch") == torch.cuda.is_available()
    assert util.gpu_available("mxnet") is None
    answers = [util.mpi_built(), util.gloo_built(), util.ddl_built(), util.ccl_built()]
    assert answers == [False, True, False, False]
    assert type(util.nccl_built()) is bool


def test_verbose_prints_a_message(capsys):
    util.extension_available("mxnet", True)
    assert capsys.readouterr().out == "horovod.mxnet is not available\n"


def test_check_extension():
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", "somewhere")
    with pytest.raises(ImportError, match=r"horovod\.mxnet is not available"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", "somewhere", "mpi_lib")


def test_env_sets_and_restores(monkeypatch):
    monkeypatch.setenv("HORA_TEST_A", "before")
    with util.env(HORA_TEST_A="inside", HORA_TEST_B="new", HORA_TEST_C=None):
        assert (os.environ["HORA_TEST_A"], os.environ["HORA_TEST_B"]) == ("inside", "new")
        assert "HORA_TEST_C" not in os.environ
    assert os.environ["HORA_TEST_A"] == "before"
    assert "HORA_TEST_B" not in os.environ


def test_numbers_and_lists():
    assert [n for n in range(-2, 17) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8, 16]
    assert util.split_list([1, 2, 3, 4, 5, 6, 7], 3) == [[1, 2, 3], [4, 5], [6, 7]]
    assert util.split_list([1], 3) == [[1], [], []]
    assert [util.is_iterable(x) for x in ([], "a", iter([]), 3, None)] == [True, True, True, False, False]


def test_versions():
    assert util.is_version_greater_equal_than("1.10.0", "1.9.0")
    assert util.is_version_greater_equal_than("2.13.0+cpu", "2.13.0")
    assert util.is_version_greater_equal_than("2.0.0a0+git123", "2.0.0")
    assert not util.is_version_greater_equal_than("1.9", "1.9.1")
    for ver, target in ((1.9, "1.9.0"), ("1.9.0", 1), ("1.9.0", "1.9"), ("1.9.0", "1.9.0.0")):
        with pytest.raises(ValueError, match="version"):
            util.is_version_greater_equal_than(ver, target)


def test_installed_version(recwarn):
    installed = importlib.metadata.version("torch")
    util.check_installed_version("torch", installed)
    util.check_installed_version("no-such-distribution", "1")
    assert not recwarn
    with pytest.warns(UserWarning, match="0.1"):
        util.check_installed_version("torch", "0.1")
    with pytest.raises(HorovodVersionMismatchError) as caught:
        util.check_installed_version("torch", "0.1", OSError("undefined symbol"))
    assert caught.value.installed_version == installed


def test_average_function():
    choose = util.get_average_backwards_compatibility_fun(SimpleNamespace(Average="A", Sum="S"))
    assert choose(None, None) == "A"
    assert choose("S", None) == "S"
    with pytest.warns(DeprecationWarning, match="op"):
        assert choose(None, True) == "A"
    with pytest.warns(DeprecationWarning, match="op"):
        assert choose(None, False) == "S"
    with pytest.raises(ValueError, match="op parameter supersedes average"):
        choose("S", False)


def test_cache():
    calls = []

    @util._cache
    def double(x):
        calls.append(x)
        return 2 * x

    assert [double(2), double(2), double(3)] == [4, 4, 6]
    assert calls == [2, 3]
