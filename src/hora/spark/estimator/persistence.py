"""Saving and loading estimators and models the way pyspark.ml does: metadata in a folder that Spark writes.

A model and its optimizer also travel to the ranks and back as these bytes (`ModelAndOptimizer`), TorchScript modules
included. Parameters that JSON cannot hold are pickled; how such files are read is in `unpickling`. Stores and backends are
not kept: they belong to the place where a training runs, not to the model.
"""

from __future__ import annotations

import base64
import inspect
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import pyspark
import torch
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from hora.spark.estimator import unpickling

__all__ = [
    "ModelAndOptimizer",
    "ParamsReader",
    "ParamsWriter",
    "metadata_handle",
    "pack_model",
    "serialize_param",
    "unpack_model",
]

_NOT_KEPT = ("store", "backend")
_OLD_PACKAGE = "hora.estimator."  # where these classes were when the first files were written
_PACKAGE = "hora.spark.estimator."


class ParamsWriter(MLWriter):
    """Writes an object with parameters."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:  # noqa: N802 - pyspark's name
        values = {param.name: value for param, value in self._instance.extractParamMap().items()}
        kept = {name: value for name, value in values.items() if name not in _NOT_KEPT and value is not None}
        # All at once: an optimizer knows its model's parameters by identity.
        whole = base64.b64encode(cloudpickle.dumps(_packed(kept))).decode()
        handle = metadata_handle(self.sparkSession)
        DefaultParamsWriter.saveMetadata(self._instance, path, handle, paramMap={"params": whole})


class ParamsReader(MLReader[Any]):
    """Reads what `ParamsWriter` has written, as an object of `kind`."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> Any:
        metadata = DefaultParamsReader.loadMetadata(path, metadata_handle(self.sparkSession))
        found, wanted = str(metadata["class"]), f"{self._kind.__module__}.{self._kind.__name__}"
        if _name_now(found) != wanted:
            raise ValueError(f"{path} holds a {found}, not a {wanted}")
        instance = self._kind()
        instance._resetUid(metadata["uid"])
        instance._set(**_loaded(base64.b64decode(metadata["paramMap"]["params"]), path))
        return instance


def metadata_handle(session: Any, version: str = pyspark.__version__) -> Any:
    """What pyspark's functions for metadata want: a session since Spark 4 (Spark Connect has no context), else its context."""
    return session if int(version.split(".")[0]) >= 4 else session.sparkContext


def _loaded(data: bytes, path: str) -> dict[str, Any]:
    """The parameters in a saved file."""

    def load(pickled: bytes) -> Any:
        return unpickling.load(pickled, what=path, rename=_found_now)

    values: dict[str, Any] = load(data)
    model = values.get("model")
    if isinstance(model, ModelAndOptimizer):
        values["model"], values["optimizer"] = model.unpack(load=load)
    elif model is not None:
        values["model"] = unpack_model(model, load=load)
    if "output_cols" in values:  # its name in the first files
        values["outputCols"] = values.pop("output_cols")
    return values


def _found_now(module: str, name: str) -> tuple[str, str]:
    """Where a class of an old file is now."""
    if (module, name) == (f"{_OLD_PACKAGE}parcel", "Parcel"):
        return ModelAndOptimizer.__module__, ModelAndOptimizer.__name__
    return _name_now(module), name


def _name_now(name: str) -> str:
    return _PACKAGE + name.removeprefix(_OLD_PACKAGE) if name.startswith(_OLD_PACKAGE) else name


def _packed(values: Mapping[str, Any]) -> dict[str, Any]:
    packed = dict(values)
    if "model" in packed and "optimizer" in packed:
        packed["model"] = ModelAndOptimizer.of(packed["model"], packed.pop("optimizer"))
    elif "model" in packed:
        packed["model"] = pack_model(packed["model"])
    return packed


def serialize_param(name: str, value: Any) -> str | None:
    """A parameter as text; None for what is not kept."""
    if name in _NOT_KEPT or value is None:
        return None
    packed = pack_model(value) if isinstance(value, torch.nn.Module) else cloudpickle.dumps(value)
    return base64.b64encode(packed).decode()


def pack_model(model: torch.nn.Module) -> bytes:
    """Bytes that `unpack_model` makes the model of."""
    if isinstance(model, torch.jit.ScriptModule):
        buffer = io.BytesIO()
        torch.jit.save(model, buffer)
        return b"script" + buffer.getvalue()
    return b"pickle" + bytes(cloudpickle.dumps(model))


def unpack_model(packed: bytes, *, load: Callable[[bytes], Any] = cloudpickle.loads) -> torch.nn.Module:
    """The model, on the CPU. `load`: how to read its pickle, where it does not come from this job."""
    if packed[:6] == b"script":
        return torch.jit.load(io.BytesIO(packed[6:]), map_location="cpu")  # type: ignore[no-any-return, unused-ignore]
    model: torch.nn.Module = load(packed[6:])
    return model


@dataclass(frozen=True)
class ModelAndOptimizer:
    """A model and its optimizer, picklable."""

    model: bytes
    optimizer_class: type[torch.optim.Optimizer]
    options: dict[str, Any]
    groups: tuple[tuple[str, ...], ...]  # names of the parameters of each group
    state: dict[str, Any]

    @classmethod
    def of(cls, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> ModelAndOptimizer:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = []
        for group in optimizer.param_groups:
            if any(id(parameter) not in names for parameter in group["params"]):
                raise ValueError(
                    "the optimizer has parameters that are not the model's: make it from model.parameters()"
                )
            groups.append(tuple(names[id(parameter)] for parameter in group["params"]))
        takes = inspect.signature(type(optimizer)).parameters
        return cls(
            model=pack_model(model),
            optimizer_class=type(optimizer),
            options={name: value for name, value in optimizer.defaults.items() if name in takes},
            groups=tuple(groups),
            state=optimizer.state_dict(),
        )

    def unpack(
        self, device: torch.device | None = None, *, load: Callable[[bytes], Any] = cloudpickle.loads
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Both, on `device`."""
        model = unpack_model(self.model, load=load)
        if device is not None:
            model = model.to(device)
        named = dict(model.named_parameters())
        groups = [{"params": [named[name] for name in group]} for group in self.groups]
        optimizer = self.optimizer_class(groups, **self.options)
        optimizer.load_state_dict(self.state)
        return model, optimizer
