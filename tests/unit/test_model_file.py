"""The model file: its content, and rejection of damaged files."""

import hashlib
import itertools
import json
import math
import pickle
import struct

import pytest
import torch

from hora.errors import ModelFileError
from hora.workflow import Feature, load, save
from hora.workflow.architectures import MLP, ResNet, build

FEATURES = (Feature(name="Island", categories=("Biscoe", "Dream")), Feature(name="Mass", divisor=100.0))


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    return save(tmp_path / "model", MLP([2, 4, 3]), classes=["a", "b", "c"], features=FEATURES, notes={"epochs": 3})


def _edit_card(folder, *, checksum=True, **changes):
    """Change the card as a careful attacker would, with a matching checksum."""
    path = folder / "model.json"
    card = json.loads(path.read_text())
    card.update(changes)
    if checksum:
        card.pop("sha256")
        card["sha256"] = hashlib.sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(card))


def _weights(folder):
    return next(folder.glob("weights-*.safetensors"))


def _replace_weights(folder, content):
    digest = hashlib.sha256(content).hexdigest()
    _weights(folder).unlink()
    name = f"weights-{digest[:16]}.safetensors"
    (folder / name).write_bytes(content)
    _edit_card(folder, weights={"file": name, "num_bytes": len(content), "sha256": digest})


def test_round_trip_keeps_weights_names_and_scaling(folder):
    torch.manual_seed(0)
    original = MLP([2, 4, 3])
    loaded = load(folder)
    for name, tensor in original.state_dict().items():
        assert torch.equal(tensor, loaded.model.state_dict()[name])
    assert loaded.features == FEATURES
    assert loaded.notes == {"epochs": 3}
    prediction = loaded.predict({"Island": "Dream", "Mass": 4200})
    row = torch.softmax(original(torch.tensor([[1.0, 42.0]])), -1)[0]
    assert list(prediction.probabilities.values()) == pytest.approx(row.tolist())
    assert prediction.label == "abc"[int(row.argmax())]
    assert prediction.label in str(prediction)
    assert loaded.predict([]) == []


def test_saving_again_replaces_the_model(folder):
    save(folder, MLP([2, 2]), classes=["x", "y"])
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".safetensors"]
    assert load(folder).classes == ("x", "y")


@pytest.mark.parametrize("depth", [18, 34, 50])
def test_a_resnet_is_rebuilt_from_its_parameters(tmp_path, depth):
    model = ResNet(depth, num_classes=3, channels=1, width=4).eval()
    images = torch.randn(2, 1, 8, 8)
    loaded = load(save(tmp_path, model, classes=["a", "b", "c"]))
    assert torch.equal(loaded.model(images), model(images))
    assert len(loaded.predict_tensor(images)) == 2
    with pytest.raises(ValueError, match="names no features"):
        loaded.predict({"x": 1})


def test_a_custom_network_must_be_passed(tmp_path):
    save(tmp_path, torch.nn.Linear(2, 2), classes=["a", "b"])
    with pytest.raises(ModelFileError, match="pass model= to load"):
        load(tmp_path)
    assert load(tmp_path, torch.nn.Linear(2, 2)).classes == ("a", "b")
    with pytest.raises(ModelFileError, match="do not fit the network; they differ in bias, weight"):
        load(tmp_path, torch.nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("observation", "match"),
    [
        ({"Island": "Dream"}, "lacks Mass; it needs Island, Mass"),
        ({"Island": "Dream", "Mass": 1, "Wings": 2}, "unknown Wings"),
        ({"Island": "Atlantis", "Mass": 1}, "Island is 'Atlantis', but must be one of Biscoe, Dream"),
        ({"Island": "Dream", "Mass": "heavy"}, "Mass must be a number"),
        ({"Island": "Dream", "Mass": float("nan")}, "Mass must be a finite number"),
    ],
)
def test_invalid_observations(folder, observation, match):
    with pytest.raises(ValueError, match=match):
        load(folder).predict(observation)


def test_every_truncation_of_either_file_is_an_error(folder):
    for path in (folder / "model.json", _weights(folder)):
        whole = path.read_bytes()
        for length in {0, 1, 7, 8, 100, len(whole) // 2, len(whole) - 1}:
            path.write_bytes(whole[:length])
            with pytest.raises(ModelFileError):
                load(folder)
        path.write_bytes(whole)
    load(folder)


def test_every_flipped_byte_is_an_error(folder):
    for path in (folder / "model.json", _weights(folder)):
        whole = path.read_bytes()
        for position in range(0, len(whole), 13):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x20]) + whole[position + 1 :])
            with pytest.raises(ModelFileError):
                load(folder)
        path.write_bytes(whole)


class _Bomb:
    def __reduce__(self):
        return (pytest.fail, ("code in a model file was run",))


def test_a_pickle_is_never_run(folder):
    _replace_weights(folder, pickle.dumps(_Bomb()))
    with pytest.raises(ModelFileError, match="not a safetensors file"):
        load(folder)
    (folder / "model.json").write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(ModelFileError, match="not JSON"):
        load(folder)


def test_other_weights_with_a_matching_checksum(folder, tmp_path):
    other = save(tmp_path / "other", MLP([2, 5, 3]), classes=["a", "b", "c"])
    _replace_weights(folder, _weights(other).read_bytes())
    with pytest.raises(ModelFileError, match="do not fit the network"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"format": "other"}, "not a model card of format"),
        ({"classes": "abc"}, "'classes' must be a list"),
        ({"classes": [1, 2]}, "'classes' must be a list of names"),
        ({"weights": {"file": "../../etc/passwd"}}, "not a file that save"),
        ({"weights": {"file": "weights-0123456789abcdef.safetensors"}}, "cannot be read"),
        ({"architecture": {"kind": "os.system"}}, "kind 'os.system' is not one of mlp, resnet"),
        ({"architecture": {"kind": "mlp", "command": "x"}}, "does not take the options"),
        ({"architecture": {"kind": "mlp", "sizes": [10**9, 10**9]}}, "sizes must be"),
        ({"architecture": {"kind": "mlp", "sizes": [10**6, 10**6, 10**6]}}, "do not fit the network"),
        ({"features": [{"name": "x"}]}, "feature that cannot be understood"),
        (
            {"features": [{"name": "x", "categories": None, "divisor": 0}]},
            "feature that cannot be understood",
        ),
    ],
)
def test_a_forged_card(folder, changes, match):
    _edit_card(folder, **changes)
    with pytest.raises(ModelFileError, match=match):
        load(folder)


def test_foreign_folders(tmp_path, folder):
    with pytest.raises(ModelFileError, match="cannot be read"):
        load(tmp_path / "nowhere")
    (folder / "model.json").write_text("[" * 100_000)
    with pytest.raises(ModelFileError, match="not JSON"):
        load(folder)
    (folder / "model.json").write_text(" " * (1 << 20) + "{}")
    with pytest.raises(ModelFileError, match="larger than"):
        load(folder)
    assert ModelFileError.__mro__[1] is ValueError


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"depth": 19}, "depth must be one of 18, 34, 50"),
        ({"width": 0}, "width must lie in"),
        ({"stem": "medium"}, "stem must be small or large"),
    ],
)
def test_a_resnet_is_validated(options, match):
    with pytest.raises(ValueError, match=match):
        build({"kind": "resnet", **options})


@pytest.mark.parametrize("dtype", ["F64", "I64", "BOOL", "F8_E4M3", "F8_E8M0", "C64", "F4", "U64", "XX"])
def test_weights_of_another_dtype_are_loaded_or_rejected_with_an_explanation(folder, dtype):
    header, _ = _header_and_data(_weights(folder).read_bytes())
    size, end = {"F64": 8, "I64": 8, "C64": 8, "U64": 8}.get(dtype, 1), 0
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = end, end + math.prod(entry["shape"]) * size
            entry |= {"dtype": dtype, "data_offsets": [start, end]}
    _replace_weights(folder, _safetensors(header, bytes(end)))
    try:
        load(folder)
    except ModelFileError:
        return
    assert dtype in ("F64", "F8_E4M3", "C64", "F8_E8M0")  # dtypes that support gradients are accepted


def _header_and_data(weights):
    (length,) = struct.unpack("<Q", weights[:8])
    return json.loads(weights[8 : 8 + length]), weights[8 + length :]


def _safetensors(header, data):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_tampered_files_load_or_raise_a_model_file_error(folder, cases):
    """Damage a few bytes of cards and weights, with matching checksums."""
    card, weights = json.loads((folder / "model.json").read_text()), _weights(folder).read_bytes()
    odd = (None, [], {}, -1, 0, 10**400, 1e308, "x", [True], [[]], {"kind": []}, {"kind": "mlp", "sizes": [10**6] * 3})
    for case, rng in itertools.islice(cases, 0, None, 8):  # fewer cases, because each writes and reads files
        changed = bytearray(weights)
        for _ in range(rng.randrange(4)):
            changed[rng.randrange(len(changed) // 2)] = rng.randrange(256)
        _replace_weights(folder, bytes(changed))
        place = rng.choice(("architecture", "features", "classes", "notes"))
        value = rng.choice(odd)
        if place == "features" and rng.random() < 0.7:
            value = [{**card["features"][1], rng.choice(("name", "categories", "divisor")): value}]
        elif place == "architecture" and rng.random() < 0.7:
            value = {**rng.choice((card["architecture"], {"kind": "resnet"})), rng.choice(("sizes", "depth")): value}
        _edit_card(
            folder, **{key: card[key] for key in ("architecture", "features", "classes", "notes")} | {place: value}
        )
        try:
            load(folder)
        except ModelFileError:
            continue
        except Exception as error:
            raise AssertionError(case) from error
