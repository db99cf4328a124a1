"""The reader of pickles and `torch.save` files reads their data and calls no function that they name."""

from __future__ import annotations

import collections
import io
import os
import pickle
import zipfile
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from hora.safe_load import ForeignError, Vocabulary, load_pickle, load_torch

BASE = torch.arange(100.0)
VALUES: dict[str, Any] = {
    "plain": [1, 2**70, -3, 1.5, None, True, "text", b"bytes", (), (1,), (1, 2), (1, 2, 3, 4), {"a": {"b": []}}],
    "collections": [collections.OrderedDict(x=1), collections.defaultdict(dict, {1: {}}), {1, 2}, frozenset({1})],
    "builtins": [slice(1, None, 2), range(3), 1 + 2j, bytearray(b"zz"), int],
    "floats": [torch.randn(3, 4), torch.randn(3, 4).t(), torch.randn(5).bfloat16(), torch.tensor(3.0).double()],
    "others": [torch.arange(5, dtype=torch.int8), torch.tensor([True, False]), torch.randn(2, dtype=torch.complex64)],
    "empty": torch.empty(0, 3),
    "parameter": torch.nn.Parameter(torch.randn(2, 2)),
    "torch": [torch.Size([2, 3]), torch.device("cpu"), torch.float16],
    "arrays": [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)), np.empty((0, 2))],
    "numbers": [np.int64(5), np.float64(0.5), np.array(["ab", "c"]), np.arange(3, dtype=">i4"), np.array([True])],
    "state": torch.nn.Linear(2, 2).state_dict(),
    "views": [BASE[3:7], BASE[::2]],
}


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        layout = (one.dtype, one.shape, one.stride(), one.requires_grad)
        return layout == (other.dtype, other.shape, other.stride(), other.requires_grad) and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("protocol", [0, 2, 4, 5, None])
def test_pickles_of_data(name, protocol):
    value = {name: VALUES[name]}
    data = cloudpickle.dumps(value) if protocol is None else pickle.dumps(value, protocol)
    assert same(load_pickle(data).plain(), value)


@pytest.mark.parametrize("archive", [True, False])
def test_files_of_torch(archive):
    values = VALUES if archive else {name: value for name, value in VALUES.items() if name != "views"}
    file = io.BytesIO()
    torch.save(values, file, _use_new_zipfile_serialization=archive)
    found = load_torch(file.getvalue()).plain()
    assert same(found, values)
    assert found["state"]._metadata == VALUES["state"]._metadata
    if archive:
        first, second = found["views"]
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_newer_dtypes():
    values = {"float8": torch.randn(4).to(torch.float8_e4m3fn)}
    if not torch.__version__.startswith("2.3."):  # torch.save supports uint16 since 2.4
        values["half a byte more"] = torch.arange(3).to(torch.uint16)
    file = io.BytesIO()
    torch.save(values, file)
    found = load_torch(file.getvalue()).plain()
    for name, value in values.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8))


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def _object_array() -> bytes:
    """Pickle a call of the array class with an object dtype and bytes in place of pointers."""
    dtype = b"cnumpy\ndtype\nX\x01\x00\x00\x00O\x85R"
    return b"\x80\x03cnumpy\nndarray\n(K\x01\x85" + dtype + b"C\x08AAAAAAAAtR."


def _called(name: str, args: bytes = b")") -> bytes:
    return b"\x80\x04c" + name.replace(" ", "\n").encode() + b"\n" + args + b"R."


HOSTILE = {
    "a function": pickle.dumps(Bomb()),
    "a function of old": pickle.dumps(Bomb(), 0),
    "objects for an array": _object_array(),
    "objects for an array's state": pickle.dumps(np.array([Bomb], dtype=object)),
    "a constructor of arrays": _called("numpy ndarray", b"K\x01\x85\x85"),
    "an import": _called("torch.hub load"),
    "an attribute of an attribute": b"\x80\x04\x8c\x11torch.nn.functional\x8c\x09os.system\x93.",
    "a registered extension": b"\x80\x02\x82\x01.",
    "an instance with arguments": b"\x80\x02c__builtin__\nset\n(K\x01I2\nt\x81.",
    "a state for a class": b"\x80\x02ccollections\nOrderedDict\n}b.",
    "a tensor's state": b"\x80\x02ctorch\nTensor\n)\x81}b.",
    "a list in the place of a set": b"\x80\x04]\x94(K\x01\x90.",
    "a name that is no text": b"\x80\x04K\x01K\x02\x93.",
    "a reference to another file": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "nothing": b"",
    "no end": b"\x80\x02]",
    "a memo that is none": b"\x80\x02h\x07.",
    "a mark that is none": b"\x80\x02t.",
    "a storage of negative size": _called("torch Size", b"(J\xff\xff\xff\xfft\x85"),
    "a factory": _called("collections defaultdict", b"cposix\nsystem\n\x85"),
    "bytes by another codec": _called("_codecs encode", b"X\x01\x00\x00\x00aX\x03\x00\x00\x00zip\x86"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_run_nothing_and_are_rejected(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"\w"):
        load_pickle(HOSTILE[name]).plain()
    with pytest.raises(ValueError, match=r"\w"):
        load_torch(HOSTILE[name]).plain()
    assert os.listdir() == []


def test_instances_get_attributes_and_no_methods():
    def known(module: str, name: str) -> type | None:
        return torch.nn.Linear if (module, name) == ("torch.nn.modules.linear", "Linear") else None

    vocabulary = Vocabulary(instance_class=known)
    model = torch.nn.Linear(2, 1)
    found = load_pickle(pickle.dumps(model), vocabulary).plain()
    assert same(dict(found.state_dict()), dict(model.state_dict()))
    model.forward = print  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="other methods than its class"):
        load_pickle(pickle.dumps(model), vocabulary)
    del model.forward
    model._forward_hooks[0] = int
    with pytest.raises(ValueError, match="has hooks"):
        load_pickle(pickle.dumps(model), vocabulary)
    with pytest.raises(ValueError, match=r"it calls .*, which data does not need"):
        load_pickle(_called("torch.nn.modules.linear Linear", b"K\x02K\x01\x86"), vocabulary)


def test_foreign_parts_are_named_and_the_rest_can_be_used():
    file = io.BytesIO()
    torch.save({"weights": BASE, "hyper_parameters": {"x": Bomb()}, "own": [Bomb()]}, file)
    loaded = load_torch(file.getvalue())
    with pytest.raises(ForeignError, match=r"^posix\.mkdir$"):
        loaded.without("hyper_parameters").plain()
    assert same(loaded.without("hyper_parameters", "own").plain(), {"weights": BASE})
    with pytest.raises(ValueError, match="holds a list, not a dictionary"):
        load_pickle(pickle.dumps([])).without("a")


def _archive(pickled: bytes, data: bytes = b"", **entries: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", data)
        for name, content in entries.items():
            archive.writestr(f"archive/{name}", content)
    return file.getvalue()


def _tensor(num_elements: int, offset: int, size: int, stride: int) -> bytes:
    """Return the pickle of a tensor with arbitrary sizes and offsets."""
    number = lambda value: b"J" + value.to_bytes(4, "little", signed=True)  # noqa: E731
    text = lambda value: b"X" + len(value).to_bytes(4, "little") + value  # noqa: E731
    storage = (
        b"(" + text(b"storage") + b"ctorch\nFloatStorage\n" + text(b"0") + text(b"cpu") + number(num_elements) + b"tQ"
    )
    shape = number(offset) + number(size) + b"\x85" + number(stride) + b"\x85"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + shape + b"\x89NtR."


def test_a_tensor_stays_inside_its_storage():
    assert load_torch(_archive(_tensor(4, 1, 3, 1), bytes(16))).plain().shape == (3,)
    for numbers in (
        (4, 2, 3, 1),
        (4, 0, 4, 2),
        (4, -1, 3, 1),
        (4, 0, -3, 1),
        (4, 0, 2, -1),
        (3, 0, 3, 1),
        (8, 0, 8, 1),
    ):
        with pytest.raises(ValueError, match=r"beyond its storage|other than sizes|has 16 bytes"):
            load_torch(_archive(_tensor(*numbers), bytes(16)))
    with pytest.raises(ValueError, match="byte order"):
        load_torch(_archive(_tensor(4, 0, 4, 1), bytes(16), byteorder=b"big"))


def test_damaged_files_are_read_or_rejected(cases):
    """Pickles and archives with random changes raise ValueError or load; they neither crash nor raise other errors."""
    file = io.BytesIO()
    torch.save(VALUES, file)
    whole = [pickle.dumps({"v": VALUES[name]}, protocol) for name in VALUES for protocol in (2, 5)]
    whole += [*HOSTILE.values(), file.getvalue()]
    for case, chance in cases:
        data = bytearray(chance.choice(whole))
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(len(data) or 1)
            data[at : at + chance.randrange(2)] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 3)))
        for load in (load_pickle, load_torch):
            try:
                load(bytes(data))
            except ValueError:
                continue
            except Exception as error:
                pytest.fail(f"{case}: {error!r}")
