"""A trained model on disk: a folder with a description and the weights.

`model.json` holds names, scaling, classes and checksums; the weights are safetensors. Nothing in it is code: loading
parses JSON, checks sizes and checksums, builds a network that this package knows (or fills the one you pass) and copies
numbers into it. `save` writes on the calling rank: call it on rank 0. The checksums detect damage; they are not a
signature, because an attacker who changes the weights can change them too.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hora.errors import ModelFileError
from hora.files import replaced
from hora.telemetry.report import outbox
from hora.workflow.architectures import build

_FORMAT = "hora-model-1"
_CARD = "model.json"
_WEIGHTS = re.compile(r"^weights-[0-9a-f]{16}\.safetensors$")
_MAX_CARD_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One input of the model, and how to compute it: a category's index, or a number / divisor."""

    name: str
    categories: tuple[str, ...] | None = None
    divisor: float = 1.0

    def number(self, value: Any) -> float:
        """Return the model's input for an observed value."""
        if self.categories is not None:
            if value not in self.categories:
                raise ValueError(f"{self.name} is {value!r}, but must be one of {', '.join(self.categories)}")
            return float(self.categories.index(value))
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.name} must be a number, but it is {value!r}") from error
        if not math.isfinite(number):
            raise ValueError(f"{self.name} must be a finite number, but it is {value!r}")
        return number / self.divisor


@dataclass(frozen=True)
class Prediction:
    """The most probable class and every class's probability."""

    label: str
    probabilities: dict[str, float]

    def __str__(self) -> str:
        return f"{self.label} ({self.probabilities[self.label]:.1%})"


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """A loaded model with everything needed to use it."""

    model: torch.nn.Module
    classes: tuple[str, ...]
    features: tuple[Feature, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)

    def predict(self, observations: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Any:
        """Return a Prediction for one observation ({feature name: value}), or a list of them for a list."""
        if isinstance(observations, Mapping):
            return self.predict([observations])[0]
        if not self.features:
            raise ValueError("this model file names no features; pass a tensor to predict_tensor instead")
        rows = [self._row(observation) for observation in observations]
        return self.predict_tensor(torch.tensor(rows, dtype=torch.float32).reshape(len(rows), len(self.features)))

    def predict_tensor(self, inputs: torch.Tensor) -> list[Prediction]:
        """Return predictions for inputs that already have the model's form, one per row."""
        self.model.eval()
        with torch.no_grad():
            rows = torch.softmax(self.model(inputs).float(), dim=-1).tolist()
        return [
            Prediction(self.classes[row.index(max(row))], dict(zip(self.classes, row, strict=True))) for row in rows
        ]

    def _row(self, observation: Mapping[str, Any]) -> list[float]:
        names = [feature.name for feature in self.features]
        missing = [name for name in names if name not in observation]
        unknown = [name for name in observation if name not in names]
        if missing or unknown:
            wrong = f"lacks {', '.join(missing)}" if missing else f"has the unknown {', '.join(map(str, unknown))}"
            raise ValueError(f"an observation {wrong}; it needs {', '.join(names)}")
        return [feature.number(observation[feature.name]) for feature in self.features]


def save(
    path: str | Path,
    model: torch.nn.Module,
    *,
    classes: Sequence[str],
    features: Sequence[Feature] = (),
    notes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model to a folder, replacing an older one atomically. An MLflow run of the job keeps a copy.

    Args:
        path: The folder, created if needed.
        model: The network.
        classes: Names of the outputs.
        features: How named observations become numbers.
        notes: Anything that JSON holds, for readers.

    Returns:
        The folder.
    """
    from safetensors.torch import save as encode

    folder, plain = Path(path), getattr(model, "_orig_mod", model)
    folder.mkdir(parents=True, exist_ok=True)
    weights = encode({name: tensor.detach().cpu().contiguous().clone() for name, tensor in plain.state_dict().items()})
    digest = hashlib.sha256(weights).hexdigest()
    name = f"weights-{digest[:16]}.safetensors"
    card = {
        "format": _FORMAT,
        "architecture": getattr(plain, "architecture", None),
        "features": [asdict(feature) for feature in features],
        "classes": list(classes),
        "notes": dict(notes or {}),
        "weights": {"file": name, "num_bytes": len(weights), "sha256": digest},
    }
    # The card names the weights by their content: until the new card is in place, the old one finds its own.
    described = json.dumps({**card, "sha256": _card_digest(card)}, indent=1).encode()
    for path, content in ((folder / name, weights), (folder / _CARD, described)):
        with replaced(path, unfinished=f"{path.name}.partial") as file:
            file.write(content)
    for old in folder.iterdir():
        if old.suffix == ".partial" or (_WEIGHTS.match(old.name) and old.name != name):
            old.unlink()
    outbox.add({}, files=[folder.absolute()])
    return folder


def load(path: str | Path, model: torch.nn.Module | None = None) -> ModelFile:
    """Read a model folder.

    Args:
        path: The folder.
        model: The network to fill, if this package cannot build it by name.

    Raises:
        ModelFileError: The folder is damaged, or its weights do not fit the network.
    """
    folder = Path(path)
    card = _read_card(folder / _CARD)
    tensors = _read_weights(folder, card["weights"])
    if model is None:
        model = _empty_model(folder, card["architecture"])
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if expected != found:
        differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise ModelFileError(f"{folder}: the weights do not fit the network; they differ in {', '.join(differing[:5])}")
    try:
        model.load_state_dict(tensors, assign=True)
    except (RuntimeError, TypeError) as error:
        raise ModelFileError(f"{folder}: the weights are not numbers that the network can use ({error})") from error
    return ModelFile(
        model=model.eval(),
        classes=tuple(card["classes"]),
        features=tuple(_feature(folder, entry) for entry in card["features"]),
        notes=card["notes"],
    )


def _card_digest(card: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()


def _read_card(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_CARD_BYTES + 1)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read ({error.strerror}); is it a folder written by save()?") from error
    if len(text) > _MAX_CARD_BYTES:
        raise ModelFileError(f"{path} is larger than {_MAX_CARD_BYTES} bytes: not a model card")
    try:
        card = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not JSON: it is truncated or not a model card") from error
    if not isinstance(card, dict) or card.get("format") != _FORMAT:
        raise ModelFileError(f"{path} is not a model card of format {_FORMAT!r}")
    if card.pop("sha256", None) != _card_digest(card):
        raise ModelFileError(f"{path} has been modified since it was written: its checksum is wrong")
    shape = {"features": list, "classes": list, "notes": dict, "weights": dict}
    for key, kind in shape.items():
        if not isinstance(card.get(key), kind):
            raise ModelFileError(f"{path}: {key!r} must be a {kind.__name__}")
    if not all(isinstance(name, str) for name in card["classes"]):
        raise ModelFileError(f"{path}: 'classes' must be a list of names")
    card.setdefault("architecture", None)
    return card


def _read_weights(folder: Path, entry: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load as decode

    name, num_bytes, digest = (entry.get(key) for key in ("file", "num_bytes", "sha256"))
    if not isinstance(name, str) or not _WEIGHTS.match(name):
        raise ModelFileError(f"{folder / _CARD} names {name!r} as its weights: not a file that save() writes")
    path = folder / name
    try:
        size = path.stat().st_size
        content = path.read_bytes() if size == num_bytes else b""
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read ({error.strerror})") from error
    if size != num_bytes:
        raise ModelFileError(f"{path} has {size} bytes instead of {num_bytes}: it is truncated or another file")
    if hashlib.sha256(content).hexdigest() != digest:
        raise ModelFileError(f"{path} has been modified since it was written: its checksum is wrong")
    try:
        return decode(content)
    except (SafetensorError, ValueError, KeyError) as error:  # KeyError: a dtype that torch does not have
        raise ModelFileError(f"{path} is not a safetensors file for torch ({error})") from error


def _empty_model(folder: Path, architecture: Any) -> torch.nn.Module:
    if not isinstance(architecture, dict):
        raise ModelFileError(f"{folder} does not describe its network; pass model= to load()")
    try:
        with torch.device("meta"):  # allocate no memory before the weights are known to fit
            return build(architecture)
    except ValueError as error:
        raise ModelFileError(f"{folder}: {error}; pass model= to load()") from error


def _feature(folder: Path, entry: Any) -> Feature:
    try:
        categories = entry["categories"]
        divisor = float(entry["divisor"])
        if not (math.isfinite(divisor) and divisor):
            raise ValueError("a divisor must be a finite number other than 0")
        return Feature(
            name=str(entry["name"]),
            categories=None if categories is None else tuple(map(str, categories)),
            divisor=divisor,
        )
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise ModelFileError(f"{folder / _CARD} has a feature that cannot be understood: {str(entry)[:200]}") from error
