"""Saved estimators and models: what each Spark is handed, and files of other classes or from before."""

from __future__ import annotations

import base64
import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter

from hora.spark.estimator import persistence
from hora.spark.estimator.persistence import metadata_handle
from hora.spark.estimator.torch_estimator import TorchEstimator
from hora.spark.estimator.torch_model import TorchModel

SESSION = SimpleNamespace(sparkContext="the context")


@pytest.mark.parametrize(
    ("version", "handle"),
    [
        ("3.3.2", "the context"),
        ("3.5.6", "the context"),
        ("4.0.0", SESSION),
        ("4.1.0.dev1", SESSION),
        ("10.0", SESSION),
    ],
)
def test_metadata_go_through_the_context_before_spark_4_and_through_the_session_since(version, handle):
    assert metadata_handle(SESSION, version) is handle


@pytest.fixture
def metadata(monkeypatch):
    """What was saved, which is then what is loaded."""
    kept: dict[str, object] = {}

    def save(instance, path, handle, paramMap):  # noqa: N803 - pyspark's name
        assert handle is metadata_handle(SESSION)
        kind = f"{type(instance).__module__}.{type(instance).__name__}"
        kept.update({"class": kind, "uid": instance.uid, "paramMap": paramMap})

    def load(path, handle):
        assert handle is metadata_handle(SESSION)
        return kept

    monkeypatch.setattr(DefaultParamsWriter, "saveMetadata", save)
    monkeypatch.setattr(DefaultParamsReader, "loadMetadata", load)
    return kept


def _model() -> TorchModel:
    torch.manual_seed(0)
    module = torch.nn.Linear(2, 1)
    return TorchModel(model=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.5), run_id="run")


def test_a_model_comes_back_with_its_optimizer_and_as_nothing_else(metadata):
    saved = _model()
    saved.write().session(SESSION).saveImpl("model")
    found = TorchModel.read().session(SESSION).load("model")
    assert found.uid == saved.uid
    assert torch.equal(found.getModel().weight, saved.getModel().weight)
    assert found.getOptimizer().param_groups[0]["params"][0] is found.getModel().weight
    with pytest.raises(ValueError, match=r"holds a .*TorchModel, not a .*TorchEstimator"):
        TorchEstimator.read().session(SESSION).load("model")


def test_files_from_before_the_package_moved_can_be_read(metadata, monkeypatch):
    saved = _model()
    old = ModuleType("hora.estimator.parcel")
    old.Parcel = type("Parcel", (), {"__module__": old.__name__})
    monkeypatch.setitem(sys.modules, "hora.estimator", ModuleType("hora.estimator"))
    monkeypatch.setitem(sys.modules, old.__name__, old)
    parcel = old.Parcel()
    parcel.__dict__.update(persistence.ModelAndOptimizer.of(saved.getModel(), saved.getOptimizer()).__dict__)
    params = base64.b64encode(pickle.dumps({"model": parcel, "run_id": "old"})).decode()
    metadata.update({"class": "hora.estimator.torch_model.TorchModel", "uid": "u", "paramMap": {"params": params}})
    monkeypatch.delitem(sys.modules, old.__name__)
    found = TorchModel.read().session(SESSION).load("model")
    assert found.getRunId() == "old"
    assert torch.equal(found.getModel().weight, saved.getModel().weight)
