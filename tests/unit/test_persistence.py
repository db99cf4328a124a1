"""Saved estimators and models: round trips, and files of other classes or older versions."""

from __future__ import annotations

import base64
import collections
import json
import os
import pickle
import struct
import sys

import cloudpickle
import numpy
import pytest
import torch
from pyspark.sql.types import FloatType

from hora.spark.estimator import persistence
from hora.spark.estimator.torch_estimator import TorchEstimator
from hora.spark.estimator.torch_model import TorchModel


class OneFile:
    """A session whose DataFrames have one row; it keeps the last one written."""

    version = "3.5.9"

    def __init__(self):
        self.kept: dict[str, object] = {}
        self.read = self

    def createDataFrame(self, rows, schema):  # noqa: N802 - pyspark's name
        assert schema == "value string"
        (self._row,) = rows
        return self

    def coalesce(self, num_partitions):
        return self

    @property
    def write(self):
        self.kept.clear()
        self.kept.update(json.loads(self._row[0]))
        return self

    def mode(self, how):
        assert how == "error"
        return self

    def text(self, path):
        assert path == "model/metadata"
        return self

    def head(self):
        return (json.dumps(self.kept),)


SESSION = OneFile()


@pytest.fixture
def metadata():
    """The saved metadata, which tests load again."""
    SESSION.kept.clear()
    return SESSION.kept


def _model() -> TorchModel:
    torch.manual_seed(0)
    module = torch.nn.Linear(2, 1)
    return TorchModel(model=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.5), run_id="run")


def test_a_model_is_restored_with_its_optimizer_and_only_as_a_model(metadata):
    saved = _model()
    saved.write().session(SESSION).saveImpl("model")
    found = TorchModel.read().session(SESSION).load("model")
    assert found.uid == saved.uid
    assert torch.equal(found.getModel().weight, saved.getModel().weight)
    assert found.getOptimizer().param_groups[0]["params"][0] is found.getModel().weight
    with pytest.raises(ValueError, match=r"holds a .*TorchModel, not a .*TorchEstimator"):
        TorchEstimator.read().session(SESSION).load("model")


class Own(torch.nn.Linear):
    """A class defined by the user."""


class Exploit:
    def __init__(self, trap):
        self.trap = trap

    def __reduce__(self):
        return os.system, (f"touch {self.trap}",)


def _tampered(metadata, params) -> None:
    metadata["paramMap"] = {"params": base64.b64encode(params).decode()}


def _hidden_in_a_storage(evil: bytes) -> bytes:
    """Return a pickle whose only name also occurs in plain pickles of tensors, and which loads another pickle."""
    return b"\x80\x04" + b"ctorch.storage\n_load_from_bytes\n" + b"(B" + struct.pack("<I", len(evil)) + evil + b"tR."


def _as_optimizer(evil: bytes) -> bytes:
    model = _model()
    packed = persistence.ModelAndOptimizer.of(model.getModel(), model.getOptimizer())
    packed.__dict__.update(optimizer_class=torch.nn.functional.relu, options={}, groups=())
    return pickle.dumps({"model": packed})


@pytest.mark.parametrize("strict", ["0", "1"])
@pytest.mark.parametrize(
    "hide",
    [
        lambda evil: evil,
        _hidden_in_a_storage,
        lambda evil: pickle.dumps({"model": b"pickle" + evil}),
        lambda evil: pickle.dumps([evil]),
        lambda evil: pickle.dumps({"model": [evil]}),
        _as_optimizer,
    ],
)
def test_a_tampered_file_runs_no_code(metadata, monkeypatch, tmp_path, hide, strict):
    trap = tmp_path / "executed"
    _model().write().session(SESSION).saveImpl("model")
    _tampered(metadata, hide(pickle.dumps(Exploit(trap))))
    monkeypatch.setenv("HORA_STRICT", strict)
    refusals = (
        r"holds posix\.system.*HORA_TRUST_FILES=1|not a file of torch|no parameters|is not bytes|is not an optimizer"
    )
    with pytest.raises(ValueError, match=refusals):
        TorchModel.read().session(SESSION).load("model")
    assert not trap.exists()


@pytest.mark.parametrize(
    "name",
    [
        "torch.hub\nload",
        "torch.nn.functional\nimportlib",
        "torch.nn.modules.module\nos.system",
        "torch\nload",
        "torch.nn.modules\nModule.__init__",
        "collections\nnamedtuple",
    ],
)
def test_names_that_resolve_outside_torch_are_rejected(name):
    with pytest.raises(ValueError, match="reading it can run any code"):
        persistence.load(b"\x80\x04c" + name.encode() + b"\n.", what="it")


def test_only_torchs_own_parts_are_read_without_trust(metadata, monkeypatch):
    monkeypatch.setenv("HORA_STRICT", "1")
    layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.5)
    layers(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    saved = TorchModel(
        model=layers,
        optimizer=optimizer,
        loss=torch.nn.functional.mse_loss,
        history=[{"loss": numpy.float64(0.5)}],
        _metadata={"x": {"dtype": torch.float32, "spark": FloatType(), "shape": numpy.arange(2)}},
    )
    saved.write().session(SESSION).saveImpl("model")
    found = TorchModel.read().session(SESSION).load("model")
    assert [*map(type, found.getModel())] == [*map(type, layers)]
    assert all(map(torch.equal, found.getModel().state_dict().values(), layers.state_dict().values()))
    assert found.getLoss() is torch.nn.functional.mse_loss


@pytest.mark.parametrize("make", [lambda: Own(2, 1), lambda: torch.jit.script(torch.nn.Linear(2, 1))])
def test_a_file_that_can_run_code_is_read_only_if_the_user_trusts_it(metadata, monkeypatch, make):
    """Such a file holds a class of the user's, or TorchScript."""
    model = make()
    TorchModel(model=model).write().session(SESSION).saveImpl("model")

    def load(reader):
        return type(reader.session(SESSION).load("model").getModel())

    kind = Own if isinstance(model, Own) else torch.jit.RecursiveScriptModule
    held = r"\w*\.?test_persistence\.Own" if kind is Own else "a model of TorchScript"
    refusal = rf"model holds {held}, and reading it can run any code.*trusted=True.*HORA_TRUST_FILES=1"
    with pytest.raises(ValueError, match=refusal):
        load(TorchModel.read())
    assert load(TorchModel.read().trusted()) is kind
    monkeypatch.setenv("HORA_TRUST_FILES", "1")
    assert load(TorchModel.read()) is kind
    monkeypatch.setenv("HORA_STRICT", "1")
    with pytest.raises(ValueError, match=refusal):
        load(TorchModel.read())
    assert load(TorchModel.read().trusted()) is kind


def test_a_class_that_the_user_names_is_trusted_and_nothing_else_in_the_file(metadata, monkeypatch):
    monkeypatch.setenv("HORA_STRICT", "1")

    def read(trusted):
        return TorchModel.read().session(SESSION).trusted(trusted).load("model")

    TorchModel(model=Own(2, 1)).write().session(SESSION).saveImpl("model")
    assert type(read([Own]).getModel()) is Own
    with pytest.raises(ValueError, match=r"holds \w*\.?test_persistence\.Own, .*trusted=\[YourClass\]"):
        read([collections.Counter])
    with pytest.raises(
        ValueError, match=r"trusted must be True, or a list of classes of your own, but it is \['Own'\]"
    ):
        read(["Own"])
    TorchModel(model=torch.jit.script(torch.nn.Linear(2, 1))).write().session(SESSION).saveImpl("model")
    with pytest.raises(ValueError, match="holds a model of TorchScript"):
        read([Own])


def loss_of_a_notebook(output, label):
    return ((output - label) ** 2).mean()


def test_objects_pickled_by_value_are_named_and_never_read_without_trust(metadata, monkeypatch):
    """Covers classes and functions defined in a notebook, and a file that only pretends to hold one."""
    monkeypatch.setenv("HORA_STRICT", "1")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        TorchModel(model=Own(2, 1)).write().session(SESSION).saveImpl("model")
        with pytest.raises(ValueError, match=r"model holds \w*\.?test_persistence\.Own, and"):
            TorchModel.read().session(SESSION).load("model")
        function = cloudpickle.dumps(loss_of_a_notebook)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    pretended = b"\x80\x04ccloudpickle.cloudpickle\n_make_function\n"
    for data, held in (
        (function, r"\w*\.?test_persistence\.loss_of_a_notebook"),
        *((pretended + end, "of its own") for end in (b".", b"N\x85R.", b"0cposix\nsystem\n.")),
    ):
        with pytest.raises(ValueError, match=held):
            persistence.load(data, what="it")
