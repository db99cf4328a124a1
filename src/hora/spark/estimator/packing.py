"""Data that an estimator exchanges with its ranks, and the serialization of models for that and for saved files.

Ranks import this without Spark: `pyspark.ml` takes as long to import as torch.
"""

from __future__ import annotations

import base64
import importlib.util
import inspect
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import cloudpickle
import torch

from hora.spark.estimator.dataset import Dataset
from hora.spark.estimator.store import Store


def pack_model(model: torch.nn.Module) -> bytes:
    """Serialize a model for `unpack_model`."""
    if isinstance(model, torch.jit.ScriptModule):
        buffer = io.BytesIO()
        torch.jit.save(model, buffer)
        return b"script" + buffer.getvalue()
    return b"pickle" + bytes(cloudpickle.dumps(model))


def unpack_model(packed: bytes, *, load: Callable[[bytes], Any] = cloudpickle.loads) -> torch.nn.Module:
    """Return the model, on the CPU. `load` reads its pickle if it does not come from this job.

    Reading TorchScript can run code, so never pass untrusted bytes of it.
    """
    if is_script(packed):
        return torch.jit.load(io.BytesIO(packed[6:]), map_location="cpu")  # type: ignore[no-any-return, unused-ignore]
    model: torch.nn.Module = load(packed[6:])
    return model


def is_script(packed: bytes) -> bool:
    """Return whether these bytes are a TorchScript model."""
    return packed[:6] == b"script"


@dataclass(frozen=True)
class ModelAndOptimizer:
    """A model and its optimizer, picklable."""

    model: bytes
    optimizer_class: type[torch.optim.Optimizer]
    options: dict[str, Any]
    groups: tuple[tuple[str, ...], ...]  # parameter names of each group
    state: dict[str, Any]

    @classmethod
    def of(cls, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> ModelAndOptimizer:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = []
        for group in optimizer.param_groups:
            if any(id(parameter) not in names for parameter in group["params"]):
                raise ValueError(
                    "the optimizer has parameters that are not the model's: create it from model.parameters()"
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
        """Return both, on `device`."""
        if not (isinstance(self.optimizer_class, type) and issubclass(self.optimizer_class, torch.optim.Optimizer)):
            raise ValueError(f"{self.optimizer_class!r} is not an optimizer")
        model = unpack_model(self.model, load=load)
        if device is not None:
            model = model.to(device)
        return model, self.optimizer_of(model)

    def optimizer_of(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer, of the parameters of this model."""
        named = dict(model.named_parameters())
        groups = [{"params": [named[name] for name in group]} for group in self.groups]
        optimizer = self.optimizer_class(groups, **self.options)
        optimizer.load_state_dict(self.state)
        return optimizer


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """Configuration of a rank of any estimator."""

    model: Any = field(repr=False)  # packed: a `ModelAndOptimizer`, or bytes for the modules of `package`
    package: Any = None  # of Lightning or Keras
    store: Store
    remote: SimpleNamespace  # the store's paths for this run
    dataset: Dataset
    features: tuple[str, ...]
    values: Mapping[str, Any]  # the estimator's parameters
    # What the run resumes from: a state for `TorchEstimator`, else the bytes of its file
    checkpoint: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class TrainingResult:
    """Rank 0's report."""

    model: Any = field(repr=False)  # the trained one, as the estimator's `_create_model` takes it
    history: Any
    output_sizes: tuple[int, ...] = ()  # the number of values per row of each output
    logged_metrics: Mapping[str, Any] = field(default_factory=dict)  # what Lightning logged at the end


def as_list(value: Any) -> list[Any]:
    """Return a list or tuple as a list, and a list of anything else."""
    return list(value) if isinstance(value, list | tuple) else [value]


def to_list(var: Any, length: int) -> Any:
    """Return a list of this length; a single element is repeated, and None stays None."""
    if var is None:
        return None
    found = as_list(var)
    if len(found) not in (1, length):
        raise ValueError(f"a list of 1 or {length} elements is needed, but it has {len(found)}")
    return found * length if len(found) == 1 else found


_OTHER = b"object"


def serialize_fn() -> Callable[[Any], str]:
    """Return a function that serializes a model or any picklable object as text."""

    def serialize(value: Any) -> str:
        packed = pack_model(value) if isinstance(value, torch.nn.Module) else _OTHER + cloudpickle.dumps(value)
        return base64.b64encode(packed).decode("ascii")

    return serialize


def deserialize_fn() -> Callable[[str], Any]:
    """Return a function that deserializes such a text. It unpickles: an untrusted text can run code."""

    def deserialize(text: str) -> Any:
        packed = base64.b64decode(text)
        return cloudpickle.loads(packed[len(_OTHER) :]) if packed.startswith(_OTHER) else unpack_model(packed)

    return deserialize


def save_into_bio(obj: Any, save_obj_fn: Callable[[Any, io.BytesIO], Any]) -> io.BytesIO:
    """Return an in-memory file with the output of `save_obj_fn(obj, file)` (such as `torch.save`), at its start."""
    file = io.BytesIO()
    save_obj_fn(obj, file)
    file.seek(0)
    return file


def save_into_bio_fn() -> Callable[[Any, Callable[[Any, io.BytesIO], Any]], io.BytesIO]:
    return save_into_bio


def is_module_available(module_name: str) -> bool:
    """Return whether the module can be imported here."""
    try:
        return importlib.util.find_spec(module_name) is not None
    except ModuleNotFoundError:  # its package is missing
        return False


def is_module_available_fn() -> Callable[[str], bool]:
    return is_module_available
